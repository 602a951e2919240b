"""Several simulated engines behind a router."""
