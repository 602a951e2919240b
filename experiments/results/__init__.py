"""The tables of docs/results.md: what runs in each (`rows`), and how it is written down (`tables`)."""
