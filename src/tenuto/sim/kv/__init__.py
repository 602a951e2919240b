"""The simulated KV cache, with runs of blocks instead of single ones.

    kv_cache ─► groups ─► request ─► pool

`kv_cache` answers with prefix hits and slots for tokens; `groups` has each request's blocks in each kind of
layers; `pool` has the free queue and all cached blocks, and tells which content is equal to which.
"""
