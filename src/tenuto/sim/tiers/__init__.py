"""Host memory and disk behind the simulated GPU."""
