"""contextserve: pin, store or hold a finished turn's cache, by the predicted time of its tool."""

from __future__ import annotations

import math
import random
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from statistics import NormalDist
from typing import Any, ClassVar

from tenuto.core.errors import ConfigError
from tenuto.core.policy import EngineSettings, Needs, setting
from tenuto.core.turn_work import MAX_NAMES
from tenuto.core.types import (
    Decision,
    EngineView,
    Keep,
    Lease,
    LeaseRefusal,
    Offload,
    Release,
    ToolCall,
    Turn,
    Yields,
)
from tenuto.estimators.commands import MIN_TIME_S, CommandShape, CommandText, read_names, read_text
from tenuto.policies.published._continuum import RENEW_S, LearnsTtl

FAST_PROGRAMS = read_names(
    """[, awk, basename, cat, cd, chmod, cp, cut, date, diff, dirname, echo, env, export, false, file, grep,
    head, hostname, id, jq, less, ls, mkdir, more, mv, nl, printenv, printf, pwd, readlink, realpath, rm, sed,
    sort, stat, tail, test, touch, tr, true, uname, uniq, wc, which, whoami, git add, git blame,
    git branch, git config, git diff, git log, git ls-files, git remote, git rev-parse, git show, git stash,
    git status, git tag"""
)
"""Rule: a command with only these programs, without recursion and loops, is fast."""
SLOW_PROGRAMS = read_names(
    """apt install, apt-get install, apt-get update, bazel, cargo build, cargo test, cmake, conda create,
    conda install, docker build, docker pull, git clone, git fetch, go build, go test, gradle, make, mvn,
    ninja, nox, npm ci, npm install, npm test, pip download, pip install, pip wheel, poetry install, pytest,
    terraform, tox, uv sync, yarn build, yarn install"""
)
"""Rule: a command with one of these programs is slow, unless it only asks (`--version`, `--dry-run`, ...)."""
MAX_LOG_S = 50.0
"""Bounds ln(seconds) before the exponential is taken."""
UNKNOWN_LOG_S, UNKNOWN_SD = 0.0, math.log(10)
"""The prediction for an unknown tool: 1 s, within a factor of ten."""
PRIOR_CALLS = 2.0
"""Weight of the prediction from a command's text, in observed calls of the program."""


