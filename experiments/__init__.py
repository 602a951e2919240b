"""Scripts that make a table, a figure or a demonstration."""
