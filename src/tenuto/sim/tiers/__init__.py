"""Tiers: host memory and disk that hold KV below the simulated GPU."""
