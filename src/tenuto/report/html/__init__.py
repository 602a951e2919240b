"""One HTML page, figures and a Chrome trace from the records of runs."""
