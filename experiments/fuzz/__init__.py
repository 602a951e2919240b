"""Fuzzing of every parser that reads what strangers write."""
