"""Every policy still decides as its kept digests say: a slice of `python -m experiments.same_decisions`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from experiments.results.rows import TABLES
from experiments.same_decisions import KEPT, digest_cell

EVERY = 79
RECORDS = [json.loads(line) for line in KEPT.read_text(encoding="utf-8").splitlines()]


def get_place(record: dict[str, Any]) -> tuple[str, str, str]:
    return record["table"], record["row"], record["policy"]


def test_every_cell_has_one_digest() -> None:
    tables = dict.fromkeys(record["table"] for record in RECORDS)
    cells = [
        (table, row.title, policy)
        for table in tables
        for row in TABLES[table].make_rows()
        for policy in TABLES[table].policies
    ]
    assert sorted(cells) == sorted(map(get_place, RECORDS))


@pytest.mark.slow
@pytest.mark.parametrize("record", RECORDS[::EVERY], ids=lambda each: "-".join(get_place(each)))
def test_decisions_are_those_of_the_digest(record: dict[str, Any]) -> None:
    """If a change is meant to decide otherwise, renew the digests with `--write` and say so."""
    assert digest_cell(get_place(record)) == record
