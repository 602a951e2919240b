"""What runs leave behind: one schema, one reader, one writer, one definition of each metric."""
