"""A plan for people: tables and sentences on a terminal. Computes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from kvist.lab.advice import advise
from kvist.lab.plan import Plan
from kvist.lab.report import print_table
from kvist.sizes import format_size


def show_plan(plan: Plan, console: Console) -> None:
    """Print one plan."""
    for line in headline(plan):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    rows = [[what, amount, remark] for what, amount, remark in memory_rows(plan)]
    print_table("memory", ("what", "bytes", ""), rows, console)
    if len(plan.kv_bytes_per_token_by_group) > 1:
        groups = [[name, format_size(size)] for name, size in plan.kv_bytes_per_token_by_group]
        print_table("KV a token, by layer group", ("layers", "bytes"), groups, console)
    columns = ("", f"KV for {plan.demand.concurrency}", "sequences that fit")
    formats = [[name, format_size(size), _count(most)] for name, size, most in plan.by_format]
    print_table(f"formats, at {plan.demand.context} tokens", columns, formats, console)
    contexts = [[f"{n:,}", format_size(size), _count(most)] for n, size, most in plan.by_context]
    print_table(f"contexts, in {plan.kv_format}", columns, contexts, console)
    for line in bounds_of(plan):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    advice = advise(plan)
    if advice:
        console.print("what helps, cheapest first:", highlight=False)
    for number, remedy in enumerate(advice, 1):
        text = f"  {number}. {remedy.title}: {remedy.text}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    for note in plan.notes:
        console.print(f"  note: {note}", markup=False, highlight=False, soft_wrap=True)


def show_comparison(plans: Sequence[Plan], console: Console) -> None:
    """Print several plans side by side, one line each."""
    rows = [
        [
            plan.model.name,
            format_size(plan.kv_bytes_per_token),
            format_size(plan.kv_bytes),
            "–" if plan.model.weights_bytes is None else format_size(plan.model.weights_bytes),
            _count(plan.max_concurrency),
            _count(plan.max_context),
        ]
        for plan in plans
    ]
    columns = ("model", "KV a token", "KV", "weights", "sequences", "context")
    demand = plans[0].demand
    title = f"{demand.concurrency} × {demand.context:,} tokens, {demand.kv_cache_dtype}"
    print_table(title, columns, rows, console)


def headline(plan: Plan) -> list[str]:
    """Return what is needed and whether it fits, a sentence each."""
    demand = plan.demand
    need = (
        f"{plan.model.name}: {demand.concurrency} × {demand.context:,} tokens need"
        f" {format_size(plan.kv_bytes)} of KV cache in {plan.kv_format}"
        f" ({format_size(plan.kv_bytes_per_token)} a token)"
    )
    lines = [need]
    if plan.fits is not None and demand.memory_bytes is not None:
        where = f"{demand.num_gpus} × {format_size(demand.memory_bytes)} at {demand.utilization:g}"
        lines.append(f"that fits {where}" if plan.fits else f"that does NOT fit {where}")
    if plan.max_concurrency is not None:
        lines.append(
            f"at most {plan.max_concurrency} at a time of {demand.context:,} tokens, or"
            f" {demand.concurrency} of {plan.max_context or 0:,} tokens"
        )
    return lines


def memory_rows(plan: Plan) -> list[tuple[str, str, str]]:
    """Return (what, bytes, remark)."""
    demand, model = plan.demand, plan.model
    weights = "unknown" if model.weights_bytes is None else format_size(model.weights_bytes)
    rows = [
        ("weights", weights, model.weights_dtype),
        ("workspace, each", format_size(plan.workspace_bytes), "estimate"),
        ("KV a sequence", format_size(plan.kv_bytes_per_sequence), f"{demand.context:,} tokens"),
        ("KV in all", format_size(plan.kv_bytes), "concurrency × a sequence"),
        (
            "lost to partial blocks",
            format_size(plan.partial_block_bytes),
            f"on average, {demand.block_size} slots a block",
        ),
    ]
    if plan.state_bytes:
        rows.append(("constant state", format_size(plan.state_bytes), "whatever the length"))
    if demand.num_gpus > 1:
        how = "some of it on several GPUs" if plan.replicated else "KV heads divided"
        rows.append(("KV on each GPU", format_size(plan.kv_bytes_per_gpu), how))
    if plan.needed_bytes is not None:
        rows.append(("needed in all", format_size(plan.needed_bytes), ""))
    if plan.budget_bytes is not None:
        rows.append(("budget", format_size(plan.budget_bytes), f"{demand.utilization:g} of memory"))
    return rows


def bounds_of(plan: Plan) -> list[str]:
    """Return what bandwidth allows, and what is worth loading, a sentence each."""
    lines = []
    if plan.decode_tokens_per_s is not None:
        each = plan.decode_tokens_per_s / plan.demand.concurrency
        lines.append(
            f"decode is bound by memory bandwidth to {plan.decode_tokens_per_s:,.0f} tokens/s in"
            f" all, {each:,.1f} each"
            f" (--bandwidth {plan.demand.bandwidth_bytes_per_s / 1e9:,.0f} GB/s)"
        )
    if plan.prefill_tokens_per_s is not None:
        lines.append(
            f"load or recompute, where prefill does {plan.prefill_tokens_per_s:,.0f} tokens/s:"
        )
    for tier, speed, load in plan.break_even:
        verdict = "load" if load else "recompute"
        lines.append(
            f"  {tier.name} ({tier.bytes_per_s / 1e9:g} GB/s): {speed:,.0f} tokens/s → {verdict}"
        )
    return lines


def _count(number: int | None) -> str:
    return "–" if number is None else f"{number:,}"
