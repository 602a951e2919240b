"""Clients of live servers: HTTP lives here."""
