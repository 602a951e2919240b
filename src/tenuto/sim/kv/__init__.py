"""The simulated KV cache, with runs of blocks instead of single ones.

    kv_cache ─► pool ─► copies ─► rows ─► segments
       └─► request

`kv_cache` answers with prefix hits and slots for tokens, and `request` has a turn's block tables. `pool` has
the free queue and all cached blocks; `copies` knows which of several copies is hit. A row is the blocks of
one request or lease. `segments` tells which content is equal to which.
"""
