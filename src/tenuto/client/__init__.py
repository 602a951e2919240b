"""Clients of live servers: load, verify, comparisons, timing of steps."""
