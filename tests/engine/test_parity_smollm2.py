"""Greedy output of the default model equals transformers, token by token, in fp32.

The tiny models cover what can happen; this one has real weights, where a small error does not show
in every token, and a real vocabulary.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvist.testing.parity import GreedyReference, WatchedEngine

pytestmark = pytest.mark.usefixtures("one_thread")

SYSTEM = "You are a careful gardener who answers in one short sentence, and never guesses."
TEXTS = [
    "The oldest tree in the village",
    "Water boils at a lower temperature on a mountain because",
    "1, 1, 2, 3, 5, 8,",
    "Es war einmal ein König, der",
]


@pytest.fixture(scope="module")
def reference(smollm2_folder, one_thread):
    return GreedyReference(smollm2_folder)


@pytest.fixture(scope="module")
def prompts(smollm2_folder):
    from kvist.engine.tokenizer import Tokenizer

    tokenizer = Tokenizer(smollm2_folder)
    chats = [
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        for question in ("When do I plant garlic?", "How deep does a carrot root grow?")
    ]
    return [*map(tokenizer.encode, TEXTS), *map(tokenizer.encode_chat, chats)]


def expected(reference, prompts, num_tokens):
    return [reference.generate(prompt, num_tokens) for prompt in prompts]


def test_alone_together_and_with_hits(smollm2_folder, reference, prompts):
    watched = WatchedEngine(smollm2_folder, num_blocks=128, max_model_len=512)
    (alone,) = watched.generate(prompts[:1], 12)
    assert alone == reference.generate(prompts[0], 12)
    assert watched.generate(prompts, 12) == expected(reference, prompts, 12)
    watched.counts.clear()
    assert watched.generate(prompts, 12) == expected(reference, prompts, 12)
    # The chats are long enough to be found again.
    assert watched.counts["hits"] >= 2 * 16


def test_chunks_preemptions_and_forks(smollm2_folder, reference, prompts):
    watched = WatchedEngine(
        smollm2_folder,
        num_blocks=13,
        max_model_len=96,
        max_num_seqs=6,
        max_num_batched_tokens=13,
        block_size=8,
    )
    short = [prompt[:25] for prompt in prompts]
    for prompt in short:
        watched.add(prompt, 12)
    while watched.engine.has_work:
        decoding = [r for r, out in watched.outputs.items() if len(out) > 3]
        decoding = [r for r in decoding if r not in watched.ends]
        if decoding and watched.counts["forks"] < 2:
            watched.fork(decoding[-1])
        watched.step()
    watched.drain()
    for request_id, output in watched.outputs.items():
        assert output == reference.generate(watched.prompts[request_id], 12), request_id
    for event in ("chunks", "preemptions", "copies", "forks", "mixed steps"):
        assert watched.counts[event] > 0, watched.counts
