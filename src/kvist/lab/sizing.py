"""KV bytes of one model in one format, in blocks and over GPUs.

Owns the split over GPUs and the estimate of the workspace. Knows no memory budget.
"""

from __future__ import annotations

from dataclasses import replace

from kvist.formats.base import KVFormat
from kvist.formats.quantized import QuantizedFormat
from kvist.spec import KVSpec, LayerGroup, LayerKind

BATCHED_TOKENS = 2048
"""Tokens of the largest step, for the estimate of the workspace."""

SAMPLED_ROWS = 256
"""Rows of that step whose logits are held, in fp32 and once more sorted."""


class Sizing:
    """KV bytes of one model in one format, split over GPUs.

    Parameters
    ----------
    spec : KVSpec
    kv_format : KVFormat or QuantizedFormat
    num_gpus, block_size : int
    """

    def __init__(
        self, spec: KVSpec, kv_format: KVFormat | QuantizedFormat, num_gpus: int, block_size: int
    ) -> None:
        self.spec = spec
        self.kv_format = kv_format
        self._num_gpus = num_gpus
        self._block_size = block_size

    def token_bytes(self) -> int:
        """Bytes a token over all layers, on one copy of the model."""
        return self.spec.token_bytes(packed=self.kv_format.token_bytes)

    def sequence_bytes(self, context: int, *, blocks: bool = True) -> int:
        """Bytes of one sequence, in whole blocks unless told otherwise."""
        return self.spec.kv_bytes(
            context,
            packed=self.kv_format.token_bytes,
            block_size=self._block_size if blocks else None,
        )

    def sequence_bytes_per_gpu(self, context: int) -> int:
        """Bytes of one sequence on each GPU, blocks counted whole, state included."""
        total = 0
        for group in self.spec.kv_groups:
            mine = self._on_one_gpu(group)
            tokens = group.live_blocks(context, self._block_size) * self._block_size
            total += tokens * self.kv_format.token_bytes(mine)
        return total + -(-self.spec.state_bytes() // self._num_gpus)

    @property
    def is_replicated(self) -> bool:
        """Whether some KV heads or latents lie on more than one GPU."""
        return self._num_gpus > 1 and any(
            group.kind is LayerKind.LATENT or group.num_kv_heads % self._num_gpus
            for group in self.spec.kv_groups
        )

    def _on_one_gpu(self, group: LayerGroup) -> LayerGroup:
        if group.kind is LayerKind.LATENT or self._num_gpus == 1:
            return group
        return replace(group, num_kv_heads=-(-group.num_kv_heads // self._num_gpus))


def workspace_bytes(spec: KVSpec) -> int:
    """Estimate what a step of `BATCHED_TOKENS` needs on each GPU beside weights and KV.

    Residual stream, its norm and the attention's output; an MLP four times as wide, gate and up;
    fp32 logits of `SAMPLED_ROWS` rows, and the same again for sampling. An engine measures it.
    """
    activations = BATCHED_TOKENS * spec.hidden_size * (4 + 2 * 4) * spec.itemsize
    return activations + 2 * SAMPLED_ROWS * spec.vocab_size * 4


def describe_group(group: LayerGroup) -> str:
    """Name a layer group in a few words: ``10 full layers``."""
    window = "" if group.window is None else f", window {group.window}"
    return f"{group.num_layers} {group.kind} layers{window}"
