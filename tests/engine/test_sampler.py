"""The sampler draws what its definition says, and nothing about the batch changes a draw.

Distributions are judged by chi-square against a plain definition that sorts everything, over fixed
seeds, so a run is the same everywhere; wrong samplers must fail the same judgement. Guards against
a biased uniform, a nucleus one token too small or too large, top-k after top-p, a temperature that
is not applied, ties that depend on who else is sampled, and one bad row taking others with it.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")

from kvist.engine.draw import _SHORT, NUCLEUS_CANDIDATES, _highest, uniform
from kvist.engine.sampler import most_likely, sample
from kvist.engine.sampling import SamplingParams
from kvist.engine.step import SampleRow

pytestmark = pytest.mark.usefixtures("one_thread")

DRAWS = 20_000
VOCAB = 40


def logits_of(seed: int, vocab: int = VOCAB, spread: float = 1.5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(vocab, generator=generator) * spread


def rows_of(params: SamplingParams, count: int, seed: int = 11) -> list[SampleRow]:
    return [SampleRow(params, seed, position) for position in range(count)]


def definition(
    logits, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
):
    """Probabilities in float64: scale, sort, cut, cut, cut, normalise."""
    probs = torch.softmax(logits.double() / temperature, dim=-1)
    order = sorted(range(len(probs)), key=lambda i: (-probs[i].item(), i))
    order = [i for i in order if probs[i] >= min_p * probs.max()]
    if top_k > 0:
        order = order[:top_k]
    total = sum(probs[i].item() for i in order)
    kept, reached = [], 0.0
    for i in order:
        if reached >= top_p:
            break
        kept.append(i)
        reached += probs[i].item() / total
    cut = torch.zeros_like(probs)
    cut[kept] = probs[kept]
    return cut / cut.sum()


def p_value(token_ids: list[int], probs) -> float:
    """How likely counts at least this far from `probs` are; 0 if an impossible token was drawn."""
    counts = torch.bincount(torch.tensor(token_ids), minlength=len(probs)).double()
    if counts[probs == 0].sum() > 0:
        return 0.0
    wanted = probs * len(token_ids)
    # Cells with few draws are pooled: the approximation does not hold for them.
    small = (wanted < 10) & (wanted > 0)
    seen = [*counts[wanted >= 10].tolist()]
    want = [*wanted[wanted >= 10].tolist()]
    if small.any():
        seen.append(counts[small].sum().item())
        want.append(wanted[small].sum().item())
    chi2 = sum((s - w) ** 2 / w for s, w in zip(seen, want, strict=True))
    freedom = torch.tensor((len(want) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, torch.tensor(chi2 / 2, dtype=torch.float64)).item()


def draw(logits, params: SamplingParams, count: int = DRAWS) -> list[int]:
    sampled = sample(logits.expand(count, -1), rows_of(params, count))
    assert all(sampled.valid)
    return sampled.token_ids


CASES = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 2},
    {"top_k": 7},
    {"top_k": VOCAB + 5},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_k": 10, "top_p": 0.8},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.95},
    {"temperature": 3.0, "top_p": 0.5},
    {"min_p": 0.2},
    {"temperature": 1.5, "min_p": 0.05, "top_k": 12, "top_p": 0.9},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_draws_follow_the_definition(case):
    logits = logits_of(3)
    assert p_value(draw(logits, SamplingParams(**case)), definition(logits, **case)) > 0.001


@pytest.mark.parametrize(
    ("asked", "wrong"),
    [
        ({"temperature": 0.9}, {"temperature": 1.0}),
        ({"top_k": 7}, {"top_k": 8}),
        ({"top_k": 7}, {"top_k": 6}),
        ({"min_p": 0.2}, {"min_p": 0.1}),
        ({"top_p": 0.9}, {"top_p": 0.8}),
        ({"top_p": 0.8}, {"top_p": 0.9}),
        # top-p of the whole vocabulary before top-k, rather than of what top-k left.
        ({"top_k": 5, "top_p": 0.6}, {"top_k": 5, "top_p": 0.999}),
    ],
    ids=str,
)
def test_a_sampler_that_does_something_else_is_caught(asked, wrong):
    """The judgement above can tell: draws of one definition fail against another."""
    logits = logits_of(3)
    assert p_value(draw(logits, SamplingParams(**wrong)), definition(logits, **asked)) < 1e-6


def test_a_biased_uniform_is_caught(monkeypatch):
    logits = logits_of(3)
    monkeypatch.setattr("kvist.engine.draw.uniform", lambda *words: uniform(*words) ** 1.1)
    assert p_value(draw(logits, SamplingParams()), definition(logits)) < 1e-6


def test_a_huge_nucleus_is_drawn_exactly():
    """More tokens than are looked at first: the row is sorted whole, the others are not touched."""
    vocab = 5 * NUCLEUS_CANDIDATES // 2
    logits = logits_of(5, vocab, spread=0.2)
    params = SamplingParams(top_p=0.9)
    probs = definition(logits, top_p=0.9)
    assert int((probs > 0).sum()) > 2 * NUCLEUS_CANDIDATES
    drawn = draw(logits, params)
    # Pooled, or every cell would be too small: by rank, in groups of equal weight.
    order = torch.argsort(probs, descending=True, stable=True)
    group = torch.empty(vocab, dtype=torch.int64)
    group[order] = (probs[order].cumsum(0) * 50).long().clamp(max=49)
    pooled = torch.zeros(50, dtype=torch.float64).index_add_(0, group, probs)
    assert int(probs[torch.tensor(drawn)].eq(0).sum()) == 0
    assert p_value(group[torch.tensor(drawn)].tolist(), pooled) > 0.001

    peaked = logits_of(6, vocab, spread=4.0)
    alone = sample(peaked[None], [SampleRow(params, 1, 1)]).token_ids
    both = sample(torch.stack([logits, peaked]), [SampleRow(params, 1, 0), SampleRow(params, 1, 1)])
    assert both.token_ids[1:] == alone
    assert both.token_ids[:1] == sample(logits[None], [SampleRow(params, 1, 0)]).token_ids


@pytest.mark.parametrize("winners", [(3, 7), (0, 1, 39), (38, 39)])
def test_greedy_takes_the_lowest_id_among_equals(winners):
    logits = logits_of(1)
    logits[list(winners)] = 9.0
    rows = [SampleRow(SamplingParams(temperature=0.0), seed, 5) for seed in range(3)]
    assert sample(logits.expand(3, -1), rows).token_ids == [min(winners)] * 3


def test_the_same_seed_draws_the_same_token_in_every_batch():
    """Whatever the other rows ask for, and wherever in the batch the row stands."""
    many = [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=5),
        SamplingParams(top_k=300),
        SamplingParams(top_p=0.5),
        SamplingParams(top_p=0.999, temperature=2.0),
        SamplingParams(top_k=50, top_p=0.9, temperature=0.8),
    ]
    rows = [SampleRow(params, seed, 3 * seed) for seed in range(6) for params in many]
    logits = torch.stack([logits_of(i, vocab=1_000) for i in range(len(rows))])
    together = sample(logits, rows).token_ids
    backwards = sample(logits.flip(0), rows[::-1]).token_ids
    alone = [sample(logits[i : i + 1], rows[i : i + 1]).token_ids[0] for i in range(len(rows))]
    assert together == alone
    assert backwards[::-1] == alone


@pytest.mark.parametrize("equals", [40, 4_000])
def test_equal_logits_at_the_edge_of_top_k_do_not_depend_on_the_batch(equals):
    """Logits of 16-bit models are often equal; which of them a selection returns is its affair."""
    tied = torch.full((5_000,), -20.0)
    tied[100 : 100 + equals] = 0.0
    other = logits_of(2, vocab=5_000)
    for seed in range(40):
        row = SampleRow(SamplingParams(top_k=5, seed=seed), seed, 7)
        wide = SampleRow(SamplingParams(top_p=0.9), seed, 7)
        (alone,) = sample(tied[None], [row]).token_ids
        together = sample(torch.stack([tied, other]), [row, wide]).token_ids
        assert alone == together[0]
        assert 100 <= alone < 105


def test_seed_position_and_index_choose_the_draw():
    logits = torch.zeros(1, 50_000)
    params = SamplingParams()

    def token(seed: int, position: int, index: int) -> int:
        return sample(logits, [SampleRow(params, seed, position, index)]).token_ids[0]

    words = [(s, p, i) for s in range(4) for p in range(4) for i in range(3)]
    drawn = {word: token(*word) for word in words}
    assert len(set(drawn.values())) == len(drawn)
    assert token(3, 2, 1) == drawn[3, 2, 1]


GOLDEN = [  # seed, index, position
    ((0, 0, 0), 0.13870941014555427),
    ((0, 0, 1), 0.9711020828012883),
    ((0, 1, 0), 0.18383979100743952),
    ((1, 0, 0), 0.6935121390102292),
    ((12345, 2, 678), 0.07212518417318081),
    ((-1, 0, 5), 0.3150901965850199),
    ((2**70 + 3, 1, 2), 0.6122624967133397),
]


@pytest.mark.parametrize(("words", "value"), GOLDEN)
def test_uniform_is_the_same_everywhere_and_for_ever(words, value):
    """A seed that somebody wrote down must give the same text in the next version."""
    assert uniform(*words) == value


def test_neighbouring_seeds_and_positions_are_unrelated():
    values = [uniform(seed, 0, position) for seed in range(100) for position in range(100)]
    assert all(0.0 <= value < 1.0 for value in values)
    mean = sum(values) / len(values)
    # Four standard errors.
    assert abs(mean - 0.5) < 4 / math.sqrt(12 * len(values))
    steps = pairwise(values)
    covariance = sum((a - 0.5) * (b - 0.5) for a, b in steps) / len(values)
    assert abs(covariance) < 4 / 12 / math.sqrt(len(values))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_fails_alone(bad):
    rows = [
        SampleRow(params, 1, 2)
        for params in (
            SamplingParams(),
            SamplingParams(temperature=0.0),
            SamplingParams(top_k=5),
            SamplingParams(top_p=0.9),
        )
        for _ in range(2)
    ]
    logits = torch.stack([logits_of(i) for i in range(len(rows))])
    clean = sample(logits, rows)
    broken = logits.clone()
    broken[::2, 17] = bad
    sampled = sample(broken, rows)
    assert sampled.valid == [False, True] * 4
    assert sampled.token_ids[1::2] == clean.token_ids[1::2]


def test_a_masked_token_is_no_failure_and_is_never_drawn():
    logits = logits_of(4)
    logits[5:] = -math.inf
    for params in (SamplingParams(), SamplingParams(top_k=8), SamplingParams(top_p=0.99)):
        drawn = draw(logits, params, 2_000)
        assert max(drawn) < 5


@pytest.mark.parametrize("vocab", [40, 256, 257, 1_000, 1_024])
def test_the_most_likely_token_is_the_lowest_of_equals_wherever_it_lies(vocab):
    logits = torch.randint(0, 3, (64, vocab), generator=torch.Generator().manual_seed(0)).float()
    # The highest in the first place, the last, and on both sides of a block's end.
    for row, places in enumerate([(0,), (vocab - 1,), (vocab - 1, 0), (255, 256), (256, 300)]):
        for place in places:
            logits[row, min(place, vocab - 1)] = 9.0
    best, choice = most_likely(logits)
    assert best.tolist() == logits.amax(-1).tolist()
    assert choice.tolist() == [row.index(max(row)) for row in logits.tolist()]


def test_a_row_with_a_nan_shows_it_and_leaves_the_others_alone():
    logits = torch.zeros(3, 600)
    logits[0, 7] = logits[2, 599] = torch.nan
    logits[1, 300] = 1.0
    best, choice = most_likely(logits)
    assert best.isnan().tolist() == [True, False, True]
    assert choice[1] == 300


@pytest.mark.parametrize("vocab_size", [_SHORT * 8 * 4, _SHORT * 400, _SHORT * 400 + 7, 5_000])
@pytest.mark.parametrize("size", [1, 8, 64])
def test_the_highest_by_blocks_are_the_highest(vocab_size: int, size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size + size)
    # Few different values: most of the last ones are equal, within a block and across blocks.
    logits = torch.randint(0, 40, (6, vocab_size), generator=generator).float()
    logits[1] = torch.randn(vocab_size, generator=generator)
    logits[2] = -torch.inf
    logits[2, [3, vocab_size - 1]] = 1.0
    logits[3] = torch.arange(vocab_size)  # all of the highest in the last blocks
    values, ids = _highest(logits, size)
    wanted = logits.sort(dim=-1, descending=True).values[:, :size]
    assert torch.equal(values.sort(dim=-1, descending=True).values, wanted)
    assert torch.equal(logits.gather(-1, ids), values)
    assert all(len(set(row)) == size for row in ids.tolist())
