"""The records of runs: one schema, one reader, one writer, and one definition of each metric."""
