"""`kvist doctor`: parse, call, print. What is a symptom stands in `kvist.lab.doctor`.

Exit codes: 0 nothing found, 1 something found, 2 a target cannot be read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvist.commands.terminal import bad_input, out
from kvist.errors import ConfigError

if TYPE_CHECKING:
    from kvist.lab.doctor.examine import Diagnosis

_STYLES = {"ok": "green", "warning": "yellow", "bad": "bold red"}


def doctor(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            help="URL of a server, file with its metrics, its log, a request log or trace (JSONL),"
            " kvist's event log; several are looked at together. 'prompts FILE' lints a template."
        ),
    ] = None,
    interval: Annotated[
        float, typer.Option(help="Seconds: read a URL twice and look at what changed.")
    ] = 0.0,
    limit: Annotated[
        list[str] | None,
        typer.Option(help="NAME=WARNING,BAD, as mean_latency_s=2,5; repeatable."),
    ] = None,
    thresholds: Annotated[
        Path | None, typer.Option(help="TOML file of them: mean_latency_s = [2, 5].")
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(help="Leave a symptom out, by its name; repeatable.")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Of the server, for request logs. Default 16.", min=1)
    ] = None,
    pool_tokens: Annotated[
        int | None,
        typer.Option(help="The KV pool of the server, where metrics do not tell.", min=1),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Of the server, where metrics do not tell.", min=1)
    ] = None,
    list_symptoms: Annotated[
        bool, typer.Option("--list", help="Show what is looked for, and the remedies.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Schema kvist.doctor.v1.")] = False,
) -> None:
    """Why does memory hurt? Looks at a server, its log or its requests, and says what to do.

    kvist doctor http://127.0.0.1:8000

    kvist doctor vllm.log

    kvist doctor http://127.0.0.1:8000 requests.jsonl

    kvist doctor prompts template.jinja
    """
    if list_symptoms:
        _list(as_json)
        return
    with bad_input():
        from kvist.lab.doctor.examine import Question, diagnose
        from kvist.lab.doctor.thresholds import read_thresholds

        if not targets:
            raise ConfigError("name a target: kvist doctor http://127.0.0.1:8000, or a file")
        if targets[0] == "prompts":
            _lint(targets[1:], as_json)
            return
        question = Question(
            thresholds=read_thresholds(thresholds, limit or ()),
            block_size=block_size,
            pool_tokens=pool_tokens,
            max_model_len=max_model_len,
            interval_s=interval,
            ignored=tuple(ignore or ()),
        )
        answer = diagnose(targets, question)
    if as_json:
        body = answer.to_dict() | {"thresholds": question.thresholds.to_dict()}
        out.print_json(json.dumps(body))
    else:
        _show(answer)
    if answer.findings:
        raise typer.Exit(1)


def _list(as_json: bool) -> None:
    from kvist.lab.doctor.finding import SCHEMA, SYMPTOMS

    if as_json:
        rows = [
            {"symptom": s.name, "title": s.title, "check": s.check, "remedy": s.remedy}
            for s in SYMPTOMS.values()
        ]
        out.print_json(json.dumps({"schema": SCHEMA, "symptoms": rows}))
        return
    for symptom in SYMPTOMS.values():
        out.print(f"[bold]{symptom.title}[/] ({symptom.name})", highlight=False)
        for word, text in (("check", symptom.check), ("remedy", symptom.remedy)):
            out.print(f"    {word:<7} {text}", highlight=False, markup=False, soft_wrap=True)


def _show(answer: Diagnosis) -> None:
    from rich.table import Table
    from rich.text import Text

    for fact in answer.facts:
        out.print(fact, style="dim", markup=False, highlight=False, soft_wrap=True)
    if answer.figures:
        table = Table(title="key figures", title_justify="left")
        for column in ("", "now", "warning", "bad", ""):
            table.add_column(column, justify="right" if column else "left")
        for figure in answer.figures:
            level = figure.level.value
            grade = level if figure.level in _STYLES else ""
            remark = f"{grade}: {figure.remark}" if grade and figure.remark else ""
            limits = figure.text(figure.limit.warning), figure.text(figure.limit.bad)
            table.add_row(
                figure.title,
                figure.text(figure.value),
                *limits,
                Text(remark or grade or figure.remark, style=_STYLES.get(grade, "dim")),
            )
        out.print(table)
    if answer.prefix_lengths:
        most = max(count for _, count in answer.prefix_lengths)
        rows = Table(title="longest prefix shared with another prompt", title_justify="left")
        rows.add_column("tokens, below", justify="right")
        rows.add_column("prompts", justify="right")
        rows.add_column("")
        for below, count in answer.prefix_lengths:
            rows.add_row(f"{below:,}", f"{count:,}", "█" * round(24 * count / max(1, most)))
        out.print(rows)
    if not answer.findings:
        out.print("nothing found", highlight=False)
    for number, finding in enumerate(answer.findings, 1):
        out.print(f"[bold]{number}. {finding.symptom.title}[/]", highlight=False, soft_wrap=True)
        for word, text in (
            ("seen", finding.evidence),
            ("likely", finding.cause),
            ("do", finding.remedy),
        ):
            out.print(f"   {word:<7} {text}", markup=False, highlight=False, soft_wrap=True)


def _lint(files: Sequence[str], as_json: bool) -> None:
    from kvist.lab.doctor.finding import SCHEMA
    from kvist.lab.doctor.target import read_target
    from kvist.lab.doctor.template import lint_template

    if len(files) != 1:
        raise ConfigError("kvist doctor prompts FILE: name one template")
    issues = lint_template(read_target(files[0]).text)
    if as_json:
        rows = [{"line": i.line, "text": i.text, "why": i.why} for i in issues]
        out.print_json(json.dumps({"schema": SCHEMA, "targets": ["template"], "issues": rows}))
    elif not issues:
        out.print("nothing found", highlight=False)
    else:
        for issue in issues:
            text = f"{files[0]}:{issue.line}: {issue.text}: {issue.why}"
            out.print(text, markup=False, highlight=False, soft_wrap=True)
    if issues:
        raise typer.Exit(1)
