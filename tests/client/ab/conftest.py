"""What the tests of whole comparisons share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from tenuto.client.ab.options import DESCRIPTION, EPILOG, AbOptions, add_options, read_options


def parse(*arguments: str) -> AbOptions:
    parser = argparse.ArgumentParser(description=DESCRIPTION, epilog=EPILOG)
    add_options(parser)
    return read_options(parser.parse_args(arguments))


@pytest.fixture
def options(trace: Path, tmp_path: Path) -> Callable[..., AbOptions]:
    """Options for the small trace."""

    def make(*arguments: str) -> AbOptions:
        return parse("--workload", str(trace), "--out", str(tmp_path / "ab"), *arguments)

    return make
