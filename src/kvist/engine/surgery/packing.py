"""Packed weights in the place of linear layers, heads and embeddings of a model.

Owns which of them are replaced, in which form, and that the originals go. Knows nothing of layers.
"""

from __future__ import annotations

import torch
from torch import nn

from kvist.engine.surgery.modules import PackedEmbedding, PackedLinear
from kvist.engine.surgery.recognise import accessor
from kvist.kernels.linear import PackedMatrix, can_pack, pack


def _head_kind(kind: str) -> str:
    """Every token is chosen by the head: int4 would show in it most, and it has its own scale."""
    return "int8" if kind == "int4" else kind


def pack_head(
    model: nn.Module, head: nn.Linear, tied: bool, kind: str, *, alone: bool
) -> PackedMatrix:
    """Pack the head, with fp32 logits, and the embedding with it where they are one tensor."""
    dtype = head.weight.dtype
    packed = pack(head.weight, _head_kind(kind), head.bias, alone=alone)
    model.set_output_embeddings(PackedLinear(packed, torch.float32))  # type: ignore[operator]
    if tied:
        model.set_input_embeddings(PackedEmbedding(packed, dtype))  # type: ignore[operator]
    return packed


def pack_modules(part: nn.Module, kind: str, own: str, *, alone: bool) -> int:
    """Pack the linear layers of a model or of one layer; return how many.

    In fp32 they stay what they are: torch's products of fp32 are as fast.
    """
    if kind == own == "float32":
        return 0
    count = 0
    head = accessor(part, "get_output_embeddings")
    embedding = accessor(part, "get_input_embeddings")
    if type(head) is nn.Linear and can_pack(head.weight):
        shared = isinstance(embedding, nn.Embedding) and (
            embedding.weight.data_ptr() == head.weight.data_ptr()
        )
        # A subclass does more than look up, and needs its weights as they are.
        if not shared or type(embedding) is nn.Embedding:
            pack_head(part, head, shared, kind, alone=alone)
            count += 1
    for parent in list(part.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child is not head and can_pack(child.weight):
                packed = pack(child.weight, kind, child.bias, alone=alone)
                setattr(parent, name, PackedLinear(packed))
                count += 1
    return count


def move_out_of_files(model: nn.Module) -> None:
    """Give all that is left of a model memory of its own.

    Weights that were read from a file are views of all of it: one that is left keeps them all.
    """
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.data_ptr() not in moved:
                copy = nn.Parameter(parameter.detach().clone(), requires_grad=False)
                moved[parameter.data_ptr()] = copy
            setattr(module, name, moved[parameter.data_ptr()])
