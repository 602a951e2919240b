"""`tenuto control`: change what a live server does."""

from __future__ import annotations

from tenuto.cli.command import Command, Given, Part
from tenuto.client.control import ControlOptions

_SUMMARY = """\
Show or change what a live server does, without a restart: the mode, the policy, its limits, a canary.
No request is lost. A wrong change is refused, and the server stays as it was.
"""

_EXAMPLES = """\
examples:
  tenuto control status --url http://localhost:8000
  tenuto control off --url http://localhost:8000               drop all leases, serve as stock vLLM
  tenuto control on --url http://localhost:8000
  tenuto control shadow --url http://localhost:8000            decide and count, change nothing
  tenuto control set --url http://localhost:8000 --policy continuum --limit max_lease_s=60
  tenuto control set --url http://localhost:8000 --canary-share 0.1
  tenuto control release --url http://localhost:8000 --job task-17
"""

_NOTES = """\
The server must have been started with the environment variable TENUTO_ADMIN_KEY, and this command needs the
same key. Only release does not need it: a client ends its own jobs, with its own API key.

Exit status: 0 if every data-parallel rank confirmed; 1 if a rank did not answer in time (ask for the status,
and try again); 2 if the server refused, or does not answer.
"""


def run(given: Given) -> int:
    """Ask the server, and print its answer."""
    from tenuto.client.control import control

    status, text = control(given.read(ControlOptions))
    print(text)
    return status


COMMAND = Command(
    _SUMMARY,
    _EXAMPLES,
    (Part(ControlOptions),),
    run,
    notes=_NOTES,
    main=(
        "action",
        "url",
        "policy",
        "options",
        "limits",
        "canary_share",
        "no_canary",
        "job",
        "admin_key",
        "as_json",
    ),
)
