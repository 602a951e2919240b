"""Tiers below the GPU inside vLLM: host memory and disk, through vLLM's own OffloadingConnector."""
