"""Comparing servers and policies under the same load: alternating runs, paired ratios, a verdict in words."""
