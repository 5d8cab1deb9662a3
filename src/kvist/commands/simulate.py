"""`kvist simulate`: parse, call, print. What happens in it is `kvist.lab.simulate`'s."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress

from kvist.commands.terminal import bad_input, err, out
from kvist.errors import ConfigError
from kvist.flags import with_simulated_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvist.lab.simulate.books import Machine
    from kvist.lab.simulate.contiguous import ContiguousResult
    from kvist.lab.simulate.options import Asked
    from kvist.lab.simulate.recording import Recording
    from kvist.lab.simulate.timing import StepTiming
    from kvist.lab.simulate.virtual import SimResult
    from kvist.lab.simulate.workload import Workload


@with_simulated_options
def simulate(
    trace: Annotated[
        Path,
        typer.Argument(
            help="A recording (--record), or a trace: Mooncake, Azure, RAGPulse, Claude Code."
        ),
    ],
    config: Annotated[
        Path | None, typer.Option(help="TOML file with options, as for serve; flags win over it.")
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Two such files, side by side.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="For KV bytes and speed; see kvist plan --list.")
    ] = None,
    timing: Annotated[
        Path | None, typer.Option(help="Fit seconds a step to this recording; or a JSON of them.")
    ] = None,
    prefill_tokens_per_s: Annotated[
        float | None, typer.Option(help="Measured. Default: estimated from the model.")
    ] = None,
    decode_step_ms: Annotated[
        float | None, typer.Option(help="Of a step of one sequence. Default: estimated.")
    ] = None,
    tier_rate: Annotated[
        list[str] | None, typer.Option(help="NAME:BYTES_PER_S of a tier, such as disk:2GB.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help="Only the first so many requests.", min=1)
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Compare orders of eviction; all, beside Belady's.")
    ] = None,
    curve: Annotated[
        bool, typer.Option("--curve", help="Hits over the size of the pool: what a GiB brings.")
    ] = False,
    contiguous: Annotated[
        bool, typer.Option("--contiguous", help="The same with one piece of memory a request.")
    ] = False,
    step_locked: Annotated[
        bool, typer.Option("--step-locked", help="Only the recorded steps: no time is simulated.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Schema kvist.simulate.v1.")] = False,
    *,
    engine_args: dict[str, Any],
) -> None:
    """What a trace would find in this KV memory: hits by tier, latency, what a GiB more brings.

    The engine's own scheduler, cache, policies and tiers, without a model, in virtual time.

    kvist simulate trace.jsonl --model llama-3.1-8b --kv-cache-memory-bytes 40GiB --curve

    kvist simulate trace.jsonl --compare small.toml large.toml

    kvist simulate run.jsonl --tier host:16GiB
    """
    from kvist.lab.report import environment
    from kvist.lab.simulate import report
    from kvist.lab.simulate.books import Machine
    from kvist.lab.simulate.curve import compare_policies, miss_ratio_curve
    from kvist.lab.simulate.locked import replay_locked
    from kvist.lab.simulate.options import Asked, make_machine, make_timing
    from kvist.lab.simulate.virtual import simulate as run

    with bad_input(), Progress(console=err, transient=True) as bar:
        options = {**engine_args, "model": model}
        if compare is not None:
            asked = [Asked.of(options, path) for path in compare]
            names = [path.stem for path in compare]
        else:
            asked, names = [Asked.of(options, config)], ["simulated"]
        workload, recording = _read(trace, asked, requests, bar)
        if step_locked and recording is None:
            raise ConfigError(f"--step-locked: {trace} is a trace; only recordings have steps")
        rates = _rates(tier_rate or [])
        base = Machine.from_header(recording.header) if recording is not None else None
        made = [make_machine(each, workload, base) for each in asked]
        fitted = _fitted(timing, recording, prefill_tokens_per_s, decode_step_ms)
        clocks = [
            fitted or make_timing(machine, its, prefill_tokens_per_s, decode_step_ms)
            for machine, its in made
        ]
        found: dict[str, Any] = {
            "schema": report.SCHEMA,
            "trace": report.trace_dict(workload),
            "step_locked": None,
            "runs": [],
        }
        if recording is not None:
            found["step_locked"] = report.locked_dict(
                replay_locked(recording, _task(bar, "step-locked"))
            )
        first: SimResult | None = None
        for (machine, _), seconds, name in zip(made, clocks, names, strict=True):
            if step_locked:
                break
            result = run(workload, machine, seconds, tier_rates=rates, progress=_task(bar, name))
            first = first or result
            found["runs"].append(report.run_dict(name, workload, machine, seconds, result))
            if not result.is_complete:
                break
        machine = made[0][0]
        room = machine.cache.num_blocks
        chains = workload.chains() if curve or policy else []
        found |= report.extras_dict(
            miss_ratio_curve(
                chains,
                machine.cache.eviction_policy,
                room,
                machine.block_bytes,
                machine.cache.protected_share,
                _task(bar, "curve"),
            )
            if curve
            else [],
            compare_policies(chains, policy, room, _task(bar, "policies")) if policy else [],
            _contiguous(machine, first) if contiguous and first is not None else [],
        )
        found["environment"] = environment()
    if as_json:
        out.print_json(json.dumps(found))
    else:
        report.show(found, out)


def _read(
    trace: Path, asked: list[Asked], requests: int | None, bar: Progress
) -> tuple[Workload, Recording | None]:
    from kvist.lab.simulate.reading import read_workload

    sizes = {each.block_size for each in asked}
    if len(sizes) > 1:
        raise ConfigError("--compare: both need the same block_size, since one trace is read")
    bar.add_task(f"reading {trace.name}", total=None)
    workload, recording = read_workload(trace, sizes.pop())
    if requests is not None:
        del workload.requests[requests:]
    return workload, recording


def _rates(texts: list[str]) -> dict[str, float]:
    from kvist.sizes import parse_size

    rates: dict[str, float] = {}
    for text in texts:
        name, _, rate = text.rpartition(":")
        value = parse_size(rate.removesuffix("/s"), "--tier-rate") if name else 0
        if value <= 0:
            raise ConfigError(f"--tier-rate={text!r} is not NAME:BYTES_PER_S, such as disk:2GB")
        rates[name] = float(value)
    return rates


def _fitted(
    timing: Path | None,
    recording: Recording | None,
    prefill_tokens_per_s: float | None,
    decode_step_ms: float | None,
) -> StepTiming | None:
    """Return the timing of a file, or of the recording itself where nobody said otherwise."""
    from kvist.lab.simulate.timing import StepTiming, read_timing

    if timing is not None:
        if prefill_tokens_per_s is not None or decode_step_ms is not None:
            raise ConfigError("--timing says all of it: leave the other two numbers out")
        return read_timing(timing)
    if recording is None or prefill_tokens_per_s is not None or decode_step_ms is not None:
        return None
    return StepTiming.fit(list(recording.steps.values()))


def _contiguous(machine: Machine, result: SimResult) -> list[ContiguousResult]:
    from kvist.lab.simulate.contiguous import FITS, Tenancy, replay_contiguous

    tenancies = [
        Tenancy(life.arrival_s, life.end_s - life.begun_s, life.num_tokens)
        for life in result.lives.values()
        if life.end_s is not None and life.begun_s is not None
    ]
    capacity = machine.cache.num_blocks * machine.block_size
    most = machine.scheduler.max_num_seqs
    return [replay_contiguous(tenancies, capacity, fit, most) for fit in FITS]


def _task(bar: Progress, name: str) -> Callable[[float], None]:
    """Show one more bar; the ones before it are done."""
    for task_id in bar.task_ids:
        bar.remove_task(task_id)
    task = bar.add_task(name, total=1.0)
    return lambda done: bar.update(task, completed=done)
