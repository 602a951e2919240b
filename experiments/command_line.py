"""The command line of an experiment."""

from __future__ import annotations

import argparse


def make_parser(about: str | None) -> argparse.ArgumentParser:
    """A parser without options yet. Its help shows the module's docstring as it is written."""
    return argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
