"""Records the requests of agents to a server: a proxy that passes everything on, and its recorder."""