class Speed(Enum):
    """The predicted class of a tool call."""

    FAST = "fast"
    SLOW = "slow"
    UNCERTAIN = "uncertain"


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted time of a tool call."""

    speed: Speed
    pin_s: float
    """Duration of the pin if the call is fast."""


@dataclass
class ContextServe(LearnsTtl):
    """Fast tools: pin. Slow ones: store to the host tier, if any, and free. Uncertain: Continuum's TTL.

    Source: descriptions of ContextServe's dispatch (rules, a Bayesian posterior with Thompson sampling,
    boosted trees on the command, a fallback). No text or code of its authors was available. The fallback is
    Continuum's TTL (arXiv 2511.02230). Rules classify well-known programs until `trusted_calls` calls of a
    program were seen. For all other programs, a Normal-Inverse-Gamma posterior of ln(seconds) decides. The
    trees' prediction from the command's text is its prior mean (see docs/tool_times.md). The trees are in the
    extra `predict`; without it, the prior is that of an unknown tool.

    Known weaknesses: a rule that is wrong for a program loses the cache for `trusted_calls` calls. Thompson
    sampling gains nothing, because a tool's time is observed whatever is decided. Pins yield only on a stall,
    so they starve new jobs, as those of continuum-fixed do.
    """

    needs: ClassVar[Needs] = Needs(commands=True, engine=EngineSettings(offload="asked"))

    pin_s: float = setting(
        3.0, "longest pin of a fast tool; a tool is fast if it takes no longer", minimum=0.001
    )
    slow_s: float = setting(6.0, "a tool is slow if it takes longer than this many seconds", minimum=0.001)
    confidence: float = setting(
        0.8, "probability from which a call counts as fast or slow", minimum=0.5, maximum=0.999
    )
    quantile: float = setting(
        0.95, "share of a fast tool's calls that should end within its pin", minimum=0.5, maximum=0.999
    )
    trusted_calls: int = setting(
        20,
        "number of calls of a program after which its own times replace the rules; 0: no rules",
        minimum=0,
        maximum=190,
    )
    explore: bool = setting(True, "decide by a draw from the posterior (Thompson sampling)")
    seed: int = setting(0, "seed of the draws")
    model: str | None = setting(
        None,
        "file of a trained command model, with the extra `predict`; unset: the extra's own, if it is there",
        is_file=True,
    )
    _read: Callable[[str], CommandText] = field(init=False)
    _log_pin_s: float = field(init=False)
    _log_slow_s: float = field(init=False)
    _beliefs: OrderedDict[str, NormalInverseGamma] = field(init=False, default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self._read = _load_reader(self.model)
        self._log_pin_s, self._log_slow_s = math.log(self.pin_s), math.log(self.slow_s)

    # Decisions.

    def retain(self, turn: Turn, view: EngineView) -> Decision:
        """Pin for fast tools, store and free for slow ones, hold for Continuum's TTL for uncertain ones."""
        if turn.tool is None:
            return Release()
        prediction = self._predict(turn.tool, turn.turn_id)
        ttl_s = prediction.pin_s
        if prediction.speed is Speed.UNCERTAIN:
            ttl_s = self._get_ttl_s(self._read(_get_text(turn.tool)).program, turn, view)
        if prediction.speed is Speed.SLOW or ttl_s <= 0:
            return Offload(LeaseRefusal.PRICE)
        return Keep(view.now_s + ttl_s, yields=Yields.ON_DEADLOCK)

    def reconsider(self, lease: Lease, view: EngineView) -> Decision:
        """The tool took longer than the pin: store and free, unless the job's next turn already waits."""
        if lease.next_turn_waiting:
            return Keep(view.now_s + RENEW_S, yields=Yields.ON_DEADLOCK)
        return Offload()

    def _predict(self, tool: ToolCall, turn_id: str) -> Prediction:
        """How long a tool call will take; the turn's id seeds the draw."""
        text = self._read(_get_text(tool))
        belief = self._beliefs.get(text.program)
        num_calls = belief.kappa - PRIOR_CALLS if belief else 0
        by_rule = _judge_by_rules(text.shape) if num_calls < self.trusted_calls else None
        if by_rule is not None:
            return Prediction(by_rule, self.pin_s)
        prior_log_s, sd = self._expect(text)
        return self._judge(belief or _get_prior(sd), prior_log_s, turn_id)

    # Events.

    def on_tool_returned(self, turn: Turn, tool: ToolCall | None, tool_s: float) -> None:
        """Learn how long the tool took, compared with the prediction from its command's text."""
        if tool is None:
            return
        text = self._read(_get_text(tool))
        prior_log_s, sd = self._expect(text)
        belief = self._beliefs.pop(text.program, None) or _get_prior(sd)
        self._beliefs[text.program] = belief.observe(math.log(max(tool_s, MIN_TIME_S)) - prior_log_s)
        if len(self._beliefs) > MAX_NAMES:
            self._beliefs.popitem(last=False)
        self._tool_times.observe(text.program, tool_s)

    # Kept across restarts.

    def get_state(self) -> dict[str, Any]:
        """The beliefs, and what Continuum's TTL is computed from."""
        beliefs = {program: [b.mean, b.kappa, b.alpha, b.beta] for program, b in self._beliefs.items()}
        return {"beliefs": beliefs, "ttl": super().get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore both."""
        beliefs = [
            (str(program), NormalInverseGamma(*map(float, b))) for program, b in state["beliefs"].items()
        ]
        super().set_state(state["ttl"])
        self._beliefs = OrderedDict(beliefs[-MAX_NAMES:])

    # Inside.

    def _expect(self, text: CommandText) -> tuple[float, float]:
        """Prediction from the command's text: the mean of ln(seconds) and its standard deviation."""
        return (UNKNOWN_LOG_S, UNKNOWN_SD) if text.log_s is None else (text.log_s, text.sd)

    def _judge(self, belief: NormalInverseGamma, prior_log_s: float, turn_id: str) -> Prediction:
        """Fast or slow if its probability is high enough, by the posterior or by a draw from it."""
        if self.explore:
            mean, sd = belief.draw(random.Random((self.seed << 32) ^ zlib.crc32(turn_id.encode())))
            margin = sd * NormalDist().inv_cdf(self.confidence)
            low, high = mean - margin, mean + margin
        else:
            low, high = belief.get_quantile(1 - self.confidence), belief.get_quantile(self.confidence)
        if prior_log_s + high <= self._log_pin_s:
            covering_s = math.exp(min(prior_log_s + belief.get_quantile(self.quantile), MAX_LOG_S))
            return Prediction(Speed.FAST, min(covering_s, self.pin_s))
        is_slow = prior_log_s + low >= self._log_slow_s
        return Prediction(Speed.SLOW if is_slow else Speed.UNCERTAIN, 0.0)


def _load_reader(model: str | None) -> Callable[[str], CommandText]:
    """The reader of commands: a model's trees, or only the text's shape if the extra is not installed."""
    try:
        import tenuto_predict
    except ImportError:
        if model is not None:
            raise ConfigError(
                "contextserve's option model needs the extra predict: pip install 'tenuto[predict]'; "
                "in a clone of Tenuto: pip install ./predict"
            ) from None
        return read_text
    return tenuto_predict.load_command_times(model).read


def _get_prior(sd: float) -> NormalInverseGamma:
    """The belief that the text's expectation is right up to `sd`: E[σ²] = beta / (alpha − 1) = sd²."""
    alpha = 1 + PRIOR_CALLS / 2
    return NormalInverseGamma(0.0, PRIOR_CALLS, alpha, sd * sd * (alpha - 1))


def _get_text(tool: ToolCall) -> str:
    """The shell command. Any other tool (its `command` is arguments) is known by its name only."""
    is_shell = tool.command is not None and tool.command.startswith(tool.name)
    return tool.command if is_shell and tool.command is not None else tool.name


def _judge_by_rules(shape: CommandShape) -> Speed | None:
    if not SLOW_PROGRAMS.isdisjoint(shape.programs):
        return None if shape.only_asks else Speed.SLOW
    repeats = shape.num_loops or shape.num_repeaters or shape.is_recursive
    return Speed.FAST if not repeats and shape.programs and FAST_PROGRAMS.issuperset(shape.programs) else None


# A normal distribution with unknown mean and variance, learned from samples: Normal-Inverse-Gamma.
#
# σ² ~ Inverse-Gamma(alpha, beta), mean ~ Normal(mean, σ²/kappa). Source of the conjugate updates: Murphy,
# Conjugate Bayesian analysis of the Gaussian distribution (2007), section 6.

MAX_KAPPA = 200.0
"""Maximum weight in samples. Beyond it old samples fade, so that a change of a tool is learned."""


_MIN_WEIGHT, _MAX_WEIGHT = 1e-6, 1e6
_MAX_SIZE = 1e18
"""Samples in seconds never lead beyond these. There, drawing a number overflows or never ends."""


@dataclass(frozen=True, slots=True)
class NormalInverseGamma:
    """The belief. `kappa` and 2·`alpha` are the number of samples that it is worth."""

    mean: float
    kappa: float
    alpha: float
    beta: float

    def __post_init__(self) -> None:
        """Refuse parameters that are no distribution, from a damaged file or a bad setting."""
        are_weights = all(_MIN_WEIGHT <= weight <= _MAX_WEIGHT for weight in (self.kappa, self.alpha))
        if not (are_weights and 0 < self.beta <= _MAX_SIZE and abs(self.mean) <= _MAX_SIZE):
            raise ValueError(f"not a Normal-Inverse-Gamma distribution: {self}")

    def observe(self, x: float) -> NormalInverseGamma:
        """The belief after one more sample."""
        fade = min(1.0, MAX_KAPPA / (self.kappa + 1))
        kappa = (self.kappa + 1) * fade
        mean = (self.kappa * self.mean + x) / (self.kappa + 1)
        beta = self.beta + self.kappa * (x - self.mean) ** 2 / (2 * (self.kappa + 1))
        return NormalInverseGamma(mean, kappa, (self.alpha + 0.5) * fade, beta * fade)

    def draw(self, rng: random.Random) -> tuple[float, float]:
        """A mean and a standard deviation drawn from the belief (Thompson sampling)."""
        variance = self.beta / max(rng.gammavariate(self.alpha, 1.0), 1e-12)
        return rng.gauss(self.mean, math.sqrt(variance / self.kappa)), math.sqrt(variance)

    def get_quantile(self, share: float) -> float:
        """Quantile `share` of the next sample: Student's t with 2·alpha degrees of freedom."""
        scale = math.sqrt(self.beta * (self.kappa + 1) / (self.alpha * self.kappa))
        return self.mean + scale * get_t_quantile(share, 2 * self.alpha)


def get_t_quantile(share: float, degrees: float) -> float:
    """Quantile of Student's t, by its expansion around the normal quantile (Abramowitz and Stegun 26.7.5).

    Within 1 % for at least 4 degrees of freedom and shares from 0.05 to 0.95.
    """
    z = NormalDist().inv_cdf(share)
    z2 = z * z
    terms = (
        (z2 + 1) / 4,
        ((5 * z2 + 16) * z2 + 3) / 96,
        (((3 * z2 + 19) * z2 + 17) * z2 - 15) / 384,
        ((((79 * z2 + 776) * z2 + 1482) * z2 - 1920) * z2 - 945) / 92160,
    )
    return z + z * sum(term / degrees**power for power, term in enumerate(terms, 1))
