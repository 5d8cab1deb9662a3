"""`kvist bench`: measure a claim with one command. Parse, call, print."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress

from kvist.commands.terminal import DEFAULT_MODEL, MODEL_HELP, err, out, plain_errors

if TYPE_CHECKING:
    from kvist.engine.llm import LLM

bench_app = typer.Typer(help="Measure a claim with one command.", no_args_is_help=True)


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


def _open_for(model: str, num_blocks: int, block_size: int) -> LLM:
    """Open a model with a pool of exactly `num_blocks` blocks."""
    from kvist.engine.llm import LLM
    from kvist.engine.weights.source import resolve
    from kvist.spec import KVSpec

    token_bytes = KVSpec.from_config(resolve(model).config).token_bytes()
    memory = token_bytes * num_blocks * block_size
    return LLM(model, kv_cache_memory_bytes=memory, block_size=block_size, dtype="auto")
