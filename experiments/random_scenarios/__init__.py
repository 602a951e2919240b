"""Policies on scenarios that nobody chose: whole machines, jobs and loads, drawn from one broad prior."""
