"""The simulated KV cache, with runs of blocks instead of single ones.

    kv_cache ─► groups ─► request ─► pool

`kv_cache` finds prefix hits and takes slots for tokens. `groups` has each request's blocks in each layer
group. `pool` has the free queue and all cached blocks, and knows which content is equal.
"""
