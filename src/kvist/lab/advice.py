"""What to do when memory hurts, cheapest first.

Owns the order of remedies and the numbers beside them. Reads a finished plan; computes nothing that
`kvist.lab.plan` could not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvist.lab.plan import Plan, make_plan
from kvist.sizes import format_size
from kvist.spec import LayerKind

HEADROOM = (1.2, 1.5)
"""--max-model-len as a multiple of the longest request that is really seen."""

_QUANTIZED = "fp8"


@dataclass(frozen=True, slots=True)
class Advice:
    """One remedy: what to do, and what it brings by the plan's own numbers."""

    title: str
    text: str


def advise(plan: Plan) -> list[Advice]:
    """Return remedies in order of cost: quantize, cut, tier, another shape, more memory."""
    return [
        found
        for found in (
            _quantize(plan),
            _cut_context(plan),
            _tiers(plan),
            _another_shape(plan),
            _more_memory(plan),
        )
        if found is not None
    ]


def _quantize(plan: Plan) -> Advice | None:
    smaller = {name: (size, most) for name, size, most in plan.by_format}
    if plan.kv_format not in ("bf16", "fp16", "fp32") or _QUANTIZED not in smaller:
        return None
    size, most = smaller[_QUANTIZED]
    text = (
        f"--kv-cache-dtype {_QUANTIZED}: {format_size(plan.kv_bytes)} of KV become"
        f" {format_size(size)}"
    )
    if plan.max_concurrency is not None and most is not None:
        text += f", and {most} sequences fit instead of {plan.max_concurrency}"
    return Advice("quantize the KV cache", f"{text}. Measure quality on your own task first")


def _cut_context(plan: Plan) -> Advice | None:
    most = plan.model.spec.max_position
    if most is None or plan.demand.context < most or most <= 8192:
        return None
    quarter = make_plan(plan.model, replace(plan.demand, context=most // 4))
    text = (
        f"--max-model-len: the longest request you really see × {HEADROOM[0]}–{HEADROOM[1]}. At a"
        f" quarter of {most} tokens: {format_size(quarter.kv_bytes)} instead of"
        f" {format_size(plan.kv_bytes)}"
    )
    if quarter.max_concurrency is not None:
        text += f", and {quarter.max_concurrency} fit at a time instead of {plan.max_concurrency}"
    return Advice("cut the context to real need", text)


def _tiers(plan: Plan) -> Advice | None:
    loads = [tier.name for tier, _, load in plan.break_even if load]
    if not loads:
        return None
    return Advice(
        "keep prefixes in a lower tier",
        f"loading beats recomputing from: {', '.join(loads)}. It helps where prompts come again"
        " (chats, agents, long system prompts), not where every prompt is new",
    )


def _another_shape(plan: Plan) -> Advice | None:
    spec = plan.model.spec
    heads = max((g.num_kv_heads for g in spec.kv_groups if g.kind is LayerKind.FULL), default=0)
    if heads < spec.num_query_heads or heads <= 1:
        return None
    return Advice(
        "take a model with fewer KV heads",
        f"this one keeps K and V for each of its {heads} heads (MHA); with 8 KV heads (GQA) it"
        f" would be {heads / 8:g} times less",
    )


def _more_memory(plan: Plan) -> Advice | None:
    memory, needed = plan.demand.memory_bytes, plan.needed_bytes
    if memory is None or needed is None or plan.fits is not False:
        return None
    for num_gpus in (1, 2, 4, 8, 16, 32, 64):
        if num_gpus <= plan.demand.num_gpus:
            continue
        larger = make_plan(plan.model, replace(plan.demand, num_gpus=num_gpus))
        if larger.fits:
            return Advice(
                "more memory",
                f"--tensor-parallel-size {num_gpus} with {format_size(memory)} each holds it",
            )
    return Advice("more memory", f"{format_size(needed)} are needed in all")
