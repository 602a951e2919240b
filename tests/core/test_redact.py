"""API keys and tokens are not shown."""

from __future__ import annotations

import pytest

from tenuto.core.errors import redact


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("serve m --api-key s3 --port 1", "serve m --api-key *** --port 1"),
        ("--api-key=s3 --x s3y", "--api-key=*** --x s3y"),
        ("--api_key s3 s4 --seed 1", "--api_key *** *** --seed 1"),
        ("--api-key s3 --api-key=s4", "--api-key *** --api-key=***"),
        ("serve m --api-key", "serve m --api-key"),
        ("--api-ke s3 --api_k=s4 --api-server-count 2", "--api-ke *** --api_k=*** --api-server-count 2"),
        ("--hf-token s3 --hf_tok=s4 --hf-overrides {}", "--hf-token *** --hf_tok=*** --hf-overrides {}"),
        ("--hf-token s3 -tp 2", "--hf-token *** -tp 2"),
        ("--api-key -123 -.5 -tp=2", "--api-key *** *** -tp=2"),
        ("--api-key -s3 --port 1", "--api-key *** --port 1"),
        ("--api-key --s3 s4 -tp 2", "--api-key *** *** -tp 2"),
        ("serve s3 --port 80", "serve s3 --port 80"),
    ],
)
def test_every_value_of_the_option_is_hidden(given: str, shown: str) -> None:
    assert redact(given.split()) == shown.split()
