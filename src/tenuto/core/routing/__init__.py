"""Routing over several engines: what a router is, and the books that are kept for it."""
