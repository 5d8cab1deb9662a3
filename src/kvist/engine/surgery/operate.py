"""The operation: which layers become fused calls, and which linear layers packed ones.

A layer that looks like what a fused call computes is tried on the hidden states that the model's
own modules got when they were recorded; only if it gives what they gave, up to rounding, does it
take their place, and their weights go at once, so that there is never more than one layer twice.
What stays a module gets packed linear layers where those are faster or asked for.

Owns the decision and the report of it. Knows no requests. Threads: the one that runs the model.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvist.engine.surgery.modules import FusedLayer
from kvist.engine.surgery.packing import move_out_of_files, pack_head, pack_modules
from kvist.engine.surgery.recognise import (
    LayerParts,
    NotRecognisedError,
    Projection,
    RmsNorm,
    Skeleton,
    recognise_layer,
    recognise_skeleton,
)
from kvist.engine.surgery.recording import Recording
from kvist.engine.surgery.stack import FusedModel, FusedSlot, Widths
from kvist.kernels import linear
from kvist.kernels.linear import PackedMatrix, Stack, new_stack, pack

_UPDATE_ERROR = 0.05
"""Of what a layer adds to its input, by which a fused bf16 layer may be off (seen: up to 0.01)."""
_UPDATE_ERROR_FP32 = 1e-4
_BF16_ULP = 2.0**-8


@dataclass(frozen=True)
class SurgeryReport:
    """What was done.

    Attributes
    ----------
    num_layers, num_fused : int
    reasons : tuple of str
        Why layers were not fused, each once.
    weights : str
        Form of packed weights, as in `kvist.kernels.linear.WEIGHT_KINDS`.
    num_packed : int
        Linear layers beside those in fused layers that became packed.
    """

    num_layers: int
    num_fused: int
    reasons: tuple[str, ...]
    weights: str
    num_packed: int

    def lines(self) -> tuple[str, ...]:
        """Sentences for the start-up log and the bill."""
        layers = f"{self.num_fused} of {self.num_layers} layers fused"
        if self.num_fused:
            layers += f" ({linear.describe()})"
        if self.reasons:
            layers += f"; others run module by module: {'; '.join(self.reasons)}"
        if self.num_fused < self.num_layers and self.num_packed:
            layers += f"; {self.num_packed} linear layers packed"
        if self.weights in ("int8", "int4"):
            return (layers, f"weights rounded to {self.weights}")
        return (layers,)


def operate(
    model: nn.Module, recording: Recording, weights: str, *, alone: bool
) -> tuple[FusedModel | None, SurgeryReport]:
    """Fuse what can be fused and pack the rest.

    Parameters
    ----------
    model : nn.Module
        On a CPU, in bfloat16 or float32. Changed; its own forward is of no use where a `FusedModel`
        is returned.
    recording : Recording
        Of the unchanged model.
    weights : {"auto", "int8", "int4"}
        ``auto`` leaves every weight as it is.
    alone : bool
        Make no result depend on what else is in the batch, bit by bit.

    Returns
    -------
    FusedModel or None
        None if no layer was fused: the model runs as before, its linear layers packed.
    SurgeryReport

    Notes
    -----
    Reads every weight about twice. Beside the model, memory for one layer.
    """
    num_layers = recording.context.layout.num_layers
    own = "bfloat16" if next(model.parameters()).dtype == torch.bfloat16 else "float32"
    kind = own if weights == "auto" else weights
    with torch.inference_mode():
        try:
            skeleton = recognise_skeleton(model, num_layers)
            _check_skeleton(skeleton, recording)
        except NotRecognisedError as error:
            packed = pack_modules(model, kind, own, alone=alone)
            if packed:
                move_out_of_files(model)
            return None, SurgeryReport(num_layers, 0, (str(error),), kind, packed)
        surgeon = _Surgeon(skeleton, recording, own, kind, alone)
        slots = surgeon.layers()
        num_fused = sum(isinstance(slot, FusedSlot) for slot in slots)
        if not num_fused:
            packed = pack_modules(model, kind, own, alone=alone)
            if packed:
                move_out_of_files(model)
            return None, SurgeryReport(num_layers, 0, surgeon.reasons, kind, packed)
        rest = [slot for slot in slots if isinstance(slot, nn.Module)]
        packed = sum(pack_modules(layer, kind, own, alone=alone) for layer in rest)
        fused = surgeon.close(model, slots)
    return fused, SurgeryReport(num_layers, num_fused, surgeon.reasons, kind, packed)


def _check_skeleton(skeleton: Skeleton, recording: Recording) -> None:
    """See that embedding, rope and head do what they look like."""
    context, logits = recording.context, recording.logits
    if len(recording.inputs) != len(skeleton.layers) or logits is None:
        raise NotRecognisedError("its layers did not each run once")
    turns = recording.turns[0]
    told = [each for each in recording.turns if each is not None]
    if (
        turns is None
        or len(told) < len(recording.turns)
        or not all(torch.equal(a, b) for t in told for a, b in zip(t, turns, strict=True))
    ):
        raise NotRecognisedError("its layers are not all told the same cosines and sines")
    if "layer_type" in inspect.signature(skeleton.rotary.forward).parameters:
        raise NotRecognisedError("its layers may have ropes of several kinds")
    batch, first = context.batch, recording.inputs[0]
    again = skeleton.rotary(first, batch.position_ids)
    if not all(torch.equal(a, b) for a, b in zip(again, turns, strict=True)):
        raise NotRecognisedError("its rope depends on more than positions")
    if not torch.equal(skeleton.embedding(batch.input_ids), first):
        raise NotRecognisedError("something comes between its embedding and its first layer")
    rows = torch.cat((batch.sample_rows, batch.prompt_rows))
    normed = _normalized(skeleton.norm, recording.outputs[-1][0, rows])
    expected = nn.functional.linear(normed.float(), skeleton.head.weight.float())
    if (bias := getattr(skeleton.head, "bias", None)) is not None:
        expected += bias
    if (expected - logits).norm() > 0.02 * logits.norm():
        raise NotRecognisedError("something comes between its last layer and its logits")


def _normalized(norm: RmsNorm, x: Tensor) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.epsilon)
    return norm.weight * wide.to(x.dtype)


class _Surgeon:
    """One operation on one model whose skeleton is known."""

    def __init__(
        self, skeleton: Skeleton, recording: Recording, own: str, kind: str, alone: bool
    ) -> None:
        self._skeleton = skeleton
        self._recording = recording
        self._own, self._kind, self._alone = own, kind, alone
        self._shape: tuple[int, ...] | None = None
        self._built: list[tuple[LayerParts, list[PackedMatrix]]] = []
        self._reasons: Counter[str] = Counter()

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why layers stay modules, each reason once."""
        return tuple(
            f"{reason} ({count} layers)" if count > 1 else reason
            for reason, count in self._reasons.items()
        )

    def layers(self) -> list[FusedSlot | nn.Module]:
        """Fuse layer after layer; return what runs each."""
        slots: list[FusedSlot | nn.Module] = []
        for index, layer in enumerate(self._skeleton.layers):
            try:
                parts = recognise_layer(layer)
                if self._shape not in (None, parts.shape):
                    raise NotRecognisedError(f"its sizes differ: {parts.shape}, {self._shape}")
                matrices = self._matrices(parts, self._own)
                self._try(index, parts, matrices)
            except NotRecognisedError as error:
                self._reasons[str(error)] += 1
                slots.append(layer)
                continue
            if self._kind != self._own:
                matrices = self._matrices(parts, self._kind)
            self._shape = parts.shape
            parts = _kept(parts)
            slots.append(self._slot(index, len(self._built), parts))
            self._built.append((parts, matrices))
            norms = [parts.first, parts.second, parts.query_norm, parts.key_norm]
            # The layer's own weights go here.
            self._skeleton.layers[index] = FusedLayer(
                matrices, [norm.weight for norm in norms if norm is not None]
            )
        return slots

    def close(self, model: nn.Module, slots: Sequence[FusedSlot | nn.Module]) -> FusedModel:
        """Pack head and embedding, and put everything together."""
        skeleton = self._skeleton
        head = pack_head(model, skeleton.head, skeleton.tied, self._kind, alone=self._alone)
        stack = self._stack(self._built)
        move_out_of_files(model)
        norm = skeleton.norm.weight.detach().clone()
        stack.set_head(norm, skeleton.norm.epsilon, head.native)
        if skeleton.tied:
            stack.set_embedding(head.native)
        embedding = None if skeleton.tied else skeleton.embedding
        return self._model(stack, slots, embedding, head.outputs)

    # ------------------------------------------------------------------ inside

    def _matrices(self, parts: LayerParts, kind: str) -> list[PackedMatrix]:
        """Pack QKV, output, gate and up, down."""
        merged = [
            _joined((parts.query, parts.key, parts.value)),
            parts.output,
            _interleaved(parts.gate, parts.up),
            parts.down,
        ]
        return [pack(weight, kind, bias, alone=self._alone) for weight, bias in merged]

    def _try(self, index: int, parts: LayerParts, matrices: list[PackedMatrix]) -> None:
        """Run the layer on what its modules got, and compare with what they gave."""
        recording = self._recording
        before, after = recording.inputs[index], recording.outputs[index]
        turns = recording.turns[index]
        if turns is None:
            raise NotRecognisedError("it is not told cosines and sines")
        layout = recording.context.layout
        if (parts.num_kv_heads, parts.head_dim, parts.head_dim) != (
            layout.num_kv_heads,
            layout.key_dim,
            layout.value_dim,
        ):
            raise NotRecognisedError("its heads are not those of the KV cache")
        alone = self._model(
            self._stack([(parts, matrices)]), [self._slot(index, 0, parts)], None, 1, parts
        )
        found = alone.layer(recording.context, before, turns)
        error = float((found.float() - after.float()).norm())
        change = float((after.float() - before.float()).norm())
        size = float(after.float().norm())
        exact = self._own == "float32"
        allowed = _UPDATE_ERROR_FP32 * (change + size) if exact else 0.0
        if not exact:
            allowed = _UPDATE_ERROR * change + _BF16_ULP * size
        if not error <= allowed:
            raise NotRecognisedError(
                f"it looks alike but computes something else (off by {error / change:.2g} of what"
                " it adds)"
            )

    def _slot(self, index: int, number: int, parts: LayerParts) -> FusedSlot:
        return FusedSlot(number, parts.scale, self._recording.context.asked[index])

    def _stack(self, built: list[tuple[LayerParts, list[PackedMatrix]]]) -> Stack:
        parts = built[0][0]
        hidden, heads, kv_heads, head_dim, intermediate = parts.shape
        dtype = parts.first.weight.dtype
        stack = new_stack(
            hidden, heads, kv_heads, head_dim, intermediate, self._rotary_dim(), dtype
        )
        for layer, matrices in built:
            norm, head_norm = layer.first, layer.query_norm or layer.key_norm
            qkv, output, gate_up, down = (matrix.native for matrix in matrices)
            stack.add_layer(
                norm.weight,
                norm.epsilon,
                layer.second.weight,
                layer.second.epsilon,
                None if layer.query_norm is None else layer.query_norm.weight,
                None if layer.key_norm is None else layer.key_norm.weight,
                0.0 if head_norm is None else head_norm.epsilon,
                qkv,
                output,
                gate_up,
                down,
                layer.rotary,
            )
        return stack

    def _model(
        self,
        stack: Stack,
        slots: Sequence[FusedSlot | nn.Module],
        embedding: nn.Embedding | None,
        vocab: int,
        parts: LayerParts | None = None,
    ) -> FusedModel:
        parts = parts or self._built[0][0]
        hidden, heads, kv_heads, head_dim, _ = parts.shape
        widths = Widths(hidden, heads, kv_heads, head_dim, self._rotary_dim(), vocab)
        dtype = parts.first.weight.dtype
        return FusedModel(stack, slots, self._skeleton.rotary, embedding, widths, dtype)

    def _rotary_dim(self) -> int:
        turns = self._recording.turns[0]
        return 0 if turns is None else turns[0].shape[-1]


