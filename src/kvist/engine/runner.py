"""Do: one forward pass of a transformers model over our paged memory.

Owns the model and the pool it writes to. Never touches the books: it takes a frozen plan and
returns a frozen result. Knows no requests beyond their ids, and no text.

Threads: one thread makes every call, since all torch work stays on it.
"""

from __future__ import annotations

import copy
import inspect
from array import array
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from kvist.engine.asked import check_asked
from kvist.engine.attention import NAME, StepContext, register
from kvist.engine.batch import ForwardBatch, build_batch
from kvist.engine.invariant import make_invariant
from kvist.engine.layers import only_first_layers
from kvist.engine.logprobs import describe
from kvist.engine.memory import PeakMeter
from kvist.engine.sampler import NOT_FINITE, sample
from kvist.engine.sampling import SamplingParams
from kvist.engine.sequence import TokenLogprobs
from kvist.engine.step import SampleRow, Scheduled, StepPlan, StepResult
from kvist.engine.surgery.modules import keep_logits_wide
from kvist.engine.surgery.operate import SurgeryReport, operate
from kvist.engine.surgery.recording import Recording, record_layers
from kvist.engine.surgery.stack import FusedModel
from kvist.errors import IntegrityError, ModelError
from kvist.kernels.dispatch import KernelSet
from kvist.spec import BlockLayout
from kvist.tiers.device import DevicePool

_GREEDY = SamplingParams(temperature=0.0)


class ModelRunner:
    """Runs plans with a causal language model of transformers.

    Parameters
    ----------
    model : nn.Module
        In eval mode, on its device. It gets a config of its own, so that the choice of attention
        does not leak into other models that share the object.
    layout : BlockLayout
        Of the model's only layer group, all layers in it.
    kernels : KernelSet
    max_model_len : int
    windows : sequence of int or None
        [L], of each layer by the config; those that cut nothing included.
    poison : bool
        Fill fresh blocks with NaN. For tests.
    batch_invariant : bool
        See `engine.invariant`.

    Notes
    -----
    Call `check_model`, then, where packed weights can be used, `fuse`, then `attach` a pool, then
    `run`.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: BlockLayout,
        kernels: KernelSet,
        max_model_len: int,
        *,
        windows: Sequence[int | None],
        poison: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        register()
        use_own_config(model)
        head = _head_of(model)
        # "sdpa" promises the bits of transformers, whose logits are rounded.
        if head is not None and all(backend != "sdpa" for _, backend, _ in kernels.report):
            keep_logits_wide(head)
        if batch_invariant:
            make_invariant(model)
        self.model = model
        self.layout = layout
        self.kernels = kernels
        self.max_model_len = max_model_len
        self._windows = tuple(windows)
        self.vocab_size = int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]
        self.num_forward_tokens = 0
        self._poison = poison
        self._pool: DevicePool | None = None
        first = next(model.parameters())
        self._device, self._dtype = first.device, first.dtype
        self._batch_invariant = batch_invariant
        self._fused: FusedModel | None = None
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def attach(self, pool: DevicePool) -> None:
        """Use `pool` from here on."""
        self._pool = pool

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a plan: copies first, one forward pass, then a token for each that is due."""
        pool = self._pool
        if pool is None:
            raise IntegrityError("a plan came before the pool")
        with torch.inference_mode():
            if self._poison:
                pool.poison(plan.fresh)
            if plan.copies:
                self.kernels.copy_blocks(
                    pool.tensor,
                    torch.tensor([c.source for c in plan.copies], device=self._device),
                    torch.tensor([c.target for c in plan.copies], device=self._device),
                )
            batch = self._batch(plan)
            logits = self._forward(self._context(batch, pool.tensor))
            self.num_forward_tokens += plan.num_tokens
            return _result(batch, logits)

    def check_model(self) -> Recording:
        """Run a tiny batch and see that every layer attended exactly once, through us.

        Returns
        -------
        Recording
            What the layers made of it, for `fuse`.

        Raises
        ------
        ModelError
            If a layer never came (its model code drops the step on the way down), came twice,
            asked attention for something we do not know, or for something else than the config
            says.
        """
        plan = _plan([(3, 3), (1, 1)], self.layout.block_size, num_blocks=2)
        num_layers = self.layout.num_layers
        with torch.inference_mode():
            pool = self._scratch(2)
            context = self._context(self._batch(plan), pool)
            recording = Recording(context)
            with record_layers(self.model, num_layers, recording):
                logits = recording.logits = self._forward(context)
        calls = Counter(context.calls)
        expected = Counter(range(self.layout.num_layers))
        if calls != expected:
            missing = sorted(expected - calls)
            raise ModelError(
                f"{type(self.model).__name__}: our attention ran {sum(calls.values())} times over"
                f" {len(calls)} layers, expected once in each of {self.layout.num_layers}"
                f"{f'; layers without it: {missing[:8]}' if missing else ''}. Its model code does"
                " not follow the attention interface of transformers, so it cannot be served"
            )
        config = self.model.config.get_text_config()  # type: ignore[union-attr, operator]
        softcap = getattr(config, "attn_logit_softcapping", None)
        name = type(self.model).__name__
        check_asked(name, context.asked, self._windows, softcap, self.max_model_len)
        if not bool(torch.isfinite(logits).all()):
            raise ModelError(
                f"{type(self.model).__name__} in {self._dtype} gives logits that are not finite for"
                " a prompt of 3 tokens; the weights are damaged, or need another --dtype"
            )
        return recording

    def fuse(self, recording: Recording, weights: str) -> SurgeryReport:
        """Replace layers by fused calls, and linear layers by packed ones; see `engine.surgery`.

        Parameters
        ----------
        recording : Recording
            From `check_model`.
        weights : {"auto", "int8", "int4"}
        """
        self._fused, report = operate(self.model, recording, weights, alone=self._batch_invariant)
        return report

    def measure_workspace(self, num_tokens: int, num_samples: int) -> int:
        """Run the largest step there can be, and return the bytes it needed beside weights and KV.

        The step is `num_tokens` tokens at the end of the longest contexts, with `num_samples` rows
        of logits. A layer frees what it used before the next one runs, so the first ones up to one
        that sees the whole context need as much as all; and all contexts lie in the same few
        blocks.
        """
        most = self.max_model_len
        length = min(num_tokens, most)
        runs = [(length, most)] * (num_tokens // length)
        if num_tokens % length:
            runs.append((num_tokens % length, most))
        num_blocks = 64
        seen = [min(window or most, most) for window in self._windows]
        keep = 1 + seen.index(max(seen))
        plan = _plan(runs, self.layout.block_size, num_blocks)
        with torch.inference_mode():
            pool = self._scratch(num_blocks)
            pool.zero_()
            shortened = (
                only_first_layers(self.model, self.layout.num_layers, keep)
                if self._fused is None
                else nullcontext()
            )
            with shortened, PeakMeter(self._device) as meter:
                batch = self._batch(plan)
                context = self._context(batch, pool)
                rows = torch.arange(min(num_samples, num_tokens), device=self._device)
                logits = self._forward(context, rows, num_layers=keep)
                sample(logits, [SampleRow(_GREEDY, 0, 0)] * len(rows))
        return meter.peak_bytes

    # ------------------------------------------------------------------ inside

    def _batch(self, plan: StepPlan) -> ForwardBatch:
        return build_batch(
            plan, self.layout.block_size, self._device, one_by_one=self._batch_invariant
        )

    def _context(self, batch: ForwardBatch, pool: Tensor) -> StepContext:
        return StepContext(batch, pool, self.layout, self.kernels, max_context=self.max_model_len)

    def _forward(
        self, context: StepContext, rows: Tensor | None = None, num_layers: int | None = None
    ) -> Tensor:
        """Run the model, or what is fused of it.

        Returns float32 [n, V]: a row a sample, then those of the prompts.
        """
        batch = context.batch
        if rows is None:
            rows = batch.sample_rows
            if batch.prompts:
                rows = torch.cat((rows, batch.prompt_rows))
        if self._fused is not None:
            return self._fused.forward(context, rows, num_layers)
        extras = {"logits_to_keep": rows} if self._keeps_logits else {}
        output = self.model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=None,
            use_cache=False,
            kvist_step=context,
            **extras,
        )
        logits: Tensor = output.logits[0]
        return (logits if self._keeps_logits else logits[rows]).float()

    def _scratch(self, num_blocks: int) -> Tensor:
        shape = (num_blocks, self.layout.block_elements)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)


