"""Routers: one file each, and the file's name is the router's. `tenuto` is Tenuto's own."""
