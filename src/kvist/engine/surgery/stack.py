"""A model's forward pass with its layers fused: one call for all that lie side by side.

Owns the buffers of a step and the order of the calls. Layers that are not fused run as the modules
that they are, in their place. Knows neither plans nor requests; that the layers compute what the
model's own would, `operate` beside this has seen to. Threads: the one that runs the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvist.engine.attention import StepContext
from kvist.kernels.linear import Stack
from kvist.kernels.options import PLAIN, AttentionOptions


@dataclass(frozen=True, eq=False)
class _Buffers:
    """Of a step of T tokens; views into memory that is kept for the largest step so far."""

    ids: Tensor
    residual: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    attended: Tensor
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class Widths:
    """Sizes that all fused layers share.

    Attributes
    ----------
    hidden, num_query_heads, num_kv_heads, head_dim, rotary_dim, vocab : int
    """

    hidden: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    vocab: int


@dataclass(frozen=True)
class FusedSlot:
    """A layer of the model that the stack runs.

    Attributes
    ----------
    number : int
        In the stack.
    scale : float
        On ``query . key``.
    options : AttentionOptions
        What the layer's own modules asked of attention.
    """

    number: int
    scale: float
    options: AttentionOptions = PLAIN


class FusedModel:
    """Runs embedding, layers, last norm and head.

    Parameters
    ----------
    stack : Stack
        The fused layers in their order, with the head, and with the embedding where it is packed.
    slots : sequence of FusedSlot or nn.Module
        What runs each layer of the model.
    rotary : nn.Module
        The model's own: every kind of rope scaling stays what it is.
    embedding : nn.Embedding or None
        None where the stack has it.
    widths : Widths
    dtype : torch.dtype
    """

    def __init__(
        self,
        stack: Stack,
        slots: Sequence[FusedSlot | nn.Module],
        rotary: nn.Module,
        embedding: nn.Embedding | None,
        widths: Widths,
        dtype: torch.dtype,
    ) -> None:
        self._stack = stack
        self._slots = tuple(slots)
        windows = set()
        for index, slot in enumerate(self._slots):
            if isinstance(slot, FusedSlot):
                asked = slot.options
                window = asked.window or 0
                windows.add(window)
                stack.set_attention(
                    slot.number, index, slot.scale, window, asked.softcap or 0.0, asked.sinks
                )
        self._windows = tuple(windows)
        self._rotary = rotary
        self._embedding = embedding
        self._widths = widths
        self._dtype = dtype
        self._memory: dict[str, Tensor] = {}
        self._bound: _Buffers | None = None
        self._wanted: Tensor | None = None
        self._logits: Tensor | None = None

    def forward(self, context: StepContext, rows: Tensor, num_layers: int | None = None) -> Tensor:
        """Compute logits.

        Parameters
        ----------
        context : StepContext
            The step; K and V of its tokens are written to its pool.
        rows : Tensor
            int64 [n], tokens of the step whose logits are wanted.
        num_layers : int, optional
            Only so many of the layers.

        Returns
        -------
        Tensor
            fp32 [n, V], never rounded; valid until the next call.
        """
        batch = context.batch
        buffers = self._bind(batch.input_ids.shape[1])
        buffers.ids.copy_(batch.input_ids[0])
        if self._embedding is None:
            self._stack.begin()
        else:
            buffers.residual.copy_(self._embedding(batch.input_ids[0]))
        turns = self._rotary(buffers.residual[None], batch.position_ids)
        buffers.cos.copy_(turns[0][0])
        buffers.sin.copy_(turns[1][0])
        self._layers(context, buffers, turns, self._slots[:num_layers])
        return self._finish(rows)

    def layer(self, context: StepContext, hidden: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """Run the first layer alone on hidden states [1, T, hidden]; for trying it out."""
        buffers = self._bind(hidden.shape[1])
        buffers.residual.copy_(hidden[0])
        buffers.cos.copy_(turns[0][0])
        buffers.sin.copy_(turns[1][0])
        self._layers(context, buffers, turns, self._slots[:1])
        return buffers.residual[None].clone()

    # ------------------------------------------------------------------ inside

    def _layers(
        self,
        context: StepContext,
        buffers: _Buffers,
        turns: tuple[Tensor, Tensor],
        slots: Sequence[FusedSlot | nn.Module],
    ) -> None:
        run: list[FusedSlot] = []
        for index, slot in enumerate(slots):
            if isinstance(slot, nn.Module):
                self._module(slot, context, buffers, turns)
                continue
            run.append(slot)
            if index + 1 == len(slots) or isinstance(slots[index + 1], nn.Module):
                self._run(context, buffers, index + 1 - len(run), run)
                run = []

    def _run(
        self, context: StepContext, b: _Buffers, first: int, slots: Sequence[FusedSlot]
    ) -> None:
        """Fused layers side by side, of which the first is the model's layer `first`."""
        stack, batch, kernels = self._stack, context.batch, context.kernels
        begin, last = slots[0].number, slots[-1].number
        context.calls.extend(range(first, first + len(slots)))
        if kernels.prepare is not None:
            step = kernels.prepare(
                b.query,
                b.key,
                b.value,
                batch.slots,
                context.pool,
                context.layout,
                batch.attention,
                b.attended,
                self._windows,
            )
            stack.run(begin, last, step)
            return
        stack.enter(begin)
        for index, slot in enumerate(slots, first):
            self._attend(context, b, index, slot)
            if slot.number < last:
                stack.advance(slot.number)
        stack.leave(last)

    def _attend(self, context: StepContext, b: _Buffers, layer: int, slot: FusedSlot) -> None:
        kernels, pool, layout = context.kernels, context.pool, context.layout
        batch, scale, options = context.batch.attention, slot.scale, slot.options
        kernels.write_kv(pool, layout, layer, b.key, b.value, context.batch.slots)
        # Shapes were checked when the layer was tried; its rows go where the next call reads them.
        rest = (pool, layout, layer, batch, scale, b.attended, None, options)
        if batch.num_decodes:
            kernels.decode(b.query, *rest)
        if batch.num_decodes < len(batch.query_lens):
            kernels.prefill(b.query, *rest)

    def _module(
        self,
        layer: nn.Module,
        context: StepContext,
        buffers: _Buffers,
        turns: tuple[Tensor, Tensor],
    ) -> None:
        out = layer(
            buffers.residual[None],
            attention_mask=None,
            position_ids=context.batch.position_ids,
            position_embeddings=turns,
            use_cache=False,
            kvist_step=context,
        )
        buffers.residual.copy_((out if isinstance(out, Tensor) else out[0])[0])

    def _finish(self, rows: Tensor) -> Tensor:
        wanted, logits = self._wanted, self._logits
        if wanted is None or logits is None or wanted.shape != rows.shape:
            count = rows.shape[0]
            wanted = self._wanted = rows.clone()
            logits = self._logits = self._view(
                "logits", count, (self._widths.vocab,), torch.float32
            )
            self._stack.want(wanted, logits)
        else:
            wanted.copy_(rows)
        self._stack.finish()
        return logits

    def _bind(self, tokens: int) -> _Buffers:
        bound = self._bound
        if bound is not None and bound.ids.shape[0] == tokens:
            return bound
        w = self._widths
        queries, keys = (w.num_query_heads, w.head_dim), (w.num_kv_heads, w.head_dim)
        bound = self._bound = _Buffers(
            ids=self._view("ids", tokens, (), torch.int64),
            residual=self._view("residual", tokens, (w.hidden,)),
            query=self._view("query", tokens, queries),
            key=self._view("key", tokens, keys),
            value=self._view("value", tokens, keys),
            attended=self._view("attended", tokens, queries),
            cos=self._view("cos", tokens, (w.rotary_dim,)),
            sin=self._view("sin", tokens, (w.rotary_dim,)),
        )
        b = bound
        self._stack.bind(b.ids, b.residual, b.query, b.key, b.value, b.attended, b.cos, b.sin)
        return bound

    def _view(
        self, name: str, count: int, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> Tensor:
        """`count` rows of memory that grows with the largest step and is then kept."""
        held = self._memory.get(name)
        if held is None or held.shape[0] < count:
            # Let go of the old one first: both together would be more than the step needs.
            self._memory.pop(name, None)
            held = None
            held = torch.empty((count, *shape), dtype=dtype or self._dtype)
            self._memory[name] = held
        return held[:count]
