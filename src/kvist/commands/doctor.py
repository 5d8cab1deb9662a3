"""`kvist doctor`: parse, call, print. What is a symptom stands in `kvist.lab.doctor`.

Exit codes: 0 nothing found, 1 something found, 2 the target cannot be read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from kvist.commands.terminal import bad_input, out
from kvist.errors import ConfigError

if TYPE_CHECKING:
    from kvist.lab.doctor.finding import Finding


def doctor(
    target: Annotated[
        list[str] | None,
        typer.Argument(
            help="URL of a server, file with its metrics, its log, or a request log (JSONL);"
            " 'prompts FILE' lints a template."
        ),
    ] = None,
    block_size: Annotated[int, typer.Option(help="Of the server, for request logs.", min=1)] = 16,
    latency: Annotated[float, typer.Option(help="Mean seconds a request to warn from.")] = 2.0,
    list_symptoms: Annotated[
        bool, typer.Option("--list", help="Show what is looked for, and the remedies.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Schema kvist.doctor.v1.")] = False,
) -> None:
    """Why does memory hurt? Looks at a server, its log or its requests, and says what to do.

    kvist doctor http://127.0.0.1:8000

    kvist doctor vllm.log

    kvist doctor requests.jsonl

    kvist doctor prompts template.jinja
    """
    from kvist.lab.doctor.finding import SYMPTOMS

    if list_symptoms:
        for symptom in SYMPTOMS.values():
            out.print(f"[bold]{symptom.title}[/] ({symptom.name})", highlight=False)
            for word, text in (("check", symptom.check), ("remedy", symptom.remedy)):
                out.print(f"    {word:<7} {text}", highlight=False, markup=False, soft_wrap=True)
        return
    with bad_input():
        if not target:
            raise ConfigError("name a target: kvist doctor http://127.0.0.1:8000, or a file")
        if target[0] == "prompts":
            _lint(target[1:], as_json)
            return
        for name in target[1:]:
            raise ConfigError(f"one target at a time; {name!r} is a second")
        _examine(target[0], block_size, latency, as_json)


def _examine(name: str, block_size: int, latency_s: float, as_json: bool) -> None:
    from kvist.lab.doctor.exposition import read_exposition
    from kvist.lab.doctor.finding import SCHEMA
    from kvist.lab.doctor.logs import examine_log
    from kvist.lab.doctor.prompts import compare_prompts, read_prompts
    from kvist.lab.doctor.requests import examine_requests
    from kvist.lab.doctor.server import Thresholds, examine_server
    from kvist.lab.doctor.target import TargetKind, read_target

    target = read_target(name)
    facts: list[str] = []
    found: list[Finding]
    if target.kind is TargetKind.METRICS:
        metrics = read_exposition(target.text)
        if not metrics.engine:
            raise ConfigError(f"{name} has metrics, but none of kvist, vLLM, llama.cpp or SGLang")
        facts.append(f"metrics of {metrics.engine}")
        thresholds = Thresholds(latency_s=(latency_s, 2.5 * latency_s))
        found = examine_server(metrics, thresholds)
    elif target.kind is TargetKind.REQUESTS:
        prompts, bad = read_prompts(target.text.splitlines())
        if not prompts:
            raise ConfigError(f"{name}: {bad} lines, none with messages or a prompt")
        sharing = compare_prompts(prompts)
        rate = sharing.shared_words / max(1, sharing.num_words)
        low, half, high = sharing.quartiles
        facts.append(
            f"{sharing.num_prompts} prompts, {rate:.0%} of their words shared; longest prefix"
            f" shared with another: {low} / {half} / {high} words (quartiles)"
        )
        if bad:
            facts.append(f"{bad} lines held no prompt and were passed over")
        found = examine_requests(sharing, block_size)
    else:
        facts.append("a server's log")
        found = examine_log(target.text.splitlines())
    if as_json:
        body = {"schema": SCHEMA, "target": target.kind.value, "facts": facts}
        out.print_json(json.dumps({**body, "findings": [each.to_dict() for each in found]}))
    else:
        _show(facts, found)
    if found:
        raise typer.Exit(1)


def _show(facts: Sequence[str], found: Sequence[Finding]) -> None:
    for fact in facts:
        out.print(fact, style="dim", markup=False, highlight=False, soft_wrap=True)
    if not found:
        out.print("nothing found", highlight=False)
    for number, finding in enumerate(found, 1):
        out.print(f"[bold]{number}. {finding.symptom.title}[/]", highlight=False)
        for word, text in (
            ("seen", finding.evidence),
            ("likely", finding.cause),
            ("do", finding.remedy),
        ):
            out.print(f"   {word:<7} {text}", markup=False, highlight=False, soft_wrap=True)


def _lint(files: Sequence[str], as_json: bool) -> None:
    from kvist.lab.doctor.finding import SCHEMA
    from kvist.lab.doctor.requests import lint_template
    from kvist.lab.doctor.target import read_target

    if len(files) != 1:
        raise ConfigError("kvist doctor prompts FILE: name one template")
    issues = lint_template(read_target(files[0]).text)
    if as_json:
        rows = [{"line": i.line, "text": i.text, "why": i.why} for i in issues]
        out.print_json(json.dumps({"schema": SCHEMA, "target": "template", "issues": rows}))
    elif not issues:
        out.print("nothing found", highlight=False)
    else:
        for issue in issues:
            text = f"{files[0]}:{issue.line}: {issue.text}: {issue.why}"
            out.print(text, markup=False, highlight=False, soft_wrap=True)
    if issues:
        raise typer.Exit(1)
