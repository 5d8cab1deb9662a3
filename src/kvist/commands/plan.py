"""`kvist plan`: parse, call, print. The numbers are those of `kvist.lab.plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvist.commands.terminal import bad_input, out
from kvist.errors import ConfigError


def plan(
    models: Annotated[
        list[str] | None,
        typer.Argument(help="config.json, model folder, hub id, or a name of --list; several."),
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens a sequence. Default: all that the model knows.")
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Sequences at a time.")] = 1,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="auto (the checkpoint's), bf16, fp16, fp32, fp8, int8, k8v4, int4.")
    ] = "auto",
    weights_dtype: Annotated[
        str, typer.Option(help="auto, bfloat16, float16, float32, fp8, int8, int4.")
    ] = "auto",
    parameters: Annotated[
        str | None, typer.Option(help="How many, such as 8.03e9, where they cannot be counted.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Of one GPU, or of the machine: 80GiB; auto: of this one.")
    ] = None,
    gpus: Annotated[
        int, typer.Option("--gpus", "--tensor-parallel-size", help="That share one model.")
    ] = 1,
    utilization: Annotated[
        float, typer.Option(help="Share of the memory that the engine may take.")
    ] = 0.9,
    block_size: Annotated[int, typer.Option(help="Slots a block.")] = 16,
    bandwidth: Annotated[
        str, typer.Option(help="Of one device's memory, a second: 2TB (an A100 80GB) and so on.")
    ] = "2TB",
    prefill_tokens_per_s: Annotated[
        float | None, typer.Option(help="Measured. Default: 150 TFLOP/s a GPU, 2 FLOP a parameter.")
    ] = None,
    tier: Annotated[
        list[str] | None, typer.Option(help="NAME:BYTES_PER_S to load from, such as nvme:6GB.")
    ] = None,
    list_models: Annotated[bool, typer.Option("--list", help="Show the known models.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with plots to this file too.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Schema kvist.plan.v1.")] = False,
) -> None:
    """How big is the KV cache, what fits, and what helps. Loads nothing, needs no GPU.

    kvist plan llama-3.1-8b --context 131072

    kvist plan llama-3.1-70b --context 131072 --memory 80GiB --gpus 2

    kvist plan qwen3-8b mistral-7b-v0.3 gemma-3-12b --context 32768 --concurrency 32
    """
    from kvist.lab.known_models import KNOWN_MODELS
    from kvist.lab.models import find_model
    from kvist.lab.plan import SCHEMA, make_plan
    from kvist.lab.plan_options import read_demand, read_number
    from kvist.lab.plan_view import show_comparison, show_plan

    if list_models:
        for known in KNOWN_MODELS.values():
            out.print(f"{known.name:<20} {known.num_parameters / 1e9:>8.2f} B", highlight=False)
        return
    with bad_input():
        if not models:
            raise ConfigError("name a model: kvist plan llama-3.1-8b (kvist plan --list)")
        count = None if parameters is None else read_number(parameters, "--parameters")
        plans = []
        for name in models:
            model = find_model(name, weights_dtype, count)
            demand = read_demand(
                model,
                context=context,
                concurrency=concurrency,
                kv_cache_dtype=kv_cache_dtype,
                memory=memory,
                num_gpus=gpus,
                utilization=utilization,
                block_size=block_size,
                bandwidth=bandwidth,
                prefill_tokens_per_s=prefill_tokens_per_s,
                tiers=tier or [],
            )
            plans.append(make_plan(model, demand))
        if html is not None:
            from kvist.lab.pages.plan import plan_page
            from kvist.lab.report import describe_run

            plan_page(plans, describe_run()).write(html)
    if as_json:
        found = [each.to_dict() for each in plans]
        answer = found[0] if len(found) == 1 else {"schema": SCHEMA, "plans": found}
        out.print_json(json.dumps(answer))
    elif len(plans) == 1:
        show_plan(plans[0], out)
    else:
        show_comparison(plans, out)
    if any(each.fits is False for each in plans):
        raise typer.Exit(1)
