"""The simulator: an engine shaped like vLLM V1 in virtual time, with GPU step costs and memory tiers."""
