"""Clients that crowd others out, in the simulator and against live servers."""
