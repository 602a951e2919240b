"""Yardsticks that know or have what no server does."""
