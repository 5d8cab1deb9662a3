"""`kvist plan`: how big the KV cache of a model is, and what fits, before anything is loaded.

Owns the arithmetic from a model's shape and a memory budget to bytes, concurrency, context and
bounds. What to do about it is advised by `kvist.lab.advice`; how it is shown, by the caller.

::

    memory × utilization, a GPU
    ├─ weights / GPUs
    ├─ workspace                      (estimated)
    └─ KV: blocks of whole sequences  (KV heads divide over GPUs, latents are on each)

Exact: KV bytes. Estimated, and labelled so: workspace, and weights where no file is there to count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvist.errors import ConfigError
from kvist.formats.quantized import QUANTIZED
from kvist.formats.registry import planned_format
from kvist.lab.sizing import Sizing, describe_group, workspace_bytes
from kvist.spec import KVSpec

SCHEMA = "kvist.plan.v1"
WEIGHT_BITS: Mapping[str, float] = {
    "float32": 32,
    "bfloat16": 16,
    "float16": 16,
    "fp8": 8,
    "int8": 8,
    "int4": 4.5,
}
"""Bits a parameter; int4 with a scale and zero point for 64 of them."""

_MOST_TOKENS = 1 << 40


@dataclass(frozen=True, slots=True)
class Model:
    """What is planned for.

    Attributes
    ----------
    name : str
    spec : KVSpec
    weights_bytes : int or None
        In `weights_dtype`; ``None`` where nobody can say.
    active_bytes : int or None
        Of these, what one token reads.
    weights_dtype : str
    num_active_parameters : int or None
    notes : tuple of str
    """

    name: str
    spec: KVSpec
    weights_bytes: int | None
    active_bytes: int | None
    weights_dtype: str
    num_active_parameters: int | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """A place below the device that blocks could be loaded from."""

    name: str
    bytes_per_s: float


DEFAULT_TIERS = (
    TierSpeed("host memory, PCIe 4", 20e9),
    TierSpeed("NVMe disk", 3e9),
    TierSpeed("network, 10 Gbit/s", 1.25e9),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is asked of the model, and of what machine.

    Attributes
    ----------
    context, concurrency : int
        Tokens a sequence, and sequences at a time.
    kv_cache_dtype : str
    memory_bytes : int or None
        Of one GPU, or of the machine; ``None``: only sizes are asked for.
    num_gpus : int
        Over which the model is split (tensor parallel).
    utilization : float
        Share of the memory that the engine may take.
    block_size : int
    bandwidth_bytes_per_s : float
        Of one device's memory.
    prefill_tokens_per_s : float or None
        ``None``: from `compute_flops`.
    compute_flops : float
        Of one device, as far as prefill reaches it.
    tiers : tuple of TierSpeed
    """

    context: int
    concurrency: int = 1
    kv_cache_dtype: str = "auto"
    memory_bytes: int | None = None
    num_gpus: int = 1
    utilization: float = 0.9
    block_size: int = 16
    bandwidth_bytes_per_s: float = 2.0e12
    prefill_tokens_per_s: float | None = None
    compute_flops: float = 150e12
    tiers: tuple[TierSpeed, ...] = DEFAULT_TIERS

    def __post_init__(self) -> None:
        for name in ("context", "concurrency", "num_gpus", "block_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 < self.utilization <= 1:
            raise ConfigError(f"utilization={self.utilization} must be above 0 and at most 1")
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise ConfigError(f"memory={self.memory_bytes} bytes leaves room for nothing")
        if self.bandwidth_bytes_per_s <= 0 or self.compute_flops <= 0:
            raise ConfigError("bandwidth and compute must be above 0")
        if self.prefill_tokens_per_s is not None and self.prefill_tokens_per_s <= 0:
            raise ConfigError(f"prefill_tokens_per_s={self.prefill_tokens_per_s} must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer. Bytes are of all GPUs together unless the name says otherwise.

    `max_concurrency` and `max_context` are ``None`` where no memory was given or the weights are
    unknown; 0 where not even one sequence fits.
    """

    model: Model
    demand: Demand
    kv_format: str
    kv_bytes_per_token: int
    kv_bytes_per_token_by_group: tuple[tuple[str, int], ...]
    kv_bytes_per_sequence: int
    kv_bytes: int
    state_bytes: int
    partial_block_bytes: float
    workspace_bytes: int
    kv_bytes_per_gpu: int
    replicated: bool
    budget_bytes: int | None
    needed_bytes: int | None
    fits: bool | None
    max_concurrency: int | None
    max_context: int | None
    decode_tokens_per_s: float | None
    prefill_tokens_per_s: float | None
    break_even: tuple[tuple[TierSpeed, float, bool], ...]
    by_format: tuple[tuple[str, int, int | None], ...] = ()
    by_context: tuple[tuple[int, int, int | None], ...] = ()
    notes: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """Return the plan for programs: schema `kvist.plan.v1`."""
        demand = self.demand
        return {
            "schema": SCHEMA,
            "model": self.model.name,
            "context": demand.context,
            "concurrency": demand.concurrency,
            "kv_cache_dtype": self.kv_format,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "kv_bytes_per_token_by_group": dict(self.kv_bytes_per_token_by_group),
            "kv_bytes_per_sequence": self.kv_bytes_per_sequence,
            "kv_bytes": self.kv_bytes,
            "state_bytes": self.state_bytes,
            "partial_block_bytes": round(self.partial_block_bytes),
            "weights_bytes": self.model.weights_bytes,
            "weights_dtype": self.model.weights_dtype,
            "workspace_bytes": self.workspace_bytes,
            "num_gpus": demand.num_gpus,
            "kv_bytes_per_gpu": self.kv_bytes_per_gpu,
            "kv_replicated": self.replicated,
            "memory_bytes": demand.memory_bytes,
            "utilization": demand.utilization,
            "budget_bytes": self.budget_bytes,
            "needed_bytes": self.needed_bytes,
            "fits": self.fits,
            "max_concurrency": self.max_concurrency,
            "max_context": self.max_context,
            "decode_tokens_per_s_bound": self.decode_tokens_per_s,
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "load_or_recompute": [
                {
                    "tier": tier.name,
                    "bytes_per_s": tier.bytes_per_s,
                    "tokens_per_s": speed,
                    "load": load,
                }
                for tier, speed, load in self.break_even
            ],
            "by_kv_cache_dtype": [
                {"kv_cache_dtype": name, "kv_bytes": size, "max_concurrency": most}
                for name, size, most in self.by_format
            ],
            "by_context": [
                {"context": tokens, "kv_bytes": size, "max_concurrency": most}
                for tokens, size, most in self.by_context
            ],
            "notes": list(self.notes),
        }


def make_plan(model: Model, demand: Demand) -> Plan:
    """Answer a demand.

    Raises
    ------
    ConfigError
        For an unknown format.

    Notes
    -----
    Milliseconds; no torch, no files.
    """
    spec = model.spec
    kv_format = planned_format(demand.kv_cache_dtype, spec.dtype)
    sizing = Sizing(spec, kv_format, demand.num_gpus, demand.block_size)
    sequence = sizing.sequence_bytes(demand.context, blocks=False)
    workspace = workspace_bytes(spec)
    budget = _budget(demand)
    room = _kv_room_per_gpu(model, demand, workspace)
    per_gpu = sizing.sequence_bytes_per_gpu(demand.context)
    needed = None
    if model.weights_bytes is not None:
        needed = model.weights_bytes + demand.num_gpus * (workspace + demand.concurrency * per_gpu)
    fits = None if room is None else demand.concurrency * per_gpu <= room
    prefill = demand.prefill_tokens_per_s
    if prefill is None and model.num_active_parameters:
        prefill = demand.num_gpus * demand.compute_flops / (2 * model.num_active_parameters)
    token = sizing.token_bytes()
    return Plan(
        model=model,
        demand=demand,
        kv_format=kv_format.name,
        kv_bytes_per_token=token,
        kv_bytes_per_token_by_group=tuple(
            (describe_group(group), kv_format.token_bytes(group)) for group in spec.kv_groups
        ),
        kv_bytes_per_sequence=sequence,
        kv_bytes=sequence * demand.concurrency,
        state_bytes=spec.state_bytes(demand.concurrency),
        partial_block_bytes=demand.concurrency * token * (demand.block_size - 1) / 2,
        workspace_bytes=workspace,
        kv_bytes_per_gpu=demand.concurrency * per_gpu,
        replicated=sizing.is_replicated,
        budget_bytes=budget,
        needed_bytes=needed,
        fits=fits,
        max_concurrency=None if room is None else max(0, room) // per_gpu,
        max_context=None if room is None else _max_context(sizing, demand, room),
        decode_tokens_per_s=_decode_bound(model, demand, per_gpu),
        prefill_tokens_per_s=prefill,
        break_even=tuple(
            (tier, tier.bytes_per_s / token, tier.bytes_per_s / token > prefill)
            for tier in demand.tiers
            if prefill and token
        ),
        by_format=tuple(_by_format(model, demand, room)),
        by_context=tuple(_by_context(sizing, demand, room)),
        notes=(*spec.notes, *model.notes, *_notes(model, demand)),
    )


def _budget(demand: Demand) -> int | None:
    if demand.memory_bytes is None:
        return None
    return int(demand.memory_bytes * demand.utilization) * demand.num_gpus


def _kv_room_per_gpu(model: Model, demand: Demand, workspace: int) -> int | None:
    """Bytes that a GPU has for KV; negative where not even the weights fit."""
    if demand.memory_bytes is None or model.weights_bytes is None:
        return None
    weights = -(-model.weights_bytes // demand.num_gpus)
    return int(demand.memory_bytes * demand.utilization) - weights - workspace


def _max_context(sizing: Sizing, demand: Demand, room: int) -> int:
    """Longest context that `concurrency` sequences can have at once."""

    def fits(context: int) -> bool:
        return demand.concurrency * sizing.sequence_bytes_per_gpu(context) <= room

    if not fits(1):
        return 0
    low, high = 1, 2
    while high < _MOST_TOKENS and fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    most = sizing.spec.max_position
    return low if most is None else min(low, most)


def _decode_bound(model: Model, demand: Demand, kv_per_gpu: int) -> float | None:
    """Tokens/s of all sequences together if memory bandwidth were the only limit.

    A step reads what one token reads of the weights once, and the KV of every sequence. In a
    mixture of experts a large batch reads more than that, so the true bound is lower.
    """
    if model.active_bytes is None:
        return None
    read = model.active_bytes / demand.num_gpus + demand.concurrency * kv_per_gpu
    return demand.concurrency * demand.bandwidth_bytes_per_s / read if read else None


def _by_format(model: Model, demand: Demand, room: int | None) -> list[tuple[str, int, int | None]]:
    names = ["auto", *QUANTIZED]
    rows = []
    for name in names:
        kv_format = planned_format(name, model.spec.dtype)
        sizing = Sizing(model.spec, kv_format, demand.num_gpus, demand.block_size)
        size = demand.concurrency * sizing.sequence_bytes(demand.context, blocks=False)
        most = _fitting(sizing, demand.context, room)
        rows.append((kv_format.name, size, most))
    return rows


def _by_context(
    sizing: Sizing, demand: Demand, room: int | None
) -> list[tuple[int, int, int | None]]:
    most = sizing.spec.max_position or demand.context
    contexts: Sequence[int] = [1 << power for power in range(11, 21) if 1 << power <= most]
    rows = []
    for context in sorted({*contexts, demand.context}):
        size = demand.concurrency * sizing.sequence_bytes(context, blocks=False)
        rows.append((context, size, _fitting(sizing, context, room)))
    return rows


def _fitting(sizing: Sizing, context: int, room: int | None) -> int | None:
    per_gpu = sizing.sequence_bytes_per_gpu(context)
    return None if room is None or per_gpu == 0 else max(0, room) // per_gpu


def _notes(model: Model, demand: Demand) -> list[str]:
    notes = ["workspace is an estimate; an engine measures it when it starts"]
    windowed = [g for g in model.spec.kv_groups if g.live_tokens(demand.context) < demand.context]
    if windowed:
        layers = sum(group.num_layers for group in windowed)
        notes.append(
            f"{layers} of {model.spec.num_layers} layers are counted with what their window holds;"
            f" kvist's own engine keeps all {demand.context} tokens in every layer for now"
        )
    most = model.spec.max_position
    if most is not None and demand.context > most:
        notes.append(
            f"a context of {demand.context} tokens is more than the {most} the model was made for"
        )
    if model.weights_bytes is None:
        notes.append(
            "the size of the weights is unknown, so what fits is not said; give a folder with"
            " weights, or --parameters"
        )
    return notes
