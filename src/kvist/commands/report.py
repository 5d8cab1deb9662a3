"""`kvist report`: parse, call, write. What stands on the page is `kvist.lab.pages`'."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvist.commands.terminal import bad_input, out
from kvist.errors import ConfigError


def report(
    to: Annotated[Path, typer.Option("--out", help="The page to write.")],
    plan: Annotated[
        list[str] | None,
        typer.Option(help="Model to plan for, as kvist plan takes it; repeatable."),
    ] = None,
    context: Annotated[int | None, typer.Option(help="Tokens a sequence, for --plan.")] = None,
    concurrency: Annotated[int, typer.Option(help="Sequences at a time, for --plan.")] = 1,
    memory: Annotated[
        str | None, typer.Option(help="Of one GPU, or of the machine, for --plan: 80GiB, auto.")
    ] = None,
    gpus: Annotated[int, typer.Option(help="That share one model, for --plan.")] = 1,
    bench: Annotated[
        list[Path] | None, typer.Option(help="JSON that kvist bench wrote; repeatable.")
    ] = None,
    doctor: Annotated[
        list[str] | None, typer.Option(help="Target, as kvist doctor takes it; repeatable.")
    ] = None,
    title: Annotated[str, typer.Option(help="Of the page.")] = "KV memory",
) -> None:
    """Plan, benchmarks and findings in one HTML page that needs nothing else.

    kvist report --out run.html --plan llama-3.1-8b --memory 80GiB --bench ladder.json

    kvist report --out run.html --doctor http://127.0.0.1:8000
    """
    with bad_input():
        from kvist.lab.doctor.examine import diagnose
        from kvist.lab.models import find_model
        from kvist.lab.pages.bench import add_bench, read_bench
        from kvist.lab.pages.doctor import add_diagnosis
        from kvist.lab.pages.page import Page
        from kvist.lab.pages.plan import add_plan
        from kvist.lab.plan import make_plan
        from kvist.lab.plan_options import read_demand
        from kvist.lab.report import describe_run

        if not (plan or bench or doctor):
            raise ConfigError(
                "nothing to report: give --plan MODEL, --bench FILE or --doctor TARGET"
            )
        page = Page(title, describe_run())
        for target in doctor or ():
            add_diagnosis(page, target, diagnose([target]))
        for name in plan or ():
            model = find_model(name)
            demand = read_demand(
                model, context=context, concurrency=concurrency, memory=memory, num_gpus=gpus
            )
            add_plan(page, make_plan(model, demand))
        for path in bench or ():
            add_bench(page, read_bench(path))
        page.write(to)
    out.print(f"{to}", highlight=False, markup=False, soft_wrap=True)
