"""All uses of vLLM's internals. A new release of vLLM needs changes only here.

- `scheduler`: the scheduler's methods, requests, and the block pool
- `groups`: models with several layer groups
- `offload`: memory below the GPU
- `process`: the engine's process, its API servers, and the configuration
- `origin`: what KV depends on
- `check`: the list of all names that are needed, checked at start

Outside this package, only the names in `check.PUBLIC` are used. If a release renames one of them, add an
alias with the old name here.
"""
