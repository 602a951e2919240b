"""Many simulated runs: a grid of setups and loads, its table, and the fewest GPUs that meet a target."""
