"""From one trace format to another: writers beside the readers, and importers of agents' own logs."""
