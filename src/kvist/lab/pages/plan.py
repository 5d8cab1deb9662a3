"""A plan on a page: the tables of the terminal, and what grows with what.

Owns which curves are drawn. The numbers are `kvist.lab.plan`'s, asked at other contexts, formats
and concurrencies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvist.lab.advice import advise
from kvist.lab.pages.page import Page
from kvist.lab.pages.svg import Line, line_chart, stacked_bar
from kvist.lab.plan import Plan, make_plan
from kvist.lab.plan_view import bounds_of, headline, memory_rows
from kvist.sizes import format_size

_CONCURRENCIES = tuple(1 << power for power in range(9))


def add_plan(page: Page, plan: Plan) -> None:
    """Add a section about one plan."""
    page.heading(plan.model.name)
    first, *others = headline(plan)
    page.text(first, "lead")
    for line in others:
        page.text(line, "bad" if "NOT" in line else "")
    demand = plan.demand
    if plan.model.weights_bytes is not None:
        workspace = plan.workspace_bytes * demand.num_gpus
        pieces = [
            ("weights", float(plan.model.weights_bytes)),
            ("workspace", float(workspace)),
            ("KV cache", float(plan.kv_bytes_per_gpu * demand.num_gpus)),
        ]
        page.chart(
            stacked_bar(pieces, plan.budget_bytes, format_size),
            "of all GPUs together; the budget is the memory that the engine may take",
        )
    page.table("memory", ("", "bytes", ""), [list(row) for row in memory_rows(plan)])
    if len(plan.kv_bytes_per_token_by_group) > 1:
        rows = [[name, format_size(size)] for name, size in plan.kv_bytes_per_token_by_group]
        page.table("KV a token, by layer group", ("layers", "bytes"), rows)
    _formats(page, plan)
    _decoding(page, plan)
    for line in bounds_of(plan):
        page.text(line)
    advice = advise(plan)
    if advice:
        page.heading("What helps, cheapest first", 3)
        page.points((remedy.title, remedy.text) for remedy in advice)
    for note in plan.notes:
        page.text(f"Note: {note}.", "faint")


def plan_page(plans: Sequence[Plan], about: str) -> Page:
    """Return a page about one plan or several."""
    names = ", ".join(plan.model.name for plan in plans)
    page = Page(f"KV memory of {names}", about)
    if len(plans) > 1:
        page.table(
            "side by side",
            ("model", "KV a token", "KV", "weights", "sequences", "context"),
            [
                [
                    plan.model.name,
                    format_size(plan.kv_bytes_per_token),
                    format_size(plan.kv_bytes),
                    _size(plan.model.weights_bytes),
                    _count(plan.max_concurrency),
                    _count(plan.max_context),
                ]
                for plan in plans
            ],
        )
    for plan in plans:
        add_plan(page, plan)
    return page


def _formats(page: Page, plan: Plan) -> None:
    demand = plan.demand
    each = [
        make_plan(plan.model, replace(demand, kv_cache_dtype=name)) for name, _, _ in plan.by_format
    ]
    lines = [
        Line(other.kv_format, [(float(n), float(size)) for n, size, _ in other.by_context])
        for other in each
    ]
    if plan.budget_bytes is not None and plan.model.weights_bytes is not None:
        room = plan.budget_bytes - plan.model.weights_bytes - plan.workspace_bytes * demand.num_gpus
        contexts = [float(n) for n, _, _ in plan.by_context]
        if room > 0:
            ends = [(min(contexts), float(room)), (max(contexts), float(room))]
            lines.append(Line("room for KV", ends, is_limit=True))
    page.chart(
        line_chart(lines, "tokens of context", "KV cache", _tokens, format_size),
        f"KV cache, by format; sequences at a time: {demand.concurrency}",
    )
    fitting = [
        Line(
            other.kv_format,
            [(float(n), float(most)) for n, _, most in other.by_context if most is not None],
        )
        for other in each
    ]
    page.chart(
        line_chart(fitting, "tokens of context", "sequences that fit", _tokens, _tokens),
        "sequences at a time, by context and format; 0 is not drawn",
    )
    rows = [[name, format_size(size), _count(most)] for name, size, most in plan.by_format]
    columns = ("", f"KV for {demand.concurrency}", "sequences that fit")
    page.table(f"formats, at {demand.context:,} tokens", columns, rows)
    rows = [[f"{n:,}", format_size(size), _count(most)] for n, size, most in plan.by_context]
    page.table(f"contexts, in {plan.kv_format}", columns, rows)


def _decoding(page: Page, plan: Plan) -> None:
    if plan.decode_tokens_per_s is None:
        return
    lines = []
    for name, _, _ in plan.by_format:
        points = []
        for concurrency in _CONCURRENCIES:
            demand = replace(plan.demand, kv_cache_dtype=name, concurrency=concurrency)
            other = make_plan(plan.model, demand)
            points.append((float(concurrency), other.decode_tokens_per_s or 0.0))
        lines.append(Line(other.kv_format, points))
    page.chart(
        line_chart(lines, "sequences at a time", "tokens/s of all", _tokens, _tokens),
        f"what memory bandwidth allows at {plan.demand.context:,} tokens of context, whether or not"
        " it fits; no engine is faster",
    )


def _tokens(number: float) -> str:
    for unit, factor in (("M", 1 << 20), ("K", 1 << 10)):
        if number >= factor:
            return f"{number / factor:g}{unit}"
    return f"{number:g}"


def _size(nbytes: int | None) -> str:
    return "–" if nbytes is None else format_size(nbytes)


def _count(number: int | None) -> str:
    return "–" if number is None else f"{number:,}"
