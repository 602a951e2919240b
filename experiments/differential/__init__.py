"""The simulator beside vLLM's scheduler, on random workloads of many seeds."""
