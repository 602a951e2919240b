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
    plan         the fewest GPUs that meet a target; a search, and its table
    steady       one machine, simulated until it is steady
    compare      a grid of setups and loads, and its table
    memory       where a machine's memory goes; no simulation
    run          one run: its record, and the records of its steps in a trace
    fidelity     how far predictions were off, by kind of machine
    fleet        what stands before several engines: a router, faults, links
    simulation   the clients of one engine or of several
    event_loop   what happens next: the one loop of a simulation, a fleet and the server
    machine      from the names and numbers of a setup to the parts of an engine
    setup        these names and numbers: the options of a machine and of a fleet
    engine       vLLM V1's scheduler, decision by decision
    tiers        copies between the GPU and the tiers below it
    kv           the KV cache: requests' blocks, prefix hits, the free queue
    cost         step times: measured tables, a roofline, or a fit to observed steps
    hardware     GPUs, models, and how much memory is left for KV
"""
