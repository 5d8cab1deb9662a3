"""`kvist bench`: measure a claim with one command. Parse, open, call; more of them in `measure`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvist.commands.measure import Model, loaded, numbers, register
from kvist.commands.outputs import Report, bench_command
from kvist.commands.terminal import DEFAULT_MODEL, err

bench_app = typer.Typer(help="Measure a claim with one command.", no_args_is_help=True)
register(bench_app)


@bench_command(bench_app, "paging")
def paging(
    model: Model = DEFAULT_MODEL,
    seconds: Annotated[float, typer.Option(help="Steady window of each mode, for tokens/s.")] = 30,
    requests: Annotated[int, typer.Option(help="Requests of the workload.", min=16)] = 256,
    no_model: Annotated[bool, typer.Option("--no-model", help="Books only: no tokens/s.")] = False,
    *,
    report: Report,
) -> None:
    """Paged blocks against reserving the maximum: utilization, concurrency, tokens/s.

    Total lengths uniform in 128–2048, half prompt; max_model_len 4096; a pool of 16,384 slots.
    """
    from kvist.lab.bench.paging import PagingBench
    from kvist.lab.paging import PagingWorkload

    work = PagingWorkload(num_requests=requests)
    if no_model:
        report(PagingBench(None, work, seconds))
        return
    with loaded(model, work.slots) as host:
        report(PagingBench(host, work, seconds))


@bench_command(bench_app, "policies")
def policies(
    traces: Annotated[list[Path], typer.Argument(help="Files in Mooncake's format (JSON lines).")],
    policy: Annotated[
        list[str] | None, typer.Option(help="Eviction policy, repeatable. Default: all.")
    ] = None,
    *,
    report: Report,
) -> None:
    """Eviction policies on traces of real requests: hits, and hits over LRU's.

    Cache sizes are 1, 2, 5 and 10 % of a trace's distinct blocks. No model, no bytes.
    """
    from kvist.lab.bench.policies import PoliciesBench
    from kvist.lab.traces import read_mooncake
    from kvist.policies.registry import POLICIES, policy_factory

    names = policy or list(POLICIES)
    for name in names:
        policy_factory(name)
    chains = {path.stem: [r.blocks for r in read_mooncake(path)] for path in traces}
    report(PoliciesBench(chains, names))


@bench_command(bench_app, "tiers")
def tiers(
    model: Model = DEFAULT_MODEL,
    tokens: Annotated[int, typer.Option(help="Length of the prompt.", min=64)] = 1536,
    rates: Annotated[str, typer.Option(help="MB/s of the disk.")] = "10,20,35,60,100,200",
    repeats: Annotated[int, typer.Option(help="Of each measurement.", min=1)] = 3,
    *,
    report: Report,
) -> None:
    """Load or recompute: the engine's decision against both extremes, under a throttled disk."""
    speeds = numbers(rates, "--rates")
    with err.status(f"loading {model}"):
        from kvist.lab.tiers import TierBench, TiersWorkload

        work = TiersWorkload(num_tokens=tokens, rates_mb_s=speeds, repeats=repeats)
        bench = TierBench(model, work)
    try:
        report(bench)
    finally:
        bench.close()
