"""What holds for each policy that ships."""

from __future__ import annotations

import dataclasses
import inspect
import json

import pytest

from tenuto.core.contracts import check_contract
from tenuto.core.loader import get_policy_names, load_policy

every_policy = pytest.mark.parametrize("name", get_policy_names())


@every_policy
def test_it_keeps_the_contract(name: str) -> None:
    check_contract(load_policy(name))


@every_policy
def test_it_says_what_it_is_and_where_it_comes_from(name: str) -> None:
    cls = type(load_policy(name))
    assert inspect.getdoc(cls), f"{name} has no docstring"
    module_text = inspect.getdoc(inspect.getmodule(cls))
    assert module_text is not None and module_text.startswith(f"{name}: ")


@every_policy
def test_it_asks_for_host_memory_if_it_offloads(name: str) -> None:
    cls = type(load_policy(name))
    assert cls.needs.engine.offload or "Offload" not in vars(inspect.getmodule(cls))


@every_policy
def test_its_parameters_are_documented_settings(name: str) -> None:
    policy = load_policy(name)
    for field in dataclasses.fields(policy):
        if not field.init:
            continue
        assert field.metadata.get("help"), f"{name}.{field.name} has no help"
        assert field.name == field.name.strip("_"), f"{name}.{field.name} looks private"
        # Its own default is a value that a configuration file may hold.
        options = json.loads(json.dumps({field.name: getattr(policy, field.name)}))
        assert repr(load_policy(name, options)) == repr(policy)


@every_policy
def test_it_is_a_dataclass_of_its_own(name: str) -> None:
    # Policy is a dataclass too, so a subclass that is none would inherit its (empty) list of parameters.
    assert "__dataclass_fields__" in vars(type(load_policy(name)))


@every_policy
def test_instances_share_nothing(name: str) -> None:
    one, other = load_policy(name), load_policy(name)
    before = repr(vars(other))
    check_contract(one)  # its told hooks may learn
    assert repr(vars(other)) == before
