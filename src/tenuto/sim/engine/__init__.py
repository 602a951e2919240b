"""The simulated engine: vLLM V1's scheduler, decision by decision.

scheduler     a step from top to bottom: what it computes, and what a computed one brings
state         what it works on: where each request stands, the time, a step
driver_port   what the driver sees of the engine, and does to its blocks
config        the engine's settings
"""
