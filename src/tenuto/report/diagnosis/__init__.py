"""Explains a run from its records: what happened, which tokens were lost, and why."""
