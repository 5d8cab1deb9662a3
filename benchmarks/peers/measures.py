"""What is asked of every engine, and the numbers made of its answers.

Owns lengths, prompts and arithmetic. Knows no engine: it is handed something that can be called.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.bandwidth import Rate, rate_of

Samples = dict[str, float]

_PROBE = (504, 3575, 282, 4649, 314)
"""Ids of "The capital of France is" in the model's vocabulary."""


@dataclass(frozen=True)
class Lengths:
    """Tokens and streams of one run.

    Attributes
    ----------
    prompt, output : int
        Of each stream.
    streams : tuple of int
        How many side by side, beside one alone.
    prefill : int
        Of the long prompt.
    context : int
        Of the shared prefix; what follows it has `tail` tokens.
    context_output : int
        Decoded at that context.
    """

    prompt: int = 128
    output: int = 128
    streams: tuple[int, ...] = (8, 32)
    prefill: int = 4096
    context: int = 7500
    tail: int = 16
    context_output: int = 48


OWN = frozenset({"outside the model", "attention"})
"""Measures that only our own driver knows."""

FULL = Lengths()
QUICK = Lengths(prompt=32, output=16, streams=(2, 4), prefill=256, context=512, context_output=8)
"""Shows that every driver works; its numbers mean little."""


@dataclass(frozen=True)
class Engine:
    """What can be asked of an open engine.

    Attributes
    ----------
    call : callable
        Name and arguments of a call of its driver.
    keeps_prefixes : bool
    """

    call: Callable[..., Any]
    keeps_prefixes: bool

    def generate(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """Generate greedily; refuses an answer that is not of the length asked for."""
        made: dict[str, Any] = self.call("generate", prompts=prompts, tokens=tokens)
        for ids, times in zip(made["token_ids"], made["times"], strict=True):
            if len(ids) != tokens or len(times) != tokens:
                raise ValueError(
                    f"{len(ids)} tokens at {len(times)} times, {tokens} were asked for"
                )
        return made


Measure = Callable[[Engine, Lengths, random.Random], Samples]
Read = Callable[[], Rate | None]
"""Measures how fast memory is read; None where nothing can."""


def first_tokens(engine: Engine, count: int) -> list[int]:
    """Return how the model goes on from a plain sentence: the same on all engines, nearly."""
    ids: list[int] = engine.generate([list(_PROBE)], count)["token_ids"][0]
    return ids


def measures(lengths: Lengths) -> Iterator[tuple[str, Measure]]:
    """Yield what is measured in a turn, the cheapest first: a slow engine gets that far."""
    yield "one stream", _one_stream
    for streams in lengths.streams:
        yield f"{streams} streams", _streams(streams)
    yield "prefill", _prefill
    yield "context", _context


def own_measures(read: Read) -> Iterator[tuple[str, Measure]]:
    """Yield what only our own driver knows; the second fills the pool, so it comes last."""
    yield "outside the model", _outside_model
    yield "attention", _attention(read)


def measure_names(lengths: Lengths) -> dict[str, str]:
    """Return all measures by the names that a command line takes: ``32 streams`` is ``streams32``.

    The start, and the memory held, come with every turn.
    """
    streams = {f"streams{n}": f"{n} streams" for n in lengths.streams}
    own = {"outside": "outside the model", "attention": "attention"}
    return {"stream": "one stream", **streams, "prefill": "prefill", "context": "context", **own}


def warm_up(engine: Engine, lengths: Lengths, draw: random.Random) -> None:
    """Make an engine meet a batch and a prompt of some length before the clock runs."""
    engine.generate(_prompts(draw, 2, lengths.prompt), 4)
    engine.generate(_prompts(draw, 1, lengths.prefill // 8), 1)


def _one_stream(engine: Engine, lengths: Lengths, draw: random.Random) -> Samples:
    made = engine.generate(_prompts(draw, 1, lengths.prompt), lengths.output)
    return {"decode_short": _rate_after_first(made["times"][0])}


def _streams(streams: int) -> Measure:
    def measure(engine: Engine, lengths: Lengths, draw: random.Random) -> Samples:
        times = engine.generate(_prompts(draw, streams, lengths.prompt), lengths.output)["times"]
        read_s = max(row[0] for row in times)
        end_s = max(row[-1] for row in times)
        later = sum(at > read_s for row in times for at in row)
        return {
            f"streams_{streams}": streams * lengths.output / end_s,
            f"streams_{streams}_prefill": streams * lengths.prompt / read_s,
            f"streams_{streams}_decode": later / (end_s - read_s),
        }

    return measure


def _prefill(engine: Engine, lengths: Lengths, draw: random.Random) -> Samples:
    made = engine.generate(_prompts(draw, 1, lengths.prefill), 1)
    return {"prefill": lengths.prefill / made["times"][0][0]}


def _context(engine: Engine, lengths: Lengths, draw: random.Random) -> Samples:
    """Time to the first token without and with the prefix in the cache, then decoding there."""
    (prefix,) = _prompts(draw, 1, lengths.context)
    cold_tail, warm_tail = _prompts(draw, 2, lengths.tail)
    tokens = 1 + lengths.context_output
    if not engine.keeps_prefixes:
        (times,) = engine.generate([prefix + cold_tail], tokens)["times"]
        return {"ttft_cold_s": times[0], "decode_long": _rate_after_first(times)}
    cold = engine.generate([prefix + cold_tail], 1)
    warm = engine.generate([prefix + warm_tail], tokens)
    found = {
        "ttft_cold_s": cold["times"][0][0],
        "ttft_warm_s": warm["times"][0][0],
        "decode_long": _rate_after_first(warm["times"][0]),
    }
    if warm["cached"] is not None:
        found["cached_tokens"] = float(warm["cached"])
    return found


def _outside_model(engine: Engine, lengths: Lengths, draw: random.Random) -> Samples:
    prompts = _prompts(draw, lengths.streams[-1], lengths.prompt)
    share = engine.call("outside_model", prompts=prompts, tokens=16)
    return {"outside_model": share}


def _attention(read: Read) -> Measure:
    """Bytes of K and V that decoding attention reads a second, by sequences side by side.

    The clock of a machine may differ by a third from one minute to the next, so what a kernel is
    held against is measured right before it and right after it, and the faster one counts. Medians
    of passes stand against medians, and the fastest pass against the fastest.
    """

    def measure(engine: Engine, lengths: Lengths, draw: random.Random) -> Samples:
        reads = [read()]
        rates = {
            f"attention_{batch}": rate_of(
                engine.call("attention", batch=batch, context=lengths.context, seconds=1.0)
            )
            for batch in (1, 8)
        }
        reads.append(read())
        found: Samples = {name: rate.median for name, rate in rates.items()}
        known = [rate for rate in reads if rate is not None]
        if known:
            best = Rate(*map(max, zip(*known, strict=True)))
            for name, rate in rates.items():
                found[f"{name}_of_read"] = rate.median / best.median
                found[f"{name}_of_fastest"] = rate.fastest / best.fastest
            found["read"] = best.median
        return found

    return measure


def _rate_after_first(times: list[float]) -> float:
    return (len(times) - 1) / (times[-1] - times[0])


def _prompts(draw: random.Random, count: int, length: int) -> list[list[int]]:
    """Random ids: what the words are changes no engine's speed, and no two share a prefix."""
    return [[draw.randrange(10, 40_000) for _ in range(length)] for _ in range(count)]
