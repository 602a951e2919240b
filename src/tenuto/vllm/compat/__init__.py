"""All that Tenuto knows of vLLM's internals, and nothing else: a new release of vLLM needs changes only here.

- `scheduler`: its methods, requests, and the block pool
- `groups`: models with several layer groups
- `offload`: memory below the GPU
- `process`: the engine's process, its API servers, and the configuration
- `origin`: what KV depends on
- `check`: the one list of the names that are needed, looked up at start

Outside this room only the names in `check.PUBLIC` are used. Where a release has one of them under another
name, give the class the old one too, here.
"""
