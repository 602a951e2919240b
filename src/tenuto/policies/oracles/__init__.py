"""Oracles: policies for comparison that know what no server can know."""
