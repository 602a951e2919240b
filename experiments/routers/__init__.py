"""Tenuto's servers behind routers that exist."""
