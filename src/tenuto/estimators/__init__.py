"""What is learned online: tool times, turn counts, step cost. Pure functions of samples."""
