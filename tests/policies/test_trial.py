"""`tenuto check-policy`: what passes, what is wrong, and how it is said."""

from __future__ import annotations

import random
import textwrap
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tenuto import Keep, Needs, Policy, PolicyError, check_policy, cli
from tenuto.api import TRIALS
from tenuto.core.loader import load_policy
from tenuto.core.policy import ANSWERS, TOLD_HOOKS
from tenuto.sim.run import Extras, run


@pytest.mark.slow
def test_the_trials_are_short_of_memory() -> None:
    """Leases are granted, revoked, expire and are hit; turns wait and are preempted."""
    seen: Counter[str] = Counter()
    for policy in (Keeping(), Asked()):
        for setup, load in TRIALS.values():

            def count(record: dict[str, Any]) -> None:
                seen[str(record.get("hook", record.get("reason", record.get("why", record["kind"]))))] += 1

            run(setup, load, extras=Extras(policy=policy), log=count)
    hooks = {*ANSWERS, *TOLD_HOOKS} - {"tier_key"}  # only engines of live servers ask for it
    assert {hook: seen[hook] for hook in (*hooks, "hit", "expired", "revoked") if not seen[hook]} == {}


@dataclass
class Keeping(Policy):
    """Keeps all KV for long."""

    def retain(self, turn, view):
        return Keep(view.now_s + 2.0)


@dataclass
class Asked(Keeping):
    """Has a version of every hook that engines do not ask for otherwise."""

    needs: ClassVar[Needs] = Needs(admit="turns", reorder_s=1.0, max_waiting_with_hits=8)

    def wants_hits(self, turn):
        return True

    def admit(self, turn, view):
        return view.num_running < 8

    def load(self, turn, offer, view):
        return offer.load_s < 1.0

    def may_reclaim(self, lease, turn, view):
        return True

    def preempt_key(self, turn, view):
        return (-turn.arrival_s,)

    def may_preempt(self, turn, running, view):
        return False

    def step_budget(self, view):
        return 4096

    def on_tick(self, view):
        pass

    def on_step(self, step):
        pass


@dataclass
class FailsAfterThirtyTurns(Policy):
    """Sound on the grid of views; its state makes it fail in a simulation."""

    _seen: set[str] = field(init=False, default_factory=set)

    def on_turn_arrived(self, turn, now_s):
        self._seen.add(turn.turn_id)

    def on_turn_finished(self, turn, now_s):
        if len(self._seen) > 30:
            raise RuntimeError("too many")


@dataclass
class Dicing(Policy):
    """Asks the dice when told, so that it answers the same when asked twice."""

    _dice: float = field(init=False, default=0.0)

    def on_turn_arrived(self, turn, now_s):
        self._dice = random.random()

    def queue_key(self, turn, now_s):
        return (self._dice,)


@dataclass
class Thrashing(Policy):
    """Whoever waits takes the memory of the oldest turn that runs, so turns restart without end."""

    def may_preempt(self, turn, running, view):
        return True

    def preempt_key(self, turn, view):
        return (turn.arrival_s,)


@pytest.mark.parametrize("name", ["tenuto", "clairvoyant"])
def test_policies_that_ship_pass(name: str) -> None:
    check_policy(name)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (FailsAfterThirtyTurns(), r"in a simulation \(little memory.*on_turn_finished raised RuntimeError"),
        (Dicing(), "came out differently the second time"),
        (Thrashing(), r"in a simulation \(so little memory.*turns finished in 100\d s"),
    ],
)
def test_what_only_a_simulation_shows(policy: Policy, words: str) -> None:
    before = repr(policy)
    with pytest.raises(PolicyError, match=words):
        check_policy(policy)
    assert repr(policy) == before


GOOD = """
    from dataclasses import dataclass

    from tenuto import Keep, Needs, Policy, setting


    @dataclass
    class Mine(Policy):
        ttl_s: float = setting(1.0, "seconds", minimum=0)

        def retain(self, turn, view):
            return Keep(view.now_s + self.ttl_s)
"""


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        (("", ""), 0, "mine.py:Mine: nothing is wrong"),
        (("def retain", "def retian"), 1, "Mine.retian: no hook has this name; did you mean retain?"),
        (("turn, view", "turn"), 1, "Mine.retain must be a method retain(self, turn, view)"),
        (
            ("return Keep(", "(lambda x: x)("),
            1,
            "retain answered None, which is not a Keep or Offload",
        ),
        (
            ("self.ttl_s)", "1 / 0)"),
            1,
            "retain raised ZeroDivisionError('division by zero'); asked with",
        ),
        (("ttl_s: float", "rekey_s = 3.0\n        ttl_s: float"), 1, "Mine.rekey_s: is now needs = Needs("),
        (("class Mine", "class Other"), 2, "there is no 'Mine' in it"),
        (("@dataclass", ""), 1, "must be a dataclass"),
        (("import Keep", "import Keeep"), 1, "cannot be imported"),
    ],
)
def test_the_command_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, str], status: int, words: str
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(GOOD.replace(*change)) if change[0] else textwrap.dedent(GOOD))
    assert cli.main(["check-policy", f"{path}:Mine", "--option", "ttl_s=2"]) == status
    output = capsys.readouterr()
    assert words in (output.err if status else output.out)


def test_a_module_in_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "policy_found_here.py").write_text(textwrap.dedent(GOOD))
    monkeypatch.chdir(tmp_path)
    assert type(load_policy("policy_found_here:Mine", {"ttl_s": 2})).__name__ == "Mine"
    assert type(load_policy("policy_found_here.py:Mine")) is type(load_policy("policy_found_here.py:Mine"))


def test_a_name_that_is_nearly_one() -> None:
    with pytest.raises(PolicyError, match=r"no policy 'tenut'.*; did you mean tenuto\?$"):
        load_policy("tenut")
    with pytest.raises(PolicyError, match="did you mean offload-async"):
        load_policy("offload-asinc")


@pytest.mark.parametrize("command", ["check-policy", "check-router"])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tenutoo", "did you mean tenuto?"),
        ("nowhere.py:Mine", "cannot read the file"),
        ("no_such_module:Mine", "cannot be imported: ModuleNotFoundError"),
        ("tenuto.no_such_module:Mine", "cannot be imported: ModuleNotFoundError"),
        ("tenuto:Nothing", "there is no 'Nothing' in it"),
    ],
)
def test_a_name_that_leads_nowhere_is_a_wrong_command(
    command: str, name: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, name]) == 2
    assert words in capsys.readouterr().err


def test_a_policy_that_imports_a_missing_module_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "policy_of_mine.py").write_text("import policy_of_mine_helper\n")
    monkeypatch.chdir(tmp_path)
    for name in ("policy_of_mine:Mine", "policy_of_mine.py:Mine"):
        assert cli.main(["check-policy", name]) == 1
        assert "policy_of_mine_helper" in capsys.readouterr().err
