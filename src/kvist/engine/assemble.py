"""The one assembly of an engine: weights, kernels, pool, books, scheduler.

The only module of the engine that knows every concrete class. Sizes the pool, makes the root of all
block keys, and writes the bill.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from kvist.build import open_tiers
from kvist.config import EngineConfig
from kvist.engine.asked import describe_asked, layer_windows
from kvist.engine.attention import NAME, register
from kvist.engine.bill import MemoryUse, StartupBill
from kvist.engine.books import open_books, open_recorder
from kvist.engine.engine import Engine
from kvist.engine.event_file import EventFile
from kvist.engine.grammar_compiler import GrammarCompiler
from kvist.engine.memory import available_bytes
from kvist.engine.notes import preset_remarks, utilization_remark
from kvist.engine.profiled import ProfiledRunner
from kvist.engine.recording import Recorder
from kvist.engine.runner import ModelRunner
from kvist.engine.scheduler import PROMPT_LOGPROB_TOKENS
from kvist.engine.surgery.choice import arithmetic_of, why_modules
from kvist.engine.tiering import describe_tiers, put_tiers, reserved_bytes
from kvist.engine.weights.digest import weights_digest
from kvist.engine.weights.loading import load_model, resolve_dtype
from kvist.engine.weights.servable import check_servable
from kvist.engine.weights.source import ModelSource, resolve
from kvist.errors import ConfigError, ModelError
from kvist.formats.base import KVFormat
from kvist.formats.registry import resolve_format
from kvist.kernels.dispatch import KernelSet, held_bytes, select
from kvist.keys import RootFields, RootKey, root_key
from kvist.process import proportional_bytes
from kvist.sizes import format_size, option_size, parse_size
from kvist.spec import BlockLayout, KVSpec, LayerGroup, LayerKind
from kvist.tiers.base import Tier
from kvist.tiers.device import DevicePool

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenEngine:
    """An engine and what its users need to know of it.

    Attributes
    ----------
    engine : Engine
    runner : ModelRunner
    pool : DevicePool
    source : ModelSource
    max_model_len : int
    bill : StartupBill
    event_file : EventFile or None
    recorder : Recorder or None
    """

    engine: Engine
    runner: ModelRunner
    pool: DevicePool
    source: ModelSource
    max_model_len: int
    bill: StartupBill
    event_file: EventFile | None = None
    recorder: Recorder | None = None

    def memory(self) -> MemoryUse:
        """Look at what the process holds now. Reads ``/proc``: a few milliseconds."""
        device = self.pool.tensor.device
        residency = self.pool.residency()
        loads = self.engine.scheduler.loads
        on_cpu = device.type == "cpu"
        return MemoryUse(
            weights_bytes=self.bill.weights_bytes,
            workspace_bytes=self.bill.workspace_bytes,
            process_bytes=self.bill.process_bytes,
            kernels_bytes=held_bytes(),
            kernels_reserved_bytes=self.bill.kernels_bytes,
            kv_reserved_bytes=residency.reserved_bytes,
            kv_resident_bytes=residency.resident_bytes,
            tiers_bytes=loads.tiers.host_bytes if loads is not None else 0,
            tiers_reserved_bytes=loads.tiers.host_reserved_bytes if loads is not None else 0,
            total_bytes=proportional_bytes() if on_cpu else torch.cuda.memory_reserved(device),
        )

    def close(self, timeout_s: float = 5.0) -> None:
        """Let tiers take what is on its way to them, so long, and close them."""
        loads = self.engine.scheduler.loads
        if loads is not None:
            loads.close(timeout_s)
        if self.event_file is not None:
            self.event_file.flush()
        if self.recorder is not None:
            self.recorder.close()


def open_engine(config: EngineConfig, tiers: Sequence[Tier] | None = None) -> OpenEngine:
    """Load a model and put an engine around it.

    Parameters
    ----------
    config : EngineConfig
    tiers : sequence of Tier, optional
        Opened already, instead of those that `config` names. Owned by the engine from here on.

    Raises
    ------
    ConfigError
        If options contradict each other, the model, or the memory there is.
    ModelError
        If the model cannot be read or served.

    Notes
    -----
    The calling thread becomes the step thread. In order: read the config and refuse what cannot be
    served, load the weights, check the model code, measure workspace, size the pool.
    """
    process_bytes = proportional_bytes()
    below = open_tiers(config.tiers, config.tier_key) if tiers is None else list(tiers)
    try:
        return _open(config, below, process_bytes)
    except BaseException:
        for tier in below:
            tier.close()
        raise


def _open(config: EngineConfig, tiers: list[Tier], process_bytes: int) -> OpenEngine:
    source = resolve(config.model)
    spec = KVSpec.from_config(source.config)
    max_model_len = _max_model_len(config, spec)
    check_servable(source.config, max_model_len)
    device = _device(config.device)
    dtype_name = resolve_dtype(source.config, config.dtype, device.type)
    dtype: torch.dtype = getattr(torch, dtype_name)
    kv_format = resolve_format(config.kv_cache_dtype, dtype_name)
    if not kv_format.is_exact_for(dtype_name) or kv_format.dtype != dtype_name:
        raise ConfigError(
            f"--kv-cache-dtype={config.kv_cache_dtype} with compute dtype {dtype_name}: attention"
            " reads K and V in the compute dtype for now; use auto"
        )
    group = _serving_group(spec)
    layout = kv_format.layout(group, config.block_size)
    kernels = _kernels(config, device, dtype, layout, spec.num_query_heads)
    digest = weights_digest(source.path)

    register()
    model = load_model(source, dtype_name, str(device), NAME)
    runner = ModelRunner(
        model,
        layout,
        kernels,
        max_model_len,
        windows=layer_windows(spec),
        poison=config.poison_fresh_blocks,
        batch_invariant=config.batch_invariant,
    )
    recording = runner.check_model()
    reason = why_modules(config.kernels, config.weights, device, dtype)
    layers = (
        (f"no layers fused: {reason}",)
        if reason is not None
        else runner.fuse(recording, config.weights).lines()
    )
    workspace = runner.measure_workspace(
        config.max_num_batched_tokens, config.max_num_seqs + PROMPT_LOGPROB_TOKENS
    )
    below = reserved_bytes(config, layout)
    beside = workspace + (below if device.type == "cpu" else 0)
    num_blocks = _num_blocks(config, layout, max_model_len, device, beside)
    pool = DevicePool(layout, num_blocks, dtype, device)
    runner.attach(pool)

    arithmetic = arithmetic_of(config.batch_invariant, config.weights)
    windows = layer_windows(spec)
    root = _root(digest, dtype_name, kv_format, source.config, windows, layout, arithmetic)
    compile_grammar = GrammarCompiler(source.path, runner.vocab_size).compile
    books = open_books(config, num_blocks, max_model_len)
    loads = put_tiers(
        tiers,
        config,
        books.cache,
        pool,
        layout,
        books.events,
        root=root,
        model=source.name,
        kv_format=kv_format.name,
    )
    profiled = ProfiledRunner(runner, config.profile_steps) if config.profile_steps else runner
    names = (source.name, kv_format.name)
    recorder = open_recorder(config, num_blocks, max_model_len, names, layout.block_bytes)
    engine = books.open_engine(config, root, profiled, compile_grammar, loads, recorder)
    bill = StartupBill(
        model=source.name,
        origin=source.origin,
        device=str(device),
        dtype=dtype_name,
        kv_format=kv_format.name,
        process_bytes=process_bytes if device.type == "cpu" else 0,
        weights_bytes=_weights_bytes(model),
        workspace_bytes=workspace,
        kernels_bytes=held_bytes(),
        kv_pool_bytes=pool.nbytes,
        left_bytes=available_bytes(device) - beside - _not_yet_resident(pool),
        num_blocks=num_blocks,
        block_size=layout.block_size,
        kv_token_bytes=layout.block_bytes // layout.block_size,
        max_model_len=max_model_len,
        kv_allocation=config.kv_allocation.value,
        prefix_caching=config.enable_prefix_caching,
        kernels=kernels.report,
        tiers=describe_tiers(tiers, config),
        notes=(
            *source.notes,
            *layers,
            *describe_asked(recording.context.asked, kernels, max_model_len),
            *preset_remarks(config),
            *_device_remarks(config, device),
            *(note for tier in tiers for note in getattr(tier, "notes", ())),
        ),
    )
    return OpenEngine(engine, runner, pool, source, max_model_len, bill, books.event_file, recorder)


def _max_model_len(config: EngineConfig, spec: KVSpec) -> int:
    most = spec.max_position
    wanted = config.max_model_len
    if wanted is None:
        if most is None:
            raise ConfigError("the model's config names no context length; give --max-model-len")
        return most
    if most is not None and wanted > most:
        raise ConfigError(
            f"--max-model-len={wanted} is more than the {most} positions that the model knows;"
            f" use {most} or less"
        )
    return wanted


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device={name!r} is no device: use auto, cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device={name}: torch {torch.__version__} sees no GPU here; use cpu")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device={name}: only cpu and cuda are supported")
    return device


def _kernels(
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    layout: BlockLayout,
    num_query_heads: int,
) -> KernelSet:
    """Choose kernels; for ``--batch-invariant`` those that compute each sequence by itself."""
    prefer = None if config.kernels == "auto" else config.kernels
    if not config.batch_invariant:
        return select(device, dtype, layout, num_query_heads, prefer)
    if prefer == "torch":
        raise ConfigError(
            "--kernels=torch computes sequences together, and --batch-invariant cannot have that;"
            " choose cpp or reference"
        )
    kernels = select(device, dtype, layout, num_query_heads, prefer)
    if ("decode", "torch") in ((operation, backend) for operation, backend, _ in kernels.report):
        kernels = select(device, dtype, layout, num_query_heads, "reference")
    return kernels


def _serving_group(spec: KVSpec) -> LayerGroup:
    """Return one full-attention group of all layers.

    `check_servable` has refused everything but full attention and windows. Layers with a window
    keep everything for now, and attention leaves out what lies before it.
    """
    first = spec.groups[0]
    shape = (first.num_kv_heads, first.key_dim, first.value_dim)
    if any((g.num_kv_heads, g.key_dim, g.value_dim) != shape for g in spec.groups):
        raise ModelError(
            f"{spec.model_type}: layers of several KV shapes; all must have one shape for now"
        )
    return dataclasses.replace(
        first, kind=LayerKind.FULL, layers=tuple(range(spec.num_layers)), window=None
    )


def _num_blocks(
    config: EngineConfig,
    layout: BlockLayout,
    max_model_len: int,
    device: torch.device,
    workspace_bytes: int,
) -> int:
    """Size the pool, and refuse one in which a single request of `max_model_len` does not fit."""
    blocks_a_request = -(-max_model_len // layout.block_size)
    free = available_bytes(device) - workspace_bytes
    budget = config.kv_cache_memory_bytes
    if budget is not None:
        source = "--kv-cache-memory-bytes"
        if budget > free:
            raise ConfigError(
                f"--kv-cache-memory-bytes={format_size(budget)} is more than the"
                f" {format_size(max(0, free))} left on {device} after weights and workspace"
                f" ({format_size(workspace_bytes)}); lower it"
            )
    elif device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        budget = int(total * config.gpu_memory_utilization) - (total - free)
        source = f"--gpu-memory-utilization={config.gpu_memory_utilization}"
    else:
        # Half: the other half is for page cache, tiers and everyone else on the machine.
        most = config.max_num_seqs * blocks_a_request * layout.block_bytes
        budget = min(free // 2, most)
        source = "half of the memory left after weights and workspace"
    num_blocks = max(0, budget) // layout.block_bytes
    if num_blocks < blocks_a_request:
        need, fits = blocks_a_request * layout.block_bytes, num_blocks * layout.block_size
        raised = option_size(need)
        ways = [
            *([f"raise --kv-cache-memory-bytes to {raised}"] if parse_size(raised) <= free else []),
            *([f"lower --max-model-len to {fits}"] if fits else []),
        ] or ["free memory there, or choose a smaller model, --dtype or --max-num-batched-tokens"]
        raise ConfigError(
            f"max_model_len={max_model_len} needs {blocks_a_request} blocks ({format_size(need)}),"
            f" the pool has {num_blocks} ({format_size(max(0, budget))}, {source};"
            f" block_size={layout.block_size}). {format_size(max(0, free))} are left on {device}"
            f" after weights and workspace: {' or '.join(ways)}"
        )
    return num_blocks


def _root(
    digest: bytes,
    dtype_name: str,
    kv_format: KVFormat,
    config: dict[str, object],
    windows: tuple[int | None, ...],
    layout: BlockLayout,
    arithmetic: str,
) -> RootKey:
    rope = {
        k: v for k, v in config.items() if "rope" in k or k in ("rotary_pct", "rotary_emb_base")
    }
    return root_key(
        RootFields(
            weights_digest=digest,
            compute_dtype=dtype_name,
            formats=(kv_format.name,) * layout.num_layers,
            rope=json.dumps(rope, sort_keys=True),
            windows=json.dumps(windows) if any(windows) else "",
            block_size=layout.block_size,
            packing_id=layout.packing_id,
            layers=f"0-{layout.num_layers - 1}",
            heads=f"0-{layout.num_kv_heads - 1}",
            arithmetic=arithmetic,
        )
    )


def _device_remarks(config: EngineConfig, device: torch.device) -> tuple[str, ...]:
    """What is unwise on this device."""
    if device.type != "cuda" or config.kv_cache_memory_bytes is not None:
        return ()
    remark = utilization_remark(config.gpu_memory_utilization)
    if remark is None:
        return ()
    logger.warning("%s", remark)
    return (remark,)


def _weights_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers; tied ones once."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in (*model.parameters(), *model.buffers())
    }
    return sum(storages.values())


def _not_yet_resident(pool: DevicePool) -> int:
    residency = pool.residency()
    return residency.reserved_bytes - residency.resident_bytes
