"""One reading of a server's `/metrics` page, and methods to get numbers from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from tenuto.core.errors import DataError

PREFIXES = ("vllm:", "tenuto:")

Buckets = dict[float, float]
"""By upper bound, the number of values that were at most this bound."""


@dataclass(frozen=True, slots=True)
class Page:
    """The samples of one reading. Sums run over all labels that are not named. None if nothing matches."""

    at_s: float
    """Unix time."""
    samples: Mapping[str, list[tuple[Mapping[str, str], float]]]

    def total(self, name: str, **labels: str) -> float | None:
        """The sum of a metric's samples that have these labels."""
        values = [
            value
            for own, value in self.samples.get(name, ())
            if all(own.get(label) == wanted for label, wanted in labels.items())
        ]
        return sum(values) if values else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The sums of a metric's samples, grouped by the value of one label."""
        found: dict[str, float] = {}
        for own, value in self.samples.get(name, ()):
            if label in own:
                found[own[label]] = found.get(own[label], 0.0) + value
        return found

    def labels(self, name: str, label: str) -> list[str]:
        """The values of one label of a metric, sorted."""
        return sorted({own[label] for own, _ in self.samples.get(name, ()) if label in own})

    def active(self, name: str, label: str) -> list[str]:
        """The values of one label among the samples that are not 0, sorted: of what runs, of several."""
        return [value for value, total in sorted(self.by_label(name, label).items()) if total]

    def buckets(self, name: str) -> Buckets:
        """A histogram's cumulative counts. Raises DataError if a bound is not a number."""
        try:
            return {float(bound): count for bound, count in self.by_label(f"{name}_bucket", "le").items()}
        except ValueError as error:
            raise DataError(f"/metrics: {name}_bucket: le: {error}") from None


def parse_page(text: str, at_s: float) -> Page:
    """Parse vLLM's and Tenuto's metrics. Raises DataError if the page is invalid or contains none of them."""
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(_keep_ours(text)):
            for sample in family.samples:
                if math.isfinite(sample.value):
                    samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except ValueError as error:
        raise DataError(f"/metrics is not a page of Prometheus metrics: {error}") from None
    if not any(name.startswith(PREFIXES) for name in samples):
        raise DataError(
            "/metrics shows neither vllm: nor tenuto: metrics; is this a vLLM server, started without "
            "--disable-log-stats?"
        )
    return Page(at_s, samples)


def join_pages(pages: Mapping[str, Page]) -> Page:
    """The pages of several servers as one; the label `engine` then begins with the server's name."""
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for name, page in pages.items():
        for metric, values in page.samples.items():
            samples.setdefault(metric, []).extend(
                ({**labels, "engine": f"{name}/{labels['engine']}"} if "engine" in labels else labels, value)
                for labels, value in values
            )
    return Page(max(page.at_s for page in pages.values()), samples)


def _keep_ours(text: str) -> str:
    """Keep only vLLM's and Tenuto's metrics.

    The parser takes tens of microseconds per line, and half of a page is about the Python process.
    """
    comments = tuple(f"# {kind} {prefix}" for kind in ("TYPE", "HELP") for prefix in PREFIXES)
    lines = [line for line in text.splitlines() if line.startswith((*PREFIXES, *comments))]
    return "\n".join([*lines, ""])
