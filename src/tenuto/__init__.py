"""Tenuto holds an LLM agent's KV cache through its tool calls, inside stock vLLM.

Importing this package is instant: it loads neither torch nor vLLM. The scheduler vLLM loads is
`tenuto.vllm.Scheduler`.
"""

__version__ = "0.1.0"
