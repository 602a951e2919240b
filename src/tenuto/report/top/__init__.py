"""`tenuto top`: a live view of a server, from its `/metrics` alone."""
