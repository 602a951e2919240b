"""Files with a JSON value in each line, in which experiments keep what has run."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[Any]:
    """The values; none if there is no file. A line that an interruption cut off is left out."""
    values = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            values.append(json.loads(line))
    return values


def write_lines(path: Path, values: Iterable[Any]) -> None:
    """Write a file anew."""
    path.write_text("".join(json.dumps(each) + "\n" for each in values), encoding="utf-8")


def append_lines(path: Path, *values: Any) -> None:
    """Go on with a file. A line that was cut off before is ended first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.writelines(json.dumps(each).encode() + b"\n" for each in values)
