"""The simulated engine: vLLM V1's scheduler, decision by decision.

scheduler     a step from top to bottom: what it computes, and its results
state         the scheduler's data: the state of each request, the time, a step
driver_port   what the driver sees of the engine, and does to its blocks
config        the engine's settings
"""
