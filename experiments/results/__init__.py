"""The tables of docs/lab.md: what runs in each (`rows`), and how it is written down (`tables`)."""
