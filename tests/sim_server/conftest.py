"""Servers that the tests of one module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sim_server.live import Live, serve


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    """A quick server with policy stock, which ends every module idle and whole."""
    with serve() as server:
        yield server
        server.wait_until_idle()
