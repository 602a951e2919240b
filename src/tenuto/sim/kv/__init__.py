"""The simulated KV cache: runs of blocks instead of single ones."""
