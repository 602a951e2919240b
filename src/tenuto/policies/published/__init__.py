"""Policies as their papers and prototypes describe them."""
