"""The simulated engine: vLLM V1's scheduler, decision by decision."""
