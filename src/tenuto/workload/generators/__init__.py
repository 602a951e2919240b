"""Generators of workloads from published figures."""
