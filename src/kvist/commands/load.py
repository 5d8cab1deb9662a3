"""`kvist bench serve URL`: parse, call. Imports no torch: the server may be anybody's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvist.commands.outputs import Report
from kvist.commands.terminal import bad_input
from kvist.errors import ConfigError


def serve(
    url: Annotated[str, typer.Argument(help="Of an OpenAI-compatible server.")],
    rate: Annotated[str, typer.Option(help="Requests a second, one load each.")] = "0.5,1,2",
    seconds: Annotated[float, typer.Option(help="Of each load.", min=1)] = 20,
    prompt_tokens: Annotated[int, typer.Option(help="Of a prompt, about.", min=8)] = 512,
    shared_tokens: Annotated[int, typer.Option(help="Of it, shared with others.", min=0)] = 384,
    prefixes: Annotated[int, typer.Option(help="Different shared beginnings.", min=1)] = 4,
    max_tokens: Annotated[int, typer.Option(help="Of an answer.", min=1)] = 32,
    slo_ttft: Annotated[float, typer.Option(help="Promised first token, s.", min=0)] = 2.0,
    slo_tpot: Annotated[float, typer.Option(help="Promised time a token, s.", min=0)] = 0.1,
    trace: Annotated[
        Path | None, typer.Option(help="Replay a file in Mooncake's format instead.")
    ] = None,
    trace_requests: Annotated[int, typer.Option(help="Of the trace.", min=1)] = 100,
    trace_speed: Annotated[float, typer.Option(help="So many times faster.", min=0.001)] = 1.0,
    trace_shrink: Annotated[float, typer.Option(help="Lengths divided by.", min=1)] = 32.0,
    endpoint: Annotated[str, typer.Option(help="chat or completions.")] = "chat",
    model: Annotated[str | None, typer.Option(help="Default: the first it names.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="KVIST_API_KEY", help="Bearer token.")
    ] = None,
    *,
    report: Report,
) -> None:
    """Load on any OpenAI-compatible server: first token, pace, goodput, what its cache saved.

    kvist bench serve http://127.0.0.1:8000 --rate 1,2,4 --png load.png
    """
    from kvist.lab.bench.http_stream import StreamClient
    from kvist.lab.bench.serve import ServeBench, ServeWorkload
    from kvist.lab.traces import read_mooncake

    with bad_input():
        if endpoint not in ("chat", "completions"):
            raise ConfigError(f"--endpoint={endpoint} must be chat or completions")
        work = ServeWorkload(
            rates=_rates(rate),
            seconds=seconds,
            prompt_tokens=prompt_tokens,
            shared_tokens=min(shared_tokens, prompt_tokens - 1),
            prefixes=prefixes,
            max_tokens=max_tokens,
            slo_ttft_s=slo_ttft,
            slo_tpot_s=slo_tpot,
            chat=endpoint == "chat",
            trace_requests=trace_requests,
            trace_speed=trace_speed,
            trace_shrink=trace_shrink,
        )
        requests = read_mooncake(trace) if trace is not None else None
        bench = ServeBench(StreamClient(url, api_key), model, work, requests)
        report(bench)


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0 < rate < float("inf") for rate in rates):
        raise ConfigError(f"--rate={text} are no rates above 0; write 0.5,1,2")
    return rates
