"""Workloads made from published figures."""
