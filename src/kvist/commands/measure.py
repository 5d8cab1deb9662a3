"""The benchmarks of `kvist bench` that share one form of result. Parse, open, call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvist.commands.load import serve
from kvist.commands.outputs import Report, bench_command
from kvist.commands.terminal import DEFAULT_MODEL, MODEL_HELP, err
from kvist.errors import ConfigError

if TYPE_CHECKING:
    from kvist.lab.bench.host import Host

Model = Annotated[str, typer.Option(help=MODEL_HELP)]
Record = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.jsonl",
        help="Record for kvist simulate: a file for each engine that is opened, numbered from 2.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands to `kvist bench`."""
    for name, command in (
        ("cache", cache),
        ("prefix", prefix),
        ("context", context),
        ("schedule", schedule),
        ("agents", agents),
        ("ladder", ladder),
        ("block-size", block_size),
        ("pollution", pollution),
        ("serve", serve),
    ):
        bench_command(app, name)(command)


def cache(
    model: Model = DEFAULT_MODEL,
    contexts: Annotated[str, typer.Option(help="Lengths, tokens.")] = "128,256,512,1024,2048,4096",
    tokens: Annotated[int, typer.Option(help="Timed at each length.", min=1)] = 8,
    record: Record = None,
    *,
    report: Report,
) -> None:
    """A token's price with a KV cache, and when every token computes its context again."""
    from kvist.lab.bench.cache import CacheBench, CacheWorkload

    work = CacheWorkload(contexts=numbers(contexts, "--contexts"), tokens=tokens)
    most = max(work.contexts) + tokens + 1
    with loaded(model, most + 64, most, record=record) as host:
        report(CacheBench(host, work))


def prefix(
    model: Model = DEFAULT_MODEL,
    tokens: Annotated[int, typer.Option(help="Of every prompt.", min=64)] = 2048,
    repeats: Annotated[int, typer.Option(help="Rounds.", min=1)] = 5,
    record: Record = None,
    *,
    report: Report,
) -> None:
    """First token by how much of a prompt ran before; and the price when nothing is shared."""
    from kvist.lab.bench.prefix import PrefixBench, PrefixWorkload

    work = PrefixWorkload(tokens=tokens, repeats=repeats)
    with loaded(model, 6 * tokens + 4096, record=record) as host:
        report(PrefixBench(host, work))


def context(
    model: Model = DEFAULT_MODEL,
    streams: Annotated[int, typer.Option(help="That share the pool.", min=1)] = 8,
    slots: Annotated[int, typer.Option(help="Tokens that the pool holds.", min=1024)] = 16_384,
    record: Record = None,
    *,
    report: Report,
) -> None:
    """Decode speed by context, and the context at which a number of streams fills the pool."""
    from kvist.lab.bench.context import ContextBench, ContextWorkload

    work = ContextWorkload(streams=streams, slots=slots)
    with loaded(model, slots, record=record) as host:
        report(ContextBench(host, work))


def schedule(
    model: Model = DEFAULT_MODEL,
    long_prompt: Annotated[int, typer.Option(help="Tokens that arrive.", min=64)] = 4096,
    streams: Annotated[int, typer.Option(help="That decode meanwhile.", min=1)] = 8,
    repeats: Annotated[int, typer.Option(help="Rounds.", min=1)] = 3,
    record: Record = None,
    *,
    report: Report,
) -> None:
    """Gaps between the tokens of running streams while a long prompt arrives: five schedules."""
    from kvist.lab.bench.schedule import ScheduleBench, ScheduleWorkload

    work = ScheduleWorkload(streams=streams, long_prompt=long_prompt, repeats=repeats)
    with loaded(model, 2 * long_prompt + 256 * streams + 4096, 8192, record=record) as host:
        report(ScheduleBench(host, work))


def agents(
    model: Model = DEFAULT_MODEL,
    count: Annotated[int, typer.Option("--agents", help="Side by side.", min=1)] = 6,
    turns: Annotated[int, typer.Option(help="Of each agent.", min=1)] = 6,
    repeats: Annotated[int, typer.Option(help="Rounds.", min=1)] = 2,
    record: Record = None,
    *,
    report: Report,
) -> None:
    """A closed loop of agents: long static beginnings, pauses in tools, branches."""
    from kvist.lab.bench.agents import AgentsBench, AgentsWorkload

    work = AgentsWorkload(agents=count, turns=turns, repeats=repeats)
    each = work.static + turns * (work.tool_answer + work.said) + 128
    with loaded(model, 2 * count * each, record=record) as host:
        report(AgentsBench(host, work))


def ladder(
    model: Model = DEFAULT_MODEL,
    requests: Annotated[int, typer.Option(help="Of a rung.", min=8)] = 32,
    repeats: Annotated[int, typer.Option(help="Rounds.", min=1)] = 2,
    record: Record = None,
    *,
    report: Report,
) -> None:
    """One workload, one idea more each time: no cache, KV cache, paged, prefix, tiers."""
    from kvist.lab.bench.ladder import LadderBench, LadderWorkload

    work = LadderWorkload(requests=requests, repeats=repeats)
    with loaded(model, work.slots, work.slots, record=record) as host:
        from kvist.lab.opening import open_tiered

        most = repeats * work.documents * (work.document + 256) * host.kv_token_bytes
        session, opened = open_tiered(model, work.slots, 2 * most, work.clients)
        try:
            report(LadderBench(host, session, work))
        finally:
            opened.close()


def block_size(
    model: Model = DEFAULT_MODEL,
    sizes: Annotated[str, typer.Option(help="Tokens a block.")] = "8,16,32,64,128",
    no_model: Annotated[bool, typer.Option("--no-model", help="Books only: no tokens/s.")] = False,
    *,
    report: Report,
) -> None:
    """Utilization, hits and tokens/s by the size of a block."""
    from kvist.lab.bench.block_size import BlockSizeBench, BlockSizeWorkload

    work = BlockSizeWorkload(sizes=numbers(sizes, "--sizes"))
    opener = None
    if not no_model:
        from kvist.lab.opening import sized_opener

        opener = sized_opener(model, 8192)
    report(BlockSizeBench(opener, work))


def pollution(
    protected_share: Annotated[
        float, typer.Option(help="Of the pool, for blocks in repeated use.", min=0, max=0.95)
    ] = 0.25,
    *,
    report: Report,
) -> None:
    """Hits on hot prefixes that a flood of one-off prompts leaves, by policy. Books only."""
    from kvist.lab.bench.pollution import PollutionBench, PollutionWorkload

    work = PollutionWorkload(protected_share=protected_share)
    report(PollutionBench(work))


def numbers(text: str, flag: str) -> tuple[int, ...]:
    """Read whole numbers above 0, separated by commas.

    Raises
    ------
    ConfigError
        If they are none.
    """
    try:
        found = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        found = (0,)
    if found[0] < 1:
        raise ConfigError(f"{flag}={text} are no numbers above 0; write 128,256")
    return found


@contextmanager
def loaded(
    model: str, slots: int, max_num_batched_tokens: int = 2048, *, record: Path | None = None
) -> Iterator[Host]:
    """Load a model for the length of a benchmark."""
    if record is not None and not record.parent.is_dir():
        raise ConfigError(f"--record {record}: its folder is not there")
    with err.status(f"loading {model}"):
        from kvist.lab.opening import open_host

        host, opened = open_host(model, slots, max_num_batched_tokens=max_num_batched_tokens)
    host.record = record
    try:
        yield host
    finally:
        host.close()
        opened.close()
