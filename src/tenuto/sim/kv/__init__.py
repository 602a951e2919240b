"""The simulated KV cache, with runs of blocks instead of single ones.

    kv_cache ─► attention, states ─► pool ─► segments
       └─► hits, request

`kv_cache` answers with prefix hits and slots for tokens; each layer group is one of `attention` or `states`.
`request` has a turn's block tables. `pool` has the free queue and all cached blocks. `segments` tells which
content is equal to which, and has rows: the blocks of one request or lease.
"""
