"""One file per format: public traces, agents' logs, Tenuto's own."""
