"""Simulated runs: an engine from its options, one run, a sweep of many, the fewest GPUs that do."""
