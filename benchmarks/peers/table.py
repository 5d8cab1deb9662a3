"""The results as Markdown. Owns names, units and order of what is shown; computes nothing else."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict

from benchmarks.peers.bars import judge
from benchmarks.peers.measures import QUICK, Lengths
from benchmarks.peers.results import Record, Results

_NOTHING, _SEE_BELOW = "–", "†"


def to_markdown(results: Results) -> str:
    """Return table, bars, settings and reasons."""
    return "\n".join(_lines(results)) + "\n"


def _lines(results: Results) -> Iterator[str]:
    # Ours beside each other.
    labels = sorted(results.records, key=lambda label: not label.startswith("Kvist"))
    measured = {label: r for label in labels if (r := results.records[label]).samples}
    quick = results.lengths == QUICK
    yield "# Peers" + (" (quick: shortened, to see that it runs; not for comparison)" * quick)
    yield ""
    yield from _machine(results)
    yield ""
    yield "Medians, least and most in brackets. tok/s: generated tokens a second."
    yield ""
    yield "| | " + " | ".join(measured) + " |"
    yield "| --- |" + " ---: |" * len(measured)
    for key, measure, name, scale, digits in _rows(results.lengths):
        cells = [_cell(r, key, measure, scale, digits) for r in measured.values()]
        if set(cells) != {_NOTHING}:
            yield f"| {name} | " + " | ".join(cells) + " |"
    kv = [
        "–" if r.kv_token_bytes is None else f"{r.kv_token_bytes:,.0f}" for r in measured.values()
    ]
    yield "| KV, bytes a token | " + " | ".join(kv) + " |"
    yield "| same first tokens as transformers | " + " | ".join(_agreements(measured)) + " |"
    yield "| turns | " + " | ".join(str(r.turns) for r in measured.values()) + " |"
    yield ""
    yield from _bars(results)
    yield "## What was set"
    yield ""
    for label, record in measured.items():
        versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
        settings = ", ".join(f"{name}: {value}" for name, value in record.settings.items())
        yield f"- **{label}** ({versions}): {settings}"
    yield ""
    reasons = list(_reasons(results))
    if reasons:
        yield f"## What has no number ({_SEE_BELOW}), and why"
        yield ""
        yield from reasons
        yield ""


def _reasons(results: Results) -> Iterator[str]:
    for label, record in results.records.items():
        measures: dict[str, list[str]] = {}
        for measure, reason in record.reasons.items():
            measures.setdefault(reason, []).append(measure)
        for reason, names in measures.items():
            yield f"- **{label}**, {', '.join(names)}: {reason}"


def _machine(results: Results) -> Iterator[str]:
    for run in results.runs:
        loops = run["bandwidth"]
        best = max(loops, key=loops.get, default=None)
        read = f"{loops[best] / 1e9:.1f} GB/s ({best})" if best else "not measured"
        yield (
            f"- {run['cpu']}, cores {run['cores']}, a thread each; Python {run['python']}, Linux "
            f"{run['kernel']}; streaming read {read}; `{run['command']}`"
        )
    lengths = asdict(results.lengths)
    yield f"- lengths: {', '.join(f'{name} {value}' for name, value in lengths.items())}"


def _rows(lengths: Lengths) -> Iterator[tuple[str, str, str, float, int]]:
    """Yield number, the measure it comes from, its name, factor and digits."""
    short = f"{lengths.prompt}+{lengths.output}"
    yield "decode_short", "one stream", f"one stream of {short}: decode, tok/s", 1, 1
    yield (
        "decode_long",
        "context",
        f"one stream at {lengths.context:,} of context: decode, tok/s",
        1,
        1,
    )
    for n in lengths.streams:
        name = f"{n} streams"
        yield f"streams_{n}", name, f"{n} streams of {short}: tok/s, prefill included", 1, 0
        yield f"streams_{n}_prefill", name, f"{n} streams: prefill, prompt tok/s", 1, 0
        yield f"streams_{n}_decode", name, f"{n} streams: decode, tok/s", 1, 0
    yield "prefill", "prefill", f"prefill of {lengths.prefill:,}: prompt tok/s", 1, 0
    prefix = f"first token, {lengths.context:,}-token prefix"
    yield "ttft_cold_s", "context", f"{prefix} cold, s", 1, 2
    yield "ttft_warm_s", "context", f"{prefix} in the cache, s", 1, 3
    yield "cached_tokens", "context", "… prompt tokens not computed", 1, 0
    yield "start_s", "start", "start to first token, s", 1, 1
    yield "start_cold_s", "start", "… with an empty compile cache, s", 1, 1
    yield "memory_peak_rss", "memory", "peak RSS, summed over its processes, MB", 1e-6, 0
    yield "memory_pss", "memory", "PSS after the measures, MB", 1e-6, 0
    yield "memory_processes", "memory", "processes", 1, 0
    for batch in (1, 8):
        what = f"decode attention, {batch} × {lengths.context:,}: GB/s of K and V"
        yield f"attention_{batch}", "attention", what, 1e-9, 1
        what = f"… {batch} × {lengths.context:,}, of the streaming read beside it, %"
        yield f"attention_{batch}_of_read", "attention", what, 100, 0
        what = f"… {batch} × {lengths.context:,}, its fastest pass of the fastest read, %"
        yield f"attention_{batch}_of_fastest", "attention", what, 100, 0
    yield "read", "attention", "streaming read in the same turns, GB/s", 1e-9, 1
    what = f"{lengths.streams[-1]} streams: share of a step outside the model, %"
    yield "outside_model", "outside the model", what, 100, 1


def _cell(record: Record, key: str, measure: str, scale: float, digits: int) -> str:
    values = [value * scale for value in record.samples.get(key, ())]
    if not values:
        return _SEE_BELOW if measure in record.reasons else _NOTHING
    middle = f"{statistics.median(values):,.{digits}f}"
    if len(values) == 1 or min(values) == max(values):
        return middle
    return f"{middle} ({min(values):,.{digits}f}–{max(values):,.{digits}f})"


def _agreements(measured: dict[str, Record]) -> Iterator[str]:
    wanted = next((r.first_tokens for name, r in measured.items() if "transformers" in name), [])
    for record in measured.values():
        if not wanted or not record.first_tokens:
            yield "–"
            continue
        same = 0
        while same < len(wanted) and record.first_tokens[same : same + 1] == [wanted[same]]:
            same += 1
        yield f"{same} of {len(wanted)}"


def _bars(results: Results) -> Iterator[str]:
    verdicts = judge(results)
    if not verdicts:
        return
    yield "## Bars"
    yield ""
    yield "| what | measured | bar | |"
    yield "| --- | ---: | ---: | --- |"
    for verdict in verdicts:
        word = "holds" if verdict.holds else "MISSED"
        yield f"| {verdict.what} | {verdict.measured} | {verdict.bar} | {word} |"
    yield ""
