"""What a shared prefix saves, counted in tokens that go through the model."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvist.testing.parity import WatchedEngine

pytestmark = pytest.mark.usefixtures("one_thread")

PREFIX, BLOCK = 2_000, 16


@pytest.fixture
def watched(tiny_folder):
    return WatchedEngine(tiny_folder("llama"), num_blocks=600, max_model_len=4_000)


def prompt(rng, length):
    return [rng.randrange(256) for _ in range(length)]


def forward_tokens(watched, prompts) -> int:
    """Tokens that went through the model until each prompt has one new token."""
    before = watched.llm.runner.num_forward_tokens
    watched.generate(prompts, 1)
    return watched.llm.runner.num_forward_tokens - before


@pytest.mark.parametrize("length", [PREFIX, PREFIX - 1, PREFIX + 7])
def test_a_second_request_computes_at_most_one_block_beside_its_own(watched, rng, length):
    prefix = prompt(rng, length)
    first, second = prefix + prompt(rng, 9), prefix + prompt(rng, 33)
    assert forward_tokens(watched, [first]) == len(first)
    assert 33 <= forward_tokens(watched, [second]) <= 33 + BLOCK


def test_the_same_prompt_again_computes_at_most_one_block(watched, rng):
    whole = prompt(rng, PREFIX)
    forward_tokens(watched, [whole])
    assert 1 <= forward_tokens(watched, [whole]) <= BLOCK


def test_prompts_that_arrive_together_compute_their_prefix_once(watched, rng):
    prefix = prompt(rng, PREFIX)
    prompts = [prefix + prompt(rng, 20) for _ in range(8)]
    computed = forward_tokens(watched, prompts)
    assert PREFIX + 8 * 20 <= computed <= PREFIX + 8 * (20 + BLOCK)


def test_a_prefix_that_differs_in_one_early_token_shares_nothing(watched, rng):
    first = prompt(rng, PREFIX)
    second = [first[0] ^ 1, *first[1:]]
    forward_tokens(watched, [first])
    assert forward_tokens(watched, [second]) == len(second)
