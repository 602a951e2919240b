"""The simulated engine behind an OpenAI-compatible HTTP server."""
