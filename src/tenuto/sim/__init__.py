"""The simulator: jobs on a simulated engine, with a policy, on virtual time.

    Setup ─► machine ─► Machine ──┐          GPU, model, KV cache size, step cost, tiers, policy
    LoadOptions ─► Workload ──────┴─► run ─► record of the run

    run ─► simulation ─► event_loop ─► engine.scheduler ─► kv    which blocks hold what
           clients,         │              │   │   └─────► tiers   what host memory and disk hold
           turn driver      │              │   └─────────► core.driver ─► the policy
                            │              └ the next step
                            └────────────► cost ─► hardware      how long a step takes on this GPU

Rooms, each built on those below it:

    server       the engine behind an OpenAI-compatible server, in real time
    sweep        many runs: a grid of setups and loads, its table; the fewest GPUs that meet a target
    run          one run, and its record (`result`)
    machine      from the names and numbers of a setup to the parts of an engine
    fleet        what stands before several engines: a router, faults, links
    simulation   the clients of one engine or of several
    event_loop   what happens next: the one loop of a simulation, a fleet and the server
    engine       vLLM V1's scheduler, decision by decision
    tiers        copies between the GPU and the tiers below it
    kv           the KV cache: requests' blocks, prefix hits, the free queue
    cost         step times: measured tables, a roofline, or a fit to observed steps
    hardware     GPUs, models, and how much memory is left for KV
"""