def _joined(projections: Sequence[Projection]) -> Projection:
    biases = [bias for _, bias in projections if bias is not None]
    return torch.cat([weight for weight, _ in projections]), torch.cat(biases) if biases else None


def _interleaved(gate: Projection, up: Projection) -> Projection:
    """Sixteen gates, the sixteen ups that go with them, and so on: a panel has both."""

    def mixed(a: Tensor, b: Tensor) -> Tensor:
        rest = a.shape[1:]
        both = torch.stack((a.reshape(-1, 16, *rest), b.reshape(-1, 16, *rest)), 1)
        return both.reshape(-1, *rest)

    bias = None if gate[1] is None or up[1] is None else mixed(gate[1], up[1])
    return mixed(gate[0], up[0]), bias


def _kept(parts: LayerParts) -> LayerParts:
    """What is needed of a layer once its matrices are packed, in memory of its own.

    See `packing.move_out_of_files`.
    """
    empty: Projection = (parts.first.weight.new_empty(0), None)
    fields = {name: getattr(parts, name) for name in parts.__dataclass_fields__}
    for name, value in fields.items():
        if isinstance(value, RmsNorm):
            fields[name] = RmsNorm(value.weight.detach().clone(), value.epsilon)
    names = ("query", "key", "value", "output", "gate", "up", "down")
    return LayerParts(**{**fields, **dict.fromkeys(names, empty)})