def use_own_config(model: nn.Module) -> None:
    """Give a model a copy of its config with our attention chosen in it.

    ``set_attn_implementation`` writes into the config object, which other models may share; theirs
    must not change under them.
    """
    shared = model.config
    own = copy.deepcopy(shared)
    own._attn_implementation = NAME  # type: ignore[union-attr]
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            module.config = own


def _head_of(model: nn.Module) -> nn.Linear | None:
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    return head if type(head) is nn.Linear else None


def _result(batch: ForwardBatch, logits: Tensor) -> StepResult:
    """Choose tokens. The rows of `logits` are those of the samples, then those of the prompts."""
    count = len(batch.samples)
    tokens: dict[str, int] = {}
    failed: dict[str, str] = {}
    logprobs: dict[str, TokenLogprobs] = {}
    prompt_logprobs = _prompt_logprobs(batch, logits[count:], failed) if batch.prompts else {}
    if count:
        sampled = sample(logits[:count], [row for _, row in batch.samples])
        for i, (request_id, _) in enumerate(batch.samples):
            if i in sampled.faults:
                failed[request_id] = sampled.faults[i]
            elif request_id not in failed:
                tokens[request_id] = sampled.token_ids[i]
                if i in sampled.logprobs:
                    logprobs[request_id] = sampled.logprobs[i]
    return StepResult(tokens, failed, logprobs, prompt_logprobs)


def _prompt_logprobs(
    batch: ForwardBatch, logits: Tensor, failed: dict[str, str]
) -> dict[str, tuple[TokenLogprobs, ...]]:
    found: dict[str, tuple[TokenLogprobs, ...]] = {}
    start = 0
    for request_id, rows in batch.prompts:
        end = start + len(rows.targets)
        part = logits[start:end]
        start = end
        if not bool(torch.isfinite(part.amax())):
            failed[request_id] = NOT_FINITE
        else:
            counts = [rows.num_top] * len(rows.targets)
            found[request_id] = tuple(describe(part, rows.targets, counts))
    return found


def _plan(runs: list[tuple[int, int]], block_size: int, num_blocks: int) -> StepPlan:
    """Make a plan of (new tokens, context) runs whose contexts share the same few blocks."""
    scheduled = []
    for index, (length, context) in enumerate(runs):
        blocks = -(-context // block_size)
        table = array("i", [(index + i) % num_blocks for i in range(blocks)])
        row = SampleRow(_GREEDY, 0, context)
        tokens = tuple(range(1, length + 1)) if length < 8 else (1,) * length
        scheduled.append(Scheduled(f"check-{index}", tokens, context - length, table, row))
    scheduled.sort(key=lambda s: len(s.token_ids) > 1)
    return StepPlan(0, tuple(scheduled))
