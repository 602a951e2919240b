"""`tenuto ledger`: what jobs and tenants used on a live server."""

from __future__ import annotations

import sys

from tenuto.cli.command import Command, Given, Part
from tenuto.client.control import LedgerOptions

_SUMMARY = """\
Show what jobs and tenants used on a live server: tokens read from the cache, loaded, computed, computed again
and stored, and block-seconds on GPU, host and disk.
"""

_EXAMPLES = """\
examples:
  tenuto ledger --url http://localhost:8000
  tenuto ledger --url http://localhost:8000 --csv ledger.csv
  tenuto ledger --url http://localhost:8000 --job task-17        a client's own job
"""

_NOTES = """\
The figures are totals since the server started. Only jobs that it still remembers are listed. The server must
have been started with the environment variable TENUTO_ADMIN_KEY, and this command needs the same key. A
client does not need it to ask for its own job. `tenuto simulate --ledger FILE` writes the same table, so that
a price can be tried before it is charged.
"""


def run(given: Given) -> int:
    """Ask the server, and print or write its accounts."""
    from tenuto.client.control import format_rows, read_ledger, write_rows

    options = given.read(LedgerOptions)
    rows, note = read_ledger(options)
    if note:
        print(f"[ledger] {note}", file=sys.stderr)
    if options.csv is None:
        print(format_rows(rows))
    else:
        write_rows(options.csv, rows)
    return 0


COMMAND = Command(_SUMMARY, _EXAMPLES, (Part(LedgerOptions),), run, notes=_NOTES)
