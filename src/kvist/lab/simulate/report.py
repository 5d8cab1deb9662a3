"""A simulation in numbers for programs, and in tables for people.

Owns the schema `kvist.simulate.v1`, which `docs/simulate.md` describes, and nothing that computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from rich.console import Console

from kvist.lab.report import print_table
from kvist.lab.simulate.books import Machine
from kvist.lab.simulate.contiguous import ContiguousResult
from kvist.lab.simulate.curve import CurvePoint, PolicyPoint
from kvist.lab.simulate.locked import LockedResult
from kvist.lab.simulate.timing import StepTiming
from kvist.lab.simulate.virtual import SimResult
from kvist.lab.simulate.workload import Workload
from kvist.sizes import format_size

SCHEMA = "kvist.simulate.v1"
_QUANTILES = (0.5, 0.9, 0.95, 0.99)


def trace_dict(workload: Workload) -> dict[str, Any]:
    """What was replayed."""
    return {
        "kind": workload.kind,
        "requests": len(workload.requests),
        "prompt_tokens": workload.num_prompt_tokens,
        "output_tokens": sum(request.num_output for request in workload.requests),
        "duration_s": workload.duration_s,
        "block_size": workload.block_size,
        "shares": workload.shares,
        "notes": workload.notes,
    }


def run_dict(
    name: str, workload: Workload, machine: Machine, timing: StepTiming, result: SimResult
) -> dict[str, Any]:
    """One replay: on what, how timed, what came of it."""
    tokens = dict(result.tokens_from)
    lives = result.lives.values()
    ttft = [life.first_s - life.arrival_s for life in lives if life.first_s is not None]
    tpot = [
        (life.end_s - life.first_s) / (life.num_output - 1)
        for life in lives
        if life.end_s is not None and life.first_s is not None and life.num_output > 1
    ]
    moved: dict[str, dict[str, int]] = {}
    for (tier, direction), nbytes in result.moved_bytes.items():
        moved.setdefault(tier, {"up": 0, "down": 0})[direction] = nbytes
    return {
        "name": name,
        "is_complete": result.is_complete,
        "machine": {
            "model": machine.model,
            "kv_format": machine.kv_format,
            "pool_bytes": machine.pool_bytes,
            "num_blocks": machine.cache.num_blocks,
            "block_bytes": machine.block_bytes,
            **asdict(machine.cache),
            **asdict(machine.scheduler),
            "tiers": list(machine.tiers),
            "tier_write_policy": machine.tier_write_policy,
            "tier_load_policy": machine.tier_load_policy,
        },
        "timing": asdict(timing),
        "requests_served": sum(life.end_s is not None for life in lives),
        "requests_left_out": result.num_left_out,
        "prompt_tokens": result.prompt_tokens,
        "tokens": {**tokens, "computed": result.prompt_tokens - sum(tokens.values())},
        "hit_rate": result.hit_rate if workload.shares else None,
        "ttft_s": _quantiles(ttft),
        "tpot_s": _quantiles(tpot),
        "evicted_blocks": result.num_evicted,
        "preemptions": result.num_preempted,
        "failed_load_blocks": result.num_late_blocks,
        "moved_bytes": moved,
        "steps": result.num_steps,
        "span_s": result.span_s,
        "busy_share": result.busy_s / result.span_s if result.span_s else 0.0,
        "pool_used_share": result.used_share,
        "running": result.running,
    }


def locked_dict(result: LockedResult) -> dict[str, Any]:
    """A step-locked replay."""
    return {
        "is_complete": result.is_complete,
        "steps": result.num_steps,
        "different_steps": result.num_different,
        "hit_tokens": result.num_hit_tokens,
        "prompt_tokens": result.num_prompt_tokens,
        "preemptions": result.num_preemptions,
    }


def extras_dict(
    curve: Sequence[CurvePoint],
    policies: Sequence[PolicyPoint],
    contiguous: Sequence[ContiguousResult],
) -> dict[str, Any]:
    """What was asked for besides."""
    return {
        "curve": [asdict(point) for point in curve],
        "policies": [asdict(point) for point in policies],
        "contiguous": [asdict(each) for each in contiguous],
    }


def _quantiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    found = {
        f"p{round(q * 100)}": ordered[min(len(ordered) - 1, int(q * len(ordered)))]
        for q in _QUANTILES
    }
    return {"mean": fmean(ordered), **found}


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print a report."""
    trace, runs = report["trace"], report["runs"]
    console.print(
        f"{trace['kind']}: {trace['requests']:,} requests in {trace['duration_s']:,.0f} s,"
        f" {trace['prompt_tokens']:,} prompt tokens; blocks of {trace['block_size']} tokens",
        highlight=False,
        soft_wrap=True,
    )
    for note in trace["notes"]:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    if report.get("step_locked"):
        locked = report["step_locked"]
        said = (
            "every step as it was recorded"
            if not locked["different_steps"]
            else f"{locked['different_steps']:,} steps differ from the recorded ones"
        )
        console.print(
            f"step-locked: {locked['hit_tokens']:,} of {locked['prompt_tokens']:,} prompt tokens"
            f" hit in {locked['steps']:,} steps; {said}",
            highlight=False,
            soft_wrap=True,
        )
    if runs:
        rows = [[name, *(cell(run) for run in runs)] for name, cell in _ROWS]
        kept = [row for row in rows if any(text != "–" for text in row[1:])]
        print_table("simulated", ("", *(run["name"] for run in runs)), kept, console)
        if not all(run["is_complete"] for run in runs):
            console.print("stopped before the end: numbers are of what was replayed")
    _show_curve(report, console)
    if report["policies"]:
        rows = [[point["policy"], f"{point['hit_rate']:.2%}"] for point in report["policies"]]
        print_table("orders of eviction, full blocks of prompts", ("", "hit"), rows, console)
    if report["contiguous"]:
        columns = ("", "memory used", "free but unusable", "blocked by holes", "holes")
        rows = [
            [
                f"contiguous, {each['fit']} fit",
                f"{each['used_share']:.1%}",
                f"{each['unusable_share']:.1%}",
                f"{each['blocked_share']:.1%}",
                f"{each['num_holes']:.1f}",
            ]
            for each in report["contiguous"]
        ]
        print_table("one piece of memory a request, nothing shared", columns, rows, console)


