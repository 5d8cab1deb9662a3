"""`kvist bench`: measure a claim with one command. Parse, call, print."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress

from kvist.commands.measure import register
from kvist.commands.terminal import DEFAULT_MODEL, MODEL_HELP, err, out, plain_errors
from kvist.errors import ConfigError

if TYPE_CHECKING:
    from kvist.engine.llm import LLM

bench_app = typer.Typer(help="Measure a claim with one command.", no_args_is_help=True)
register(bench_app)


@bench_app.command("paging")
def paging(
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = DEFAULT_MODEL,
    seconds: Annotated[float, typer.Option(help="Steady window of each mode, for tokens/s.")] = 60,
    requests: Annotated[int, typer.Option(help="Requests of the workload.", min=16)] = 256,
    no_model: Annotated[bool, typer.Option("--no-model", help="Books only: no tokens/s.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Paged blocks against reserving the maximum: utilization, concurrency, tokens/s.

    Total lengths uniform in 128–2048, half prompt; max_model_len 4096; a pool of 16,384 slots.
    """
    from kvist.lab.paging import MODES, PagingWorkload, compare, run_mode
    from kvist.lab.report import environment, print_table

    workload = PagingWorkload(num_requests=requests)
    with plain_errors(), Progress(console=err, transient=True) as bar:
        task = bar.add_task("books", total=len(MODES) * (1 if no_model else 2))
        done = 0

        def mode_progress(share: float) -> None:
            bar.update(task, completed=done + min(1.0, share))

        exact, measured = {}, None
        for mode in MODES:
            exact[mode] = run_mode(mode, workload, progress=mode_progress)
            done += 1
        if not no_model:
            bar.update(task, description="loading the model")
            llm = _open_for(model, workload.num_blocks, workload.block_size)
            measured = {}
            for mode in MODES:
                bar.update(task, description=f"measuring {mode}")
                measured[mode] = run_mode(
                    mode, workload, llm.runner, seconds=seconds, progress=mode_progress
                )
                done += 1
        table = compare(exact, measured)
    if as_json:
        out.print_json(json.dumps({**table, "environment": environment()}))
        return
    columns = ("", "utilization", "concurrency", "tokens/s", "preemptions")
    names = ("utilization", "concurrency", "tokens_per_s", "preemptions")
    rows = [
        [mode, *(str(row.get(n, "") if row.get(n) is not None else "–") for n in names)]
        for mode, row in table.items()
    ]
    print_table("paging", columns, rows, out)


@bench_app.command("policies")
def policies(
    traces: Annotated[list[Path], typer.Argument(help="Files in Mooncake's format (JSON lines).")],
    policy: Annotated[
        list[str] | None, typer.Option(help="Eviction policy, repeatable. Default: all.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Eviction policies on traces of real requests: hits, and hits over LRU's.

    Cache sizes are 1, 2, 5 and 10 % of a trace's distinct blocks. No model, no bytes.
    """
    from kvist.lab.policies import compare_policies, flood_losses, summarize
    from kvist.lab.report import environment, print_table
    from kvist.lab.traces import read_mooncake
    from kvist.policies.registry import POLICIES, policy_factory

    with plain_errors(), Progress(console=err, transient=True) as bar:
        task = bar.add_task("replaying", total=1.0)
        names = policy or list(POLICIES)
        for name in names:
            policy_factory(name)
        chains = {path.stem: [r.blocks for r in read_mooncake(path)] for path in traces}
        scores = compare_policies(
            chains, names, progress=lambda done: bar.update(task, completed=done)
        )
        summaries = summarize(scores)
        losses = flood_losses(names)
    if as_json:
        report = {
            "scores": [asdict(score) for score in scores],
            "summary": [{**asdict(s), "is_safe": s.is_safe} for s in summaries],
            "flood": {n: {"lost": a, "lost_protected": b} for n, (a, b) in losses.items()},
            "environment": environment(),
        }
        out.print_json(json.dumps(report))
        return
    for trace in chains:
        columns = dict.fromkeys((s.share, s.capacity) for s in scores if s.trace == trace)
        rows = {score.policy: [score.policy] for score in scores}
        for score in scores:
            if score.trace == trace:
                rows[score.policy].append(f"{score.hit_ratio:.4f} ({score.vs_lru:.2f})")
        head = ["", *(f"{share:.0%}: {capacity:,}" for share, capacity in columns)]
        print_table(f"{trace}: hit blocks (over LRU's)", head, list(rows.values()), out)
    rows = {
        s.policy: [s.policy, f"{s.mean_vs_lru:.3f}", f"{s.worst_vs_lru:.3f}"] for s in summaries
    }
    for name, (lost, protected) in losses.items():
        rows[name] += [f"{lost:.1%}", f"{protected:.1%}"]
    columns_of_summary = ("", "mean over LRU", "worst", "lost in a flood", "protected")
    print_table(
        "over all traces and sizes",
        columns_of_summary,
        [r for r in rows.values() if len(r) == len(columns_of_summary)],
        out,
    )


@bench_app.command("tiers")
def tiers(
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = DEFAULT_MODEL,
    tokens: Annotated[int, typer.Option(help="Length of the prompt.", min=64)] = 1536,
    rates: Annotated[str, typer.Option(help="MB/s of the disk.")] = "10,20,35,60,100,200",
    repeats: Annotated[int, typer.Option(help="Of each measurement.", min=1)] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Load or recompute: the engine's decision against both extremes, under a throttled disk."""
    from kvist.lab.report import environment, print_table
    from kvist.lab.tiers import TierBench, TiersWorkload, describe

    with plain_errors(), Progress(console=err, transient=True) as bar:
        try:
            speeds = tuple(float(rate) for rate in rates.split(","))
        except ValueError as error:
            raise ConfigError(f"--rates={rates} are no numbers; write 10,50,200") from error
        task = bar.add_task("loading the model", total=1)
        work = TiersWorkload(num_tokens=tokens, rates_mb_s=speeds, repeats=repeats)
        bench = TierBench(model, work)
        bar.update(task, description="measuring")
        rows = bench.run(lambda share: bar.update(task, completed=share))
        what = describe(bench)
        bench.close()
    if as_json:
        out.print_json(json.dumps({"rows": rows, "environment": environment()}))
        return
    columns = ("MB/s", "load s", "recompute s", "decided s", "to better", "tokens loaded")
    names = ("rate_mb_s", "load_s", "recompute_s", "decided_s", "decided_to_better_extreme")
    cells = [[*(str(row[n]) for n in names), str(row["loaded_tokens"])] for row in rows]
    print_table(f"tiers: {what}", columns, cells, out)


def _open_for(model: str, num_blocks: int, block_size: int) -> LLM:
    """Open a model with a pool of exactly `num_blocks` blocks."""
    from kvist.engine.llm import LLM
    from kvist.engine.weights.source import resolve
    from kvist.spec import KVSpec

    token_bytes = KVSpec.from_config(resolve(model).config).token_bytes()
    memory = token_bytes * num_blocks * block_size
    return LLM(model, kv_cache_memory_bytes=memory, block_size=block_size, dtype="auto")
