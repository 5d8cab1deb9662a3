"""Limits of what may be asked of logits and texts, and the forms in which it may be written."""

from __future__ import annotations

import math
import numbers
import re
from typing import Any

import pytest

from kvist.engine.sampling import SamplingParams
from kvist.engine.sequence import EngineRequest
from kvist.errors import RequestError


@pytest.mark.parametrize(
    ("param", "value", "others"),
    [
        ("n", 0, {}),
        ("n", 129, {}),
        ("best_of", 2, {"n": 3}),
        ("best_of", 129, {}),
        ("min_tokens", -1, {}),
        ("min_tokens", 9, {"max_tokens": 8}),
        ("min_p", -0.1, {}),
        ("min_p", 1.1, {}),
        ("min_p", math.nan, {}),
        ("repetition_penalty", 0.0, {}),
        ("repetition_penalty", math.inf, {}),
        ("presence_penalty", 2.1, {}),
        ("frequency_penalty", -2.1, {}),
        ("frequency_penalty", math.nan, {}),
        ("logit_bias", {5: 101.0}, {}),
        ("logit_bias", {5: math.nan}, {}),
        ("allowed_token_ids", (), {}),
        ("bad_words", ("",), {}),
        ("stop", ("",), {}),
        ("stop", tuple("abcdefghijklmnopq"), {}),
        ("logprobs", -1, {}),
        ("prompt_logprobs", -1, {}),
    ],
)
def test_a_refusal_names_the_parameter_and_its_value(
    param: str, value: Any, others: dict[str, Any]
):
    with pytest.raises(
        RequestError, match=f"^{param} must be .*{re.escape(repr(value))}"
    ) as caught:
        SamplingParams(**{param: value, **others})
    assert caught.value.param == param


@pytest.mark.parametrize(
    "allowed",
    [
        {"n": 128, "best_of": 128},
        {"min_tokens": 8, "max_tokens": 8},
        {"min_tokens": 1_000, "max_tokens": None},
        {"min_p": 0.0},
        {"min_p": 1.0},
        {"repetition_penalty": 0.01},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"logit_bias": {0: -100, 1: 100}},
        {"stop": list("abcdefghijklmnop")},
        {"logprobs": 0, "prompt_logprobs": 0},
    ],
    ids=str,
)
def test_the_borders_are_allowed(allowed: dict[str, Any]):
    SamplingParams(**allowed)


def test_lists_and_a_single_text_are_taken_as_vllms_callers_write_them():
    params = SamplingParams(
        stop="END", stop_token_ids=[1, 2], allowed_token_ids=[3], bad_words=None
    )
    assert params.stop == ("END",)
    assert params.stop_token_ids == (1, 2)
    assert params.allowed_token_ids == (3,)
    assert params.bad_words == ()


@pytest.mark.parametrize("param", ["logprobs", "prompt_logprobs"])
def test_more_log_probabilities_than_the_engine_allows_are_refused(param: str):
    request = EngineRequest(
        request_id="r", prompt_token_ids=(1,), params=SamplingParams(**{param: 6})
    )
    request.check(10, max_logprobs=6)
    with pytest.raises(RequestError, match=f"{param}=6 .*--max-logprobs=5") as caught:
        request.check(10, max_logprobs=5)
    assert caught.value.param == param


def test_ranking_needs_log_probabilities_that_nobody_asked_for():
    assert SamplingParams(n=2).num_logprobs is None
    assert SamplingParams(n=2, best_of=3).num_logprobs == 0
    assert SamplingParams(n=2, best_of=3, logprobs=4).num_logprobs == 4
    assert SamplingParams(n=2, best_of=3).num_samples == 3


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("n", 2.5),
        ("n", True),
        ("n", None),
        ("max_tokens", "5"),
        ("min_tokens", 1.5),
        ("top_k", 1.5),
        ("seed", "a"),
        ("logprobs", True),
        ("temperature", None),
        ("temperature", "1"),
        ("top_p", 10**400),
        ("stop", (5,)),
        ("bad_words", (5,)),
        ("bad_words", "one"),
        ("bad_words_token_ids", ((),)),
        ("bad_words_token_ids", (("a",),)),
        ("stop_token_ids", ("a",)),
        ("stop_token_ids", 5),
        ("allowed_token_ids", (1.0,)),
        ("logit_bias", [1]),
        ("logit_bias", {"1": 1}),
        ("logit_bias", {1: "x"}),
    ],
)
def test_a_value_of_another_type_is_refused_before_a_step_can_fail_on_it(
    param: str, value: Any
) -> None:
    """Guarded: `n=2.5` or an empty bad word raised while a step was planned, for ever after."""
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{param: value})
    assert caught.value.param == param


def test_numbers_of_another_library_become_pythons() -> None:
    """The wire to the engine's process knows no others."""

    class Five:
        """As numpy's: registered as whole numbers, and no `int`."""

        def __int__(self) -> int:
            return 5

    numbers.Integral.register(Five)
    params = SamplingParams(max_tokens=Five(), stop_token_ids=[Five()])  # type: ignore[arg-type]
    assert type(params.max_tokens) is int
    assert (params.max_tokens, params.stop_token_ids) == (5, (5,))
