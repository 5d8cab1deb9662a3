"""What a sequence forbids its next token: bad words and early ends."""

from __future__ import annotations

from typing import Any

import pytest

from kvist.engine.planning import forbidden_ids, sample_row
from kvist.engine.sampling import SamplingParams
from kvist.engine.sequence import EngineRequest, Sequence

PROMPT = (7, 8)


def sequence(outputs: tuple[int, ...], eos: tuple[int, ...] = (), **params: Any) -> Sequence:
    request = EngineRequest(
        request_id="r",
        prompt_token_ids=PROMPT,
        params=SamplingParams(**params),
        eos_token_ids=eos,
    )
    seq = Sequence(request, 1, 0, 100, None)
    for token_id in outputs:
        seq.append(token_id)
    return seq


@pytest.mark.parametrize(
    ("outputs", "forbidden"),
    [
        ((), (3,)),
        ((1,), (3, 5)),
        ((4, 1), (3, 5)),
        ((1, 4), (3,)),
        ((1, 2), (3, 6)),
        ((2,), (3,)),
    ],
)
def test_only_the_end_of_a_bad_word_whose_beginning_stands_there(outputs, forbidden):
    words = ((3,), (1, 5), (1, 2, 6))
    assert set(forbidden_ids(sequence(outputs, bad_words_token_ids=words))) == set(forbidden)


def test_the_prompt_is_no_beginning_of_a_bad_word():
    words = ((8, 5), (7, 8, 6), (8, 1, 4))
    assert forbidden_ids(sequence((), bad_words_token_ids=words)) == ()
    assert forbidden_ids(sequence((1,), bad_words_token_ids=words)) == ()


@pytest.mark.parametrize(
    ("ignore_eos", "early"), [(False, {4, 2}), (True, {4})], ids=["eos", "ignore_eos"]
)
def test_nothing_ends_the_text_before_min_tokens(ignore_eos, early):
    def asked(outputs: tuple[int, ...]) -> Sequence:
        return sequence(outputs, eos=(2,), min_tokens=2, stop_token_ids=[4], ignore_eos=ignore_eos)

    assert set(forbidden_ids(asked((1,)))) == early
    assert forbidden_ids(asked((1, 1))) == ()
    # A runner that does not sample may say one all the same.
    assert asked((1, 4)).stop_reason(4) is None
    assert asked((1, 1, 4)).stop_reason(4) == "stop"


def test_tokens_are_counted_for_penalties_only_and_a_fork_counts_for_itself():
    assert sample_row(sequence((1, 1))).counts is None
    seq = sequence((1, 1, 8), presence_penalty=0.5)
    before = sample_row(seq)
    fork = seq.fork("f", 2)
    fork.append(1)
    assert before.counts == {7: 0, 8: 1, 1: 2}
    assert sample_row(fork).counts == {7: 0, 8: 1, 1: 3}
    assert sample_row(seq).counts == before.counts
