"""One file a format: public traces, agents' logs, Tenuto's own."""
