"""Converts one trace format to another: writers for the formats, and importers of agents' own logs."""
