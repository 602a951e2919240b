"""What happened in a run: its records read back, what was lost and why, in words."""
