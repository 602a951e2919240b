"""Requests to an OpenAI-compatible server: bodies, prompts, streams."""
