"""Routers over simulated fleets: what each is worth, and how a simulation grows with its size."""
