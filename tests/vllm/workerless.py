"""vLLM's real scheduler without workers or a model: requests go in, scripted tokens come out.

A step is `schedule()`; its result is processed `depth` steps later, as asynchronous scheduling does on a
GPU (depth 2) or synchronous scheduling anywhere (depth 1).
"""

from __future__ import annotations

import json
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from vllm.config import (
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from tests.vllm.kv_configs import get_attention, make_scheduler_of_layers

EOS = 2
MAX_MODEL_LEN = 8192

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 1024,
    "max_position_embeddings": MAX_MODEL_LEN,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}


@cache
def get_model_folder() -> str:
    """A folder with a tiny model's config and nothing else."""
    folder = tempfile.mkdtemp(prefix="tenuto-tiny-")
    Path(folder, "config.json").write_text(json.dumps(TINY_LLAMA))
    return folder


def make_config(
    *,
    is_async: bool = False,
    tenuto: dict[str, Any] | None = None,
    num_drafts: int = 0,
    max_model_len: int = MAX_MODEL_LEN,
    caches: bool = True,
    **scheduler: Any,
) -> VllmConfig:
    """A vLLM configuration for the tiny model; `scheduler` holds SchedulerConfig arguments.

    `caches`: whether there is a prefix cache.

    With `num_drafts` it decodes speculatively, guessing so many tokens by n-grams.
    """
    model_config = ModelConfig(
        model=get_model_folder(), skip_tokenizer_init=True, dtype="float32", max_model_len=max_model_len
    )
    arguments = {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "enable_chunked_prefill": True,
        **scheduler,
    }
    speculative_config = None
    if num_drafts:
        speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=num_drafts,
            prompt_lookup_max=4,
            target_model_config=model_config,
            target_parallel_config=ParallelConfig(),
        )
    config = VllmConfig(
        model_config=model_config,
        cache_config=CacheConfig(block_size=16, enable_prefix_caching=caches),
        scheduler_config=SchedulerConfig(
            max_model_len=max_model_len,
            is_encoder_decoder=False,
            # Guessing by n-grams is none of the kinds it takes drafts of; the scheduler does not mind.
            async_scheduling=is_async and not num_drafts,
            **arguments,
        ),
        speculative_config=speculative_config,
        additional_config={"tenuto": tenuto} if tenuto is not None else {},
    )
    config.scheduler_config.async_scheduling = is_async
    config.cache_config.enable_prefix_caching = caches
    return config


def make_scheduler(
    cls: type,
    config: VllmConfig,
    *,
    num_blocks: int = 100,
    block_size: int = 16,
    windows: Sequence[int | None] = (None,),
    retention_interval: int | None = 0,
) -> Any:
    """A scheduler of the given class with `num_blocks` blocks, the null block included.

    `windows` has the sliding window of each layer in tokens, None for full attention.
    """
    layers = [get_attention(window, block_size) for window in windows]
    return make_scheduler_of_layers(cls, config, layers, num_blocks, retention_interval=retention_interval)


def make_request(
    request_id: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 8,
    block_size: int = 16,
    arrival_time: float = 0.0,
    priority: int = 0,
    xargs: dict[str, Any] | None = None,
    lora_request: Any = None,
    **sampling: Any,
) -> Request:
    """A request; `xargs` are its `vllm_xargs`."""
    params = SamplingParams(max_tokens=max_tokens, extra_args=xargs, **sampling)
    params.update_from_generation_config({}, EOS)
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling_params=params,
        pooling_params=None,
        arrival_time=arrival_time,
        priority=priority,
        lora_request=lora_request,
        block_hasher=get_request_block_hasher(block_size, sha256),
    )


class Engine:
    """Steps a scheduler; `sample(request_id, index)` gives each output token."""

    def __init__(
        self, scheduler: Any, sample: Callable[[str, int], int] | None = None, *, depth: int = 1
    ) -> None:
        self.scheduler = scheduler
        self.outputs: dict[str, list[int]] = {}
        self._sample = sample or (lambda request_id, index: 5 + index % 50)
        self._depth = depth
        self._in_flight: deque[Any] = deque()
        self._num_sampled: dict[str, int] = {}

    def step(self) -> Any:
        """Schedule one step, and process the one whose turn it is; returns the scheduler's output."""
        output = self.scheduler.schedule()
        self._in_flight.append((output, self._run(output)))
        if output.total_num_scheduled_tokens:
            # As vLLM's engine does, while the GPU computes.
            self.scheduler.get_grammar_bitmask(output)
        keep = self._depth - 1 if output.total_num_scheduled_tokens else 0
        while len(self._in_flight) > keep:
            self._process()
        return output

    def run(self, max_steps: int = 10_000) -> int:
        """Step until no request is left; returns the number of steps. Fails if that takes too many."""
        for num_steps in range(max_steps):
            if not self.scheduler.has_unfinished_requests() and not self._in_flight:
                self.rest()
                return num_steps
            self.step()
        raise AssertionError(
            f"the engine stalled: {self.scheduler.get_request_counts()} after {max_steps} steps"
        )

    def rest(self) -> None:
        """Nothing is left to compute."""
        self.scheduler.schedule()

    def abort(self, request_id: str) -> None:
        """The client went away."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def _process(self) -> None:
        output, result = self._in_flight.popleft()
        for group in self.scheduler.update_from_output(output, result).values():
            for each in group.outputs:
                self.outputs.setdefault(each.request_id, []).extend(each.new_token_ids)

    def _run(self, output: Any) -> ModelRunnerOutput:
        request_ids = list(output.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for request_id in request_ids:
            request = self.scheduler.requests[request_id]
            # Without drafts a request samples once its step reaches all it has, placeholders included.
            if request.is_prefill_chunk:
                sampled.append([])
                continue
            index = self._num_sampled.get(request_id, 0)
            self._num_sampled[request_id] = index + 1
            sampled.append([self._sample(request_id, index)])
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: n for n, request_id in enumerate(request_ids)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
