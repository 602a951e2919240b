"""Identifies the kind of a file by its first object, and the commands that read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tenuto.core.errors import DataError
from tenuto.records.files import read_first

RUN_FILES = ("turns.jsonl", "result.json", "occupancy.jsonl")
"""Files in the folder of one run."""
RESULTS = "results.jsonl"
"""File in the folder of a sweep or of `tenuto ab`."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of file or folder."""

    name: str
    """The name with its article, as error messages use it."""
    commands: tuple[str, ...] = ()
    """The commands that read it; {} stands for the path."""
    is_workload: bool = False
    """Whether its requests can be sent again."""


_WORKLOAD_COMMANDS = ("tenuto replay {} --url URL", "tenuto simulate --workload {}", "tenuto convert {} OUT")
_READERS = ("tenuto analyze {}", "tenuto report {}")
RUN = Kind("a result of runs", _READERS)
TURNS = Kind("a file of turns", _READERS)
SAMPLES = Kind("a file of KV cache samples", ("tenuto report {}",))
TRACE = Kind("a scheduler's trace", ("tenuto replay --decisions {}", *_READERS))
RECORDING = Kind("a recording", (*_WORKLOAD_COMMANDS, *_READERS), is_workload=True)
WORKLOAD = Kind("a workload", _WORKLOAD_COMMANDS, is_workload=True)
PROTOTYPE = Kind("a file of the Continuum prototype", ("tenuto analyze {}",))
STEP_TIMES = Kind("a file of step times", ("tenuto profile --observations {} --out FILE",))
FIT = Kind("a fit of step times", ("tenuto simulate --step-cost {}",))
SERVER_SAMPLES = Kind("a file of /metrics samples", ("tenuto analyze FOLDER, its folder",))
COMMANDS = Kind("a list of commands that a bench ran", ("tenuto analyze FOLDER, its folder",))
AB_SETTINGS = Kind("a file of tenuto ab", ("tenuto report FOLDER, its folder",))
VIEW = Kind("output of tenuto top, which no command reads again")
ANALYSIS = Kind("a report of tenuto analyze, which no command reads again")
EVENTS = Kind("a file for Perfetto (open it at ui.perfetto.dev)")
STATE = Kind("the state of a policy", ("tenuto serve MODEL --state {}",))
RUN_FOLDER = Kind("the folder of a run", _READERS)
RESULTS_FOLDER = Kind("the folder of several runs", _READERS)
UNKNOWN = Kind("of no kind that Tenuto writes")

_BY_KEYS: tuple[tuple[frozenset[str], Kind], ...] = tuple(
    (frozenset(keys.split()), kind)
    for keys, kind in (
        ("step kind", TRACE),
        ("trajectory_format", WORKLOAD),
        ("messages", WORKLOAD),
        ("requests hash_id_scope", WORKLOAD),
        ("requests id", WORKLOAD),
        ("schema hash_id_scope", WORKLOAD),
        ("session input_length", WORKLOAD),
        ("session_id input_length", WORKLOAD),
        ("hash_ids input_length", WORKLOAD),
        ("job_s", RUN),
        ("job turn", TURNS),
        ("now_s num_blocks", SAMPLES),
        ("at_s window_s server", VIEW),
        ("at_s problem", VIEW),
        ("at_s", SERVER_SAMPLES),
        ("job after_turn command", COMMANDS),
        ("seconds decodes", STEP_TIMES),
        ("seconds prefills", STEP_TIMES),
        ("seconds num_bytes", STEP_TIMES),
        ("prefill decode", FIT),
        ("schema runs", ANALYSIS),
        ("traceEvents", EVENTS),
        ("format policy state", STATE),
        ("arms", AB_SETTINGS),
        ("comparisons", AB_SETTINGS),
    )
)
_BY_WORD = {"run": RUN, "turn": TURNS, "sample": SAMPLES, "recording": RECORDING, "failed": RECORDING}


def identify(path: Path) -> Kind:
    """Identify a file or folder; UNKNOWN if Tenuto did not write it. Raises DataError if it is unreadable."""
    if path.is_dir():
        if (path / RUN_FILES[0]).exists():
            return RUN_FOLDER
        return RESULTS_FOLDER if (path / RESULTS).exists() else UNKNOWN
    return identify_object(read_first(path).values)


def identify_object(values: Mapping[str, object]) -> Kind:
    """Identify the kind of a file from its first object."""
    word = values.get("kind")
    if isinstance(word, str) and "step" not in values and word in _BY_WORD:
        return _BY_WORD[word]
    keys = frozenset(values)
    if (found := next((kind for wanted, kind in _BY_KEYS if wanted <= keys), None)) is not None:
        # Field that `tenuto record` adds to a session's turn.
        return RECORDING if found is WORKLOAD and {"session", "latency_ms"} <= keys else found
    if values and all(_is_event_list(events) for events in values.values()):
        return PROTOTYPE
    return UNKNOWN


def _is_event_list(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(event, dict) for event in value)


def make_error(path: Path | str, kind: Kind, wanted: str) -> DataError:
    """Make the error of a command that cannot read this kind. It names the commands that can."""
    said = f"{path}: is {kind.name}, but {wanted} is wanted here"
    commands = " or ".join(f"`{command.format(path)}`" for command in kind.commands)
    return DataError(f"{said}; try {commands}" if commands else said)
