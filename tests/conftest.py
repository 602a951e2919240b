"""Hypothesis measures no time in any test: a busy machine is no fault."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("hypothesis") is not None:  # `make test-clients` does without
    from hypothesis import HealthCheck, settings

    settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("untimed")