def _show_curve(report: Mapping[str, Any], console: Console) -> None:
    if not report["curve"]:
        return
    rows = [
        [
            format_size(point["pool_bytes"]),
            f"{point['num_blocks']:,}",
            f"{point['hit_rate']:.2%}",
            "" if point["gain_per_gib"] is None else f"{100 * point['gain_per_gib']:+.3f}",
        ]
        for point in report["curve"]
    ]
    columns = ("pool", "blocks", "hit", "points a GiB more")
    print_table("what more room would bring, full blocks of prompts", columns, rows, console)


def _share(run: Mapping[str, Any], source: str) -> str:
    tokens = run["tokens"].get(source, 0)
    if run["hit_rate"] is None or not run["prompt_tokens"] or (source != "device" and not tokens):
        return "–"
    return f"{tokens / run['prompt_tokens']:.2%}"


def _times(run: Mapping[str, Any], name: str, unit: float, digits: int) -> str:
    found = run[name]
    if found is None:
        return "–"
    return " / ".join(f"{found[q] * unit:,.{digits}f}" for q in ("p50", "p90", "p99"))


def _moved(run: Mapping[str, Any], direction: str) -> str:
    texts = [f"{tier} {format_size(m[direction])}" for tier, m in run["moved_bytes"].items()]
    return ", ".join(texts) or "–"


_ROWS: Sequence[tuple[str, Callable[[Mapping[str, Any]], str]]] = (
    ("pool", lambda run: format_size(run["machine"]["pool_bytes"])),
    ("hit, device", lambda run: _share(run, "device")),
    ("hit, host", lambda run: _share(run, "host")),
    ("hit, disk", lambda run: _share(run, "disk")),
    ("computed prompt tokens", lambda run: f"{run['tokens']['computed']:,}"),
    ("TTFT p50 / p90 / p99, s", lambda run: _times(run, "ttft_s", 1, 3)),
    ("TPOT p50 / p90 / p99, ms", lambda run: _times(run, "tpot_s", 1000, 1)),
    ("evicted blocks", lambda run: f"{run['evicted_blocks']:,}"),
    ("preemptions", lambda run: f"{run['preemptions']:,}"),
    ("loaded", lambda run: _moved(run, "up")),
    ("stored", lambda run: _moved(run, "down")),
    ("pool in use", lambda run: f"{run['pool_used_share']:.1%}"),
    ("running", lambda run: f"{run['running']:.1f}"),
    ("time in steps", lambda run: f"{run['busy_share']:.1%}"),
    (
        "left out: too long",
        lambda run: f"{run['requests_left_out']:,}" if run["requests_left_out"] else "–",
    ),
)
