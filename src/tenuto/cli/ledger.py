"""`tenuto ledger`: what jobs and tenants used on a live server."""

from __future__ import annotations

import sys

from tenuto.cli.command import Command, Given, Part
from tenuto.client.ledger import LedgerOptions

_SUMMARY = """\
Show what jobs and tenants used on a live server: tokens read from the cache, loaded, computed, computed again
and stored, and blocks held on GPU, host and disk, times seconds.
"""

_EXAMPLES = """\
examples:
  tenuto ledger --url http://localhost:8000
  tenuto ledger --url http://localhost:8000 --csv ledger.csv
  tenuto ledger --url http://localhost:8000 --job task-17        a client's own job
"""

_NOTES = """\
The figures are totals since the server started, and of its jobs those that it still remembers. The server
must have been started with the environment variable TENUTO_ADMIN_KEY, and this command needs the same key; a
client may ask for its own job without. `tenuto simulate --ledger FILE` writes the same table, so that a price
can be tried before it is charged.
"""


def run(given: Given) -> int:
    """Ask the server, and print or write its accounts."""
    from tenuto.client.ledger import format_rows, read_ledger, write_rows

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
