"""The simulated engine: vLLM V1's scheduler, decision by decision.

scheduler ─► passes ─► loading ─► driver ─► driver_port        what the next step computes
          ─► progress                                          what a computed step brings

fork_pass    the running pass of the Continuum prototype
state        where each request stands, and the time: the only thing that they all change
step         what one step computes
config       the engine's settings
"""
