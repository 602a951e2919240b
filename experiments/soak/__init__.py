"""Long runs under random faults: on vLLM's scheduler without workers, and on a live server."""
