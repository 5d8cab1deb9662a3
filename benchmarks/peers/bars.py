"""What Kvist is held to: ratios between numbers of one set of results, or of one turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.peers.results import Results

_OURS = "Kvist"
_PLAIN = "Kvist bf16"
_FALLBACK = "kernels"
"""In the labels of ours that show what other kernels would do."""
_VLLM = "vLLM bf16"


@dataclass(frozen=True)
class Verdict:
    """One bar and what was measured against it, both as text."""

    what: str
    measured: str
    bar: str
    holds: bool


def judge(results: Results) -> list[Verdict]:
    """Hold the results to every bar that they have numbers for."""
    return list(_judge(results))


def _judge(results: Results) -> Iterator[Verdict]:
    numbers = _Numbers(results)
    plain, vllm = numbers.of(_PLAIN), numbers.of(_VLLM)
    last = results.lengths.streams[-1]
    all_streams = f"streams_{last}"

    def at_least(what: str, ours: _Named, theirs: _Named, bar: float) -> Iterator[Verdict]:
        if ours is not None and theirs is not None:
            ratio = ours[1] / theirs[1]
            text = f"{ratio:.2f} × {theirs[0]}"
            yield Verdict(f"{what}, {ours[0]}", text, f"≥ {bar:.2f}", ratio >= bar)

    for batch in (1, 8):
        # A median of ratios, each of two numbers of one turn: clocks differ between turns.
        ours = plain(f"attention_{batch}_of_read")
        if ours is not None:
            share = ours[1]
            what = f"decode attention at {results.lengths.context:,}, batch {batch}, of the read"
            yield Verdict(what, f"{share:.0%}", "≥ 65%", share >= 0.65)
    best, peers = numbers.best_of_ours, numbers.best_peer
    yield from at_least("one stream, short", plain("decode_short"), vllm("decode_short"), 1.5)
    yield from at_least("one stream, short", best("decode_short"), peers("decode_short"), 1.0)
    yield from at_least("one stream, long", plain("decode_long"), vllm("decode_long"), 1.8)
    yield from at_least("one stream, long", best("decode_long"), peers("decode_long"), 2.0)
    yield from at_least(f"{last} streams", plain(all_streams), vllm(all_streams), 1.6)
    yield from at_least(f"{last} streams", best(all_streams), vllm(all_streams), 2.0)
    yield from at_least("prefill", best("prefill"), peers("prefill"), 1.2)
    start = plain("start_s")
    if start is not None:
        yield Verdict("start to first token, s", f"{start[1]:.1f}", "≤ 8", start[1] <= 8)
        for key, part, words in (("start_cold_s", 0.1, "cold"), ("start_s", 1.0, "warm")):
            theirs = vllm(key)
            if theirs is not None:
                share = start[1] / theirs[1]
                what = f"start to first token, against vLLM's {words} start"
                yield Verdict(what, f"{share:.2f} ×", f"≤ {part:.1f}", share <= part)
    outside = plain("outside_model")
    if outside is not None:
        what = f"share of a step outside the model, {last} streams"
        yield Verdict(what, f"{outside[1]:.1%}", "≤ 10%", outside[1] <= 0.1)


_Named = tuple[str, float] | None
"""A number and whose it is."""


class _Numbers:
    def __init__(self, results: Results) -> None:
        self._medians = results.records

    def of(self, label: str) -> Callable[[str], _Named]:
        def look(key: str) -> _Named:
            record = self._medians.get(label)
            value = record.median(key) if record is not None else None
            return None if value is None else (label, value)

        return look

    def best_of_ours(self, key: str) -> _Named:
        ours = [name for name in self._medians if name.startswith(_OURS)]
        labels = [name for name in ours if _FALLBACK not in name]
        return self._best(labels, key)

    def best_peer(self, key: str) -> _Named:
        return self._best([name for name in self._medians if not name.startswith(_OURS)], key)

    def _best(self, labels: list[str], key: str) -> _Named:
        found = [number for label in labels if (number := self.of(label)(key)) is not None]
        return max(found, key=lambda number: number[1], default=None)
