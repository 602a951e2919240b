"""The simulated engine: vLLM V1's scheduler, decision by decision.

`Scheduler` puts the parts together and passes each the others that it needs; no part knows the scheduler.

    scheduler ─► running_pass, waiting_pass ─► preemption, loading ─► allocator ─► driver ─► driver_port
              ─► progress, fast_forward

    fork_pass    the running pass of the Continuum prototype
    state        where each request stands, and the time: the only thing that they all change
    waiting      the queue of waiting requests
    step         what one step computes
    config       the engine's settings
"""
