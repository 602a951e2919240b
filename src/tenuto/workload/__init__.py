"""Jobs to serve: generators, readers of public traces, arrivals, scaling. Needs only core and records."""

from tenuto.core.reuse import count_shared_tokens
from tenuto.workload.formats.tenuto_jsonl import write_tenuto_jsonl
from tenuto.workload.load import LoadOptions, load_workload, make_workload
from tenuto.workload.schema import After, Job, Prompt, Span, TurnSpec, Workload
from tenuto.workload.transform import scale_lengths, scale_rate

__all__ = [
    "After", "Job", "LoadOptions", "Prompt", "Span", "TurnSpec", "Workload", "count_shared_tokens",
    "load_workload", "make_workload", "scale_lengths", "scale_rate", "write_tenuto_jsonl",
]  # fmt: skip
