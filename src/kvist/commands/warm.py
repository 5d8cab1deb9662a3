"""`kvist warm`: compute prompts ahead of use, so that tiers have them. Parse, call, print."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

from kvist.commands.terminal import DEFAULT_MODEL, MODEL_HELP, err, out, plain_errors
from kvist.errors import ConfigError, KvistError
from kvist.flags import with_engine_options

Entry = dict[str, Any]


def read_prompts(path: Path) -> list[Entry]:
    """Read prompts: a file of JSON lines, or a text that is one prompt.

    A line has ``prompt`` (text or token ids) or ``messages``, and perhaps ``cache_salt``.

    Raises
    ------
    ConfigError
        Saying which line is wrong, or why the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if path.suffix not in (".jsonl", ".ndjson"):
        return [{"prompt": text}]
    return list(_lines(path, text))


def _lines(path: Path, text: str) -> Iterator[Entry]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: {error}") from error
        if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
            raise ConfigError(f"{path}:{number}: a line has prompt or messages, one of them")
        yield entry


@with_engine_options
def warm(
    file: Annotated[Path, typer.Argument(help="JSON lines (.jsonl) of prompts, or one text.")],
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = DEFAULT_MODEL,
    url: Annotated[
        str | None, typer.Option(help="A running server, such as http://127.0.0.1:8000.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Of that server.", envvar="KVIST_API_KEY")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    *,
    engine_args: dict[str, Any],
) -> None:
    """Compute prompts ahead of use, so that the tiers below have their KV.

    With --url a running server does it; else a model is loaded here, with the --tier options.
    """
    start = time.perf_counter()
    with plain_errors():
        entries = read_prompts(file)
        if url is not None:
            counts = [_ask(url, api_key, entry) for entry in track(entries, "warming", console=err)]
        else:
            counts = _compute(model, engine_args, entries)
    total = {
        "prompts": len(counts),
        "prompt_tokens": sum(prompt for prompt, _ in counts),
        "cached_tokens": sum(cached for _, cached in counts),
        "seconds": round(time.perf_counter() - start, 3),
    }
    if as_json:
        out.print_json(json.dumps(total))
    else:
        out.print(
            f"{total['prompts']} prompts, {total['prompt_tokens']} tokens,"
            f" {total['cached_tokens']} of them there already; {total['seconds']} s",
            highlight=False,
        )


def _ask(url: str, api_key: str | None, entry: Entry) -> tuple[int, int]:
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    where = url.rstrip("/") + "/v1/kv/prefetch"
    if not where.startswith(("http://", "https://")):
        raise ConfigError(f"--url={url} is no address of a server; write http://host:8000")
    request = urllib.request.Request(where, json.dumps(entry).encode(), headers)
    try:
        with urllib.request.urlopen(request) as answer:
            said = json.load(answer)
    except urllib.error.HTTPError as error:
        raise KvistError(f"{where}: {error.code}: {error.read().decode()[:400]}") from error
    except OSError as error:
        raise KvistError(f"{where}: {error}") from error
    return said["prompt_tokens"], said["cached_tokens"]


def _compute(
    model: str, engine_args: dict[str, Any], entries: list[Entry]
) -> list[tuple[int, int]]:
    if not engine_args.get("tiers"):
        raise ConfigError("nothing would be kept: give --tier disk:20GiB:/path, or --url")
    if any(entry.get("cache_salt") for entry in entries):
        raise ConfigError("cache_salt is a server's: give --url")
    from kvist.engine.llm import LLM
    from kvist.engine.sampling import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    counts = []
    with LLM(model, **engine_args) as llm:
        for entry in track(entries, "warming", console=err):
            if "messages" in entry:
                (output,) = llm.chat(entry["messages"], params, use_tqdm=False)
            else:
                (output,) = llm.generate([entry["prompt"]], params, use_tqdm=False)
            counts.append((len(output.prompt_token_ids), output.num_cached_tokens))
    return counts
