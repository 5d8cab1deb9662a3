"""What may be asked of sampling, and what the refusal says."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from kvist.engine.sampling import SamplingParams
from kvist.errors import KvistError, RequestError


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -3),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", math.nan),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
    ],
)
def test_a_refusal_names_the_parameter_and_its_value(param: str, value: Any):
    with pytest.raises(
        RequestError, match=f"^{param} must be .*{re.escape(repr(value))}"
    ) as caught:
        SamplingParams(**{param: value})
    assert caught.value.param == param
    assert isinstance(caught.value, KvistError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "allowed",
    [
        {"max_tokens": 1},
        {"max_tokens": None},
        {"temperature": 0},
        {"temperature": 2.5},
        {"top_k": -1},
        {"top_k": 0},
        {"top_k": 1},
        {"top_p": 1.0},
        {"top_p": 1e-9},
        {"seed": -1},
    ],
)
def test_the_borders_are_allowed(allowed: dict[str, Any]):
    SamplingParams(**allowed)


@pytest.mark.parametrize(
    ("params", "greedy"),
    [
        ({"temperature": 0.0}, True),
        ({"temperature": 1e-6}, True),
        ({"temperature": 0.5, "top_k": 1}, True),
        ({"temperature": 0.5}, False),
        ({"temperature": 0.5, "top_k": 2}, False),
        ({}, False),
    ],
)
def test_greedy(params: dict[str, Any], greedy: bool):
    assert SamplingParams(**params).is_greedy is greedy
