"""The operator's control of a live server: what runs there, and changes of it."""
