"""`kvist explain`: parse, call, print. The walk is `kvist.lab.explain`'s."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from kvist.commands.terminal import DEFAULT_MODEL, MODEL_HELP, bad_input, err, out
from kvist.errors import ConfigError
from kvist.sizes import format_size

if TYPE_CHECKING:
    from kvist.lab.explain import Explanation, Pass, TokenStory

_TITLES = {
    "cold": "first time: nothing is there",
    "again": "again: what the device still has",
    "restart": "the device has forgotten it: what a lower tier has",
}
_STYLES = {"computed": "yellow", "never": "dim"}
_WIDTH = 44


def explain(
    text: Annotated[str, typer.Argument(help="Text to continue.")],
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = DEFAULT_MODEL,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate.", min=1)] = 8,
    block_size: Annotated[int, typer.Option(help="Slots a block.", min=1)] = 16,
    tier: Annotated[
        str | None, typer.Option(help="A place below the device to show too, as host:256MiB.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Schema kvist.explain.v1.")] = False,
) -> None:
    """Walk a real generation: which K and V are computed, which reused, from where, and why no Q.

    kvist explain "The capital of France is"

    kvist explain "$(cat chapter.txt)" --tier host:256MiB
    """
    with bad_input():
        if not text:
            raise ConfigError('there is no text: kvist explain "The capital of France is"')
        from kvist.engine.llm import LLM
        from kvist.engine.weights.source import resolve
        from kvist.lab.explain import explain as walk
        from kvist.spec import KVSpec

        with err.status(f"loading {model}"):
            spec = KVSpec.from_config(resolve(model).config)
            llm = LLM(
                model,
                block_size=block_size,
                kv_cache_memory_bytes=1 << 30,
                max_num_seqs=1,
                tiers=(tier,) if tier else (),
            )
        with llm:
            found = walk(llm, spec, text, max_tokens)
    if as_json:
        out.print_json(json.dumps(found.to_dict()))
        return
    for done in found.passes:
        _show(done)
    out.print(
        '"asked": K and V that the query of the last token of a row was held against',
        style="dim",
        highlight=False,
    )
    for line in _lessons(found):
        out.print(line, markup=False, highlight=False, soft_wrap=True)


def _show(done: Pass) -> None:
    table = Table(title=_TITLES[done.name], title_justify="left")
    for column in ("token", "text", "K and V", "block: slots", "address", "asked"):
        right = column in ("token", "asked")
        table.add_column(column, justify="right" if right else "left", no_wrap=column != "text")
    for _, group in groupby(done.tokens, key=_together):
        table.add_row(*_row(list(group)))
    out.print(table)
    out.print(
        f"  {done.num_computed} computed in {done.num_steps} steps, {done.num_reused} reused;"
        f" without a cache: {done.num_without_cache} computed",
        highlight=False,
    )


def _together(token: TokenStory) -> tuple[object, ...]:
    return token.role, token.source, token.step, token.block


def _row(tokens: list[TokenStory]) -> list[str | Text]:
    first, last = tokens[0], tokens[-1]

    def span(low: int | None, high: int | None) -> str:
        if low is None:
            return "–"
        return f"{low}" if low == high else f"{low}–{high}"

    text = "".join(token.text for token in tokens).replace("\n", "⏎")
    if len(text) > _WIDTH:
        text = f"{text[: _WIDTH // 2 - 1]} … {text[-_WIDTH // 2 + 2 :]}"
    source = first.source
    if source == "computed":
        kept = f"computed, step {first.step}"
    elif source == "never":
        kept = "never computed"
    else:
        kept = f"reused, {source}"
    return [
        span(first.position, last.position),
        Text(text, style="" if first.role == "prompt" else "bold"),
        Text(kept, style=_STYLES.get(source, "green")),
        "–" if first.block is None else f"{first.block}: {span(first.slot, last.slot)}",
        first.key or ("open" if first.block is not None else "–"),
        f"{last.asked:,}" if last.asked else "–",
    ]


def _lessons(found: Explanation) -> Iterator[str]:
    kv, query = format_size(found.kv_bytes_per_token), format_size(found.query_bytes_per_token)
    yield (
        f"K and V of one token are {kv}: {found.num_layers} layers × {found.num_kv_heads} KV heads"
        f" of {found.head_dim}. They are kept because every later token asks them."
    )
    yield (
        "Q is not kept: the query of a token is used once, in the step that computes it, to ask the"
        f" K of all tokens up to its own. Nobody asks it again; to keep it would cost {query} a"
        f" token ({found.num_query_heads} query heads), and nothing would ever read it."
    )
    yield (
        "The last token has no K and V: nothing comes after it. A block has an address when all"
        f" {found.block_size} slots are full; only then is it found again. The last token of a"
        " prompt is always computed, since its query makes the next token."
    )
