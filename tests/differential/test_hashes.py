"""Block hashes: two of our prompts share as many leading blocks as vLLM's hashes of their tokens do."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request as VllmRequest

from tenuto.sim.kv.pool import Path, Segment
from tenuto.sim.kv.request import BlockHashes, Request
from tests.support.prefix import count_common

BLOCK_SIZE = 16
IMAGE_TOKEN = 7

Part = tuple[str, str, int]
"""Text or image, its name, its tokens."""


def hash_by_vllm(parts: list[Part], salt: str | None, adapter: str | None) -> list[Any]:
    tokens: list[int] = []
    images = []
    for kind, name, num_tokens in parts:
        if kind == "image":
            place = PlaceholderRange(offset=len(tokens), length=num_tokens)
            images.append(MultiModalFeatureSpec(None, "image", name, place))
            tokens += [IMAGE_TOKEN] * num_tokens
        else:
            tokens += range(int(name) * 10**6, int(name) * 10**6 + num_tokens)
    request = VllmRequest(
        request_id="r",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=images,
        lora_request=LoRARequest(adapter, 1, f"/{adapter}") if adapter else None,
        cache_salt=salt,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
    )
    return list(request.block_hashes)


def hash_by_us(root: Segment, parts: list[Part], salt: str | None, adapter: str | None) -> list[Any]:
    spans = [((kind, name), num_tokens) for kind, name, num_tokens in parts]
    request = Request("r", spans, ("output", 1), 0.0, key=(salt, adapter))
    request.path = Path(root, request.key, spans, BLOCK_SIZE)
    return list(BlockHashes(request, BLOCK_SIZE))


def test_as_many_common_blocks_as_vllm() -> None:
    init_none_hash(sha256)
    rng = random.Random(3)
    root = Segment(1)
    pairs = []
    for _ in range(120):
        parts: list[Part] = [("text", "1", 20)]
        for _ in range(rng.randrange(4)):
            kind = rng.choice(["text", "image"])
            # An image always has the same number of tokens; a text may be cut anywhere.
            parts.append((kind, rng.choice("23"), 24 if kind == "image" else rng.choice([9, 16, 31])))
        salt, adapter = rng.choice([None, None, "salt"]), rng.choice([None, None, "adapter"])
        pairs.append((hash_by_vllm(parts, salt, adapter), hash_by_us(root, parts, salt, adapter)))
    lengths = set()
    for (theirs, ours), (other_theirs, other_ours) in itertools.combinations(pairs, 2):
        assert len(theirs) == len(ours)
        assert count_common(theirs, other_theirs) == count_common(ours, other_ours)
        lengths.add(count_common(ours, other_ours))
    assert {0, 1, 2, 3, 4} <= lengths


@pytest.mark.parametrize(
    ("salt", "adapter"), [("salt", None), (None, "adapter"), ("salt", "adapter"), ("other salt", None)]
)
def test_salt_and_adapter_keep_content_apart(salt: str | None, adapter: str | None) -> None:
    root = Segment(1)
    parts: list[Part] = [("text", "1", 40)]
    plain = hash_by_us(root, parts, None, None)
    assert count_common(plain, hash_by_us(root, parts, None, None)) == 2
    assert count_common(plain, hash_by_us(root, parts, salt, adapter)) == 0
