"""What a request may ask of its logits, against the plain dense definition of it.

`test_sampler` judges temperature, top-k, top-p and min-p closely; here 100,000 draws for each, and
for penalties, biases, masks and the index of a continuation. Guards against a penalty applied to
the wrong sign, twice, or to the prompt; a mask that leaks; log probabilities taken after all that.
"""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from kvist.engine.logits import adjust
from kvist.engine.logprobs import describe
from kvist.engine.sampler import NOT_FINITE, NOTHING_LEFT, sample
from kvist.engine.sampling import SamplingParams
from kvist.engine.step import SampleRow

pytestmark = pytest.mark.usefixtures("one_thread")

DRAWS = 100_000
VOCAB = 30
COUNTS = {1: 3, 4: 1, 7: 0, 9: 2, 20: 0}
"""Generated so often; 0 for tokens of the prompt alone."""


def logits_of(seed, vocab=VOCAB, spread=1.2):
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread


def penalized(logits, counts, params):
    """vLLM's definition, with a count for every token of the vocabulary. float64."""
    times = torch.zeros(len(logits), dtype=torch.float64)
    seen = torch.zeros(len(logits), dtype=torch.bool)
    for token_id, count in counts.items():
        times[token_id], seen[token_id] = count, True
    x = logits.double()
    repetition = params.repetition_penalty
    x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
    return x - params.frequency_penalty * times - params.presence_penalty * (times > 0)


