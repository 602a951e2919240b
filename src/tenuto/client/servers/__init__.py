"""Servers on this machine, and their `/metrics`."""
