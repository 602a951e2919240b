"""What the tests of whole comparisons share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tenuto.cli import parse as parse_command
from tenuto.cli.measure import read_ab_options
from tenuto.client.options import AbOptions


def parse(*arguments: str) -> AbOptions:
    return read_ab_options(parse_command(["ab", *arguments])[1])


@pytest.fixture
def options(trace: Path, tmp_path: Path) -> Callable[..., AbOptions]:
    """Options for the small trace."""

    def make(*arguments: str) -> AbOptions:
        return parse("--workload", str(trace), "--out", str(tmp_path / "ab"), *arguments)

    return make
