"""In bf16 the default model says what transformers says in bf16, up to the order of sums.

Rounding to 8 bits of mantissa is chaotic: one sum added up in another order ends as noise of the
full size in the logits, and of 128 greedy tokens some are decided by less. So two things are shown.
With the arithmetic of transformers itself (``kernels="sdpa"``, a prompt at a time, so that every
matrix has the same shape there and here) hardly a token differs. And with the fast kernels and in
batches, the first token that differs is judged by the fp32 model on the tokens both had in common:
if it finds both about as likely, rounding decided; an error in positions, slots or scales would
show as a choice that fp32 finds far worse.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvist.engine.tokenizer import Tokenizer
from kvist.testing.parity import GreedyReference, WatchedEngine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(5_400)]

# Fewer for a look at the test itself. The bound on how many differ needs all of them.
NUM_PROMPTS = int(os.environ.get("KVIST_TEST_PROMPTS", "64"))
NUM_TOKENS = 128
MAX_MARGIN = 0.25
MAX_SHARE = 0.25

SUBJECTS = (
    "The old lighthouse keeper",
    "A letter from the capital",
    "The river in spring",
    "My grandmother's garden",
    "The last train of the evening",
    "A young astronomer",
    "The baker on the corner",
    "Snow on the northern road",
)
MIDDLES = (
    "had not been seen for many years, and nobody in the town could say why.",
    "brought more questions than answers, as such things often do.",
    "was the subject of a long conversation between the two brothers.",
    "changed slowly at first, and then all at once.",
)
ENDS = (
    "On the first day of March",
    "The reason, it turned out, was simple:",
    "She opened the book and read aloud:",
    "There are three things that one should know about it. First,",
)


def texts(data_dir: Path | None) -> list[str]:
    """Real text where there is some, else sentences put together; all of different length."""
    files = sorted((data_dir / "text").rglob("*.txt")) if data_dir else []
    rng = random.Random(0)
    if files:
        whole = "\n".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)
        starts = [rng.randrange(max(1, len(whole) - 2_000)) for _ in range(NUM_PROMPTS)]
        return [whole[start : start + rng.randint(40, 1_200)].strip() or "The" for start in starts]
    made = [f"{s} {m} {e}" for e in ENDS for m in MIDDLES for s in SUBJECTS]
    rng.shuffle(made)
    return [" ".join(made[i : i + 1 + i % 5]) for i in range(NUM_PROMPTS)]


@pytest.fixture(scope="module")
def prompts(smollm2_folder):
    value = os.environ.get("KVIST_DATA")
    tokenizer = Tokenizer(smollm2_folder)
    return [tokenizer.encode(text)[:384] for text in texts(Path(value) if value else None)]


@pytest.fixture(scope="module")
def theirs(smollm2_folder, prompts):
    reference = GreedyReference(smollm2_folder, torch.bfloat16)
    return [reference.generate(prompt, NUM_TOKENS) for prompt in prompts]


def generate(folder, prompts, **options):
    watched = WatchedEngine(
        folder,
        num_blocks=64 * 32 + 1,
        max_model_len=512,
        dtype="bfloat16",
        poison_fresh_blocks=False,
        **options,
    )
    return watched.generate(prompts, NUM_TOKENS)


def first_differences(folder, prompts, ours, theirs):
    """Print and return (prompt, length, position, our token, theirs, fp32 margin, rank of ours)."""
    judge = GreedyReference(folder).model
    table = []
    for index, (prompt, a, b) in enumerate(zip(prompts, ours, theirs, strict=True)):
        assert len(a) == len(b) == NUM_TOKENS
        at = next((i for i in range(NUM_TOKENS) if a[i] != b[i]), None)
        if at is None:
            continue
        with torch.inference_mode():
            logits = judge(input_ids=torch.tensor([prompt + a[:at]])).logits[0, -1]
        margin = abs(float(logits[a[at]] - logits[b[at]]))
        rank = int((logits > logits[a[at]]).sum())
        table.append((index, len(prompt), at, a[at], b[at], margin, rank))
    print(f"\n{len(table)} of {len(prompts)} prompts differ within {NUM_TOKENS} tokens")
    print("prompt tokens first differing at, ours, theirs, fp32 margin, fp32 rank of ours")
    for row in table:
        print("{:6d} {:6d} {:9d} {:12d} {:7d} {:9.4f} {:6d}".format(*row))
    return table


def test_alone_with_the_arithmetic_of_transformers(smollm2_folder, prompts, theirs):
    ours = generate(smollm2_folder, prompts, kernels="sdpa", max_num_seqs=1)
    table = first_differences(smollm2_folder, prompts, ours, theirs)
    assert all(row[5] <= MAX_MARGIN for row in table)
    assert len(table) <= MAX_SHARE * len(prompts)


def test_in_a_batch_with_the_fast_kernels(smollm2_folder, prompts, theirs):
    ours = generate(smollm2_folder, prompts)
    table = first_differences(smollm2_folder, prompts, ours, theirs)
    assert all(row[5] <= MAX_MARGIN for row in table)