def definition(logits, params, counts, forbidden=(), bitmask=None):
    """Probabilities in float64, by sorting everything."""
    x = logits.double()
    if bitmask is not None:
        bits = [(bitmask[i // 8] >> i % 8) & 1 for i in range(len(x))]
        x = x.where(torch.tensor(bits, dtype=torch.bool), -math.inf)
    if params.allowed_token_ids is not None:
        kept = torch.zeros(len(x), dtype=torch.bool)
        kept[list(params.allowed_token_ids)] = True
        x = x.where(kept, -math.inf)
    x[list(forbidden)] = -math.inf
    for token_id, bias in (params.logit_bias or {}).items():
        x[token_id] += bias
    x = penalized(x, counts, params)
    probs = torch.softmax(x / params.temperature, dim=-1)
    order = sorted(range(len(probs)), key=lambda i: (-probs[i].item(), i))
    order = [i for i in order if probs[i] >= params.min_p * probs.max()]
    if params.top_k > 0:
        order = order[: params.top_k]
    total = sum(probs[i].item() for i in order)
    kept, reached = [], 0.0
    for i in order:
        if reached >= params.top_p:
            break
        kept.append(i)
        reached += probs[i].item() / total
    cut = torch.zeros_like(probs)
    cut[kept] = probs[kept]
    return cut / cut.sum()


def p_value(token_ids, probs):
    """How likely counts at least this far from `probs` are; 0 if an impossible token was drawn."""
    counts = torch.bincount(torch.tensor(token_ids), minlength=len(probs)).double()
    if counts[probs == 0].sum() > 0:
        return 0.0
    wanted = probs * len(token_ids)
    large, small = wanted >= 10, (wanted < 10) & (wanted > 0)
    seen, want = counts[large].tolist(), wanted[large].tolist()
    if small.any():
        seen.append(counts[small].sum().item())
        want.append(wanted[small].sum().item())
    chi2 = sum((s - w) ** 2 / w for s, w in zip(seen, want, strict=True))
    freedom = torch.tensor((len(want) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, torch.tensor(chi2 / 2, dtype=torch.float64)).item()


def draw(logits, params, counts=None, forbidden=(), bitmask=None, rows=None):
    if rows is None:
        rows = [
            SampleRow(params, 5, position, 0, forbidden, counts, bitmask)
            for position in range(DRAWS)
        ]
    drawn = []
    for start in range(0, len(rows), 10_000):
        some = rows[start : start + 10_000]
        sampled = sample(logits.repeat(len(some), 1), some)
        assert all(sampled.valid)
        drawn += sampled.token_ids
    return drawn


MASK = bytes([0b10110110, 0b01101101, 0b11111000, 0b00110011])

CASES = [
    ({"temperature": 0.7}, {}),
    ({"top_k": 6}, {}),
    ({"top_p": 0.7}, {}),
    ({"min_p": 0.15}, {}),
    ({"temperature": 1.3, "min_p": 0.02, "top_k": 12, "top_p": 0.85}, {}),
    ({"repetition_penalty": 1.4}, {"counts": COUNTS}),
    ({"presence_penalty": 0.9}, {"counts": COUNTS}),
    ({"frequency_penalty": -0.4}, {"counts": COUNTS}),
    (
        {
            "repetition_penalty": 0.8,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.3,
            "temperature": 0.9,
            "top_k": 10,
        },
        {"counts": COUNTS},
    ),
    ({"logit_bias": {2: 3.0, 11: -2.0, 29: 1.0}}, {}),
    ({"allowed_token_ids": (3, 5, 8, 13), "top_p": 0.9}, {}),
    ({}, {"forbidden": (0, 1, 2, 3)}),
    ({"min_p": 0.05}, {"bitmask": MASK}),
]


@pytest.mark.parametrize(("asked", "state"), CASES, ids=str)
def test_draws_follow_the_definition(asked, state):
    logits, params = logits_of(3), SamplingParams(**asked)
    probs = definition(logits, params, **{"counts": {}, **state})
    assert p_value(draw(logits, params, **state), probs) > 0.001


@pytest.mark.parametrize(
    ("asked", "wrong"),
    [
        ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.2}),
        ({"presence_penalty": 0.9}, {"frequency_penalty": 0.9}),
        ({"frequency_penalty": 0.5}, {"frequency_penalty": 0.4}),
        ({"min_p": 0.15}, {"min_p": 0.12}),
        ({"logit_bias": {6: 1.0}}, {"logit_bias": {6: 0.9}}),
    ],
    ids=str,
)
def test_a_sampler_that_does_something_else_is_caught(asked, wrong):
    logits = logits_of(3)
    probs = definition(logits, SamplingParams(**asked), COUNTS)
    assert p_value(draw(logits, SamplingParams(**wrong), COUNTS), probs) < 1e-5


def test_the_continuations_of_one_prompt_draw_independently():
    """One draw for each index at one position; and two indices together fill the square."""
    logits, params = logits_of(4, vocab=6), SamplingParams()
    probs = torch.softmax(logits.double(), dim=-1)
    rows = [SampleRow(params, 9, position, index) for position in range(DRAWS) for index in (0, 1)]
    drawn = draw(logits, params, rows=rows)
    assert p_value(drawn[1::2], probs) > 0.001
    pairs = [6 * a + b for a, b in zip(drawn[::2], drawn[1::2], strict=True)]
    assert p_value(pairs, (probs[:, None] * probs).flatten()) > 0.001
    by_index = [SampleRow(params, 9, 3, index) for index in range(DRAWS)]
    assert p_value(draw(logits, params, rows=by_index), probs) > 0.001


@pytest.mark.parametrize("seed", range(8))
def test_sparse_penalties_are_the_dense_ones(seed):
    """Several rows at once, each with counts and numbers of its own; others stay as they are."""
    random = torch.Generator().manual_seed(seed)

    def number(low, high):
        return low + (high - low) * float(torch.rand((), generator=random))

    logits = torch.randn(6, 200, generator=random) * 4
    rows, dense = [], logits.double()
    for i in (0, 2, 5):
        ids = torch.randperm(200, generator=random)[:40].tolist()
        counts = {t: int(number(0, 4)) for t in ids}
        params = SamplingParams(
            repetition_penalty=number(0.5, 2),
            presence_penalty=number(-2, 2),
            frequency_penalty=number(-2, 2),
        )
        rows.append((i, SampleRow(params, 0, 0, counts=counts)))
        dense[i] = penalized(logits[i], counts, params)
    changed = logits.clone()
    adjust(changed, rows)
    torch.testing.assert_close(changed.double(), dense, rtol=1e-5, atol=1e-5)
    assert torch.equal(changed[[1, 3, 4]], logits[[1, 3, 4]])


def test_log_probabilities_are_those_of_the_model_itself():
    logits = logits_of(7, vocab=500)
    truth = torch.log_softmax(logits.double(), dim=-1)
    best = truth.argsort(descending=True, stable=True).tolist()
    params = SamplingParams(
        temperature=0.3, top_k=3, logit_bias={best[50]: 100.0}, logprobs=4, presence_penalty=2.0
    )
    sampled = sample(logits[None].clone(), [SampleRow(params, 1, 2, counts={best[0]: 5})])
    assert sampled.token_ids == [best[50]]
    found = sampled.logprobs[0]
    assert (found.token_id, found.rank) == (best[50], 51)
    assert found.logprob == pytest.approx(truth[best[50]].item(), abs=1e-5)
    assert [token_id for token_id, _ in found.top] == best[:4]
    assert [value for _, value in found.top] == pytest.approx(truth[best[:4]].tolist(), abs=1e-5)


def test_log_probabilities_of_many_rows_and_equals():
    logits = torch.zeros(70, 9)
    logits[:, 5:7] = 2.0
    found = describe(logits, [6] * 35 + [0] * 35, [3] * 70)
    assert [f.rank for f in found] == [1] * 35 + [3] * 35
    assert all([token_id for token_id, _ in f.top] == [5, 6, 0] for f in found)


def test_a_row_with_nothing_left_and_a_broken_one_fail_alone_and_say_why():
    logits = torch.stack([logits_of(i) for i in range(4)])
    logits[1, 3] = math.nan
    allowed = SamplingParams(allowed_token_ids=(3,))
    plain = SamplingParams()
    rows = [
        SampleRow(allowed, 1, 1, forbidden=(3,)),
        SampleRow(plain, 1, 1),
        SampleRow(allowed, 1, 1),
        SampleRow(plain, 1, 1),
    ]
    alone = sample(logits[3:].clone(), rows[3:]).token_ids
    sampled = sample(logits.clone(), rows)
    assert sampled.faults == {0: NOTHING_LEFT, 1: NOT_FINITE}
    assert sampled.token_ids[2:] == [3, *alone]
    # A NaN that a mask would hide is a fault all the same.
    hidden = SampleRow(SamplingParams(allowed_token_ids=(4,)), 1, 1)
    assert sample(logits[1:2].clone(), [hidden]).faults == {0: NOT_FINITE}


def test_tokens_past_the_end_of_a_mask_are_not_allowed():
    logits = torch.zeros(1, 20)
    logits[0, 15] = 9.0
    row = SampleRow(SamplingParams(temperature=0.0), 1, 1, bitmask=bytes([0b1000]))
    assert sample(logits, [row]).token_ids == [3]
