"""Tiers below the GPU inside vLLM: host memory and disk, behind vLLM's own OffloadingConnector."""
