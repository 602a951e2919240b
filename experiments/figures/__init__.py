"""The comparisons that the Continuum paper draws, simulated: one command for each figure."""
