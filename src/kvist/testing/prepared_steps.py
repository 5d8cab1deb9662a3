"""The part of the kernels' contract that is about steps prepared once for all layers.

Owns those checks, and what all of the contract compares with. See `kvist.testing.kernels`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvist.kernels.batch import AttentionBatch
from kvist.kernels.dispatch import KernelSet
from kvist.kernels.options import AttentionOptions
from kvist.testing.kernel_cases import LAYER, KernelCase, Scene

TOLERANCE = {
    # fp32 differs by the order of sums only; 16 bit rounds the result, and torch's prefill its
    # softmax weights too.
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-2),
    torch.float16: (2e-3, 2e-3),
}


def same_bytes(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors hold the same bytes; NaN equals itself."""
    whole = torch.int32 if left.dtype == torch.float32 else torch.int16
    return torch.equal(left.contiguous().view(whole), right.contiguous().view(whole))


class PreparedStepContract:
    """A prepared step does what a write and attention do, layer by layer."""

    device = torch.device("cpu")

    def select(self, case: KernelCase) -> KernelSet:
        """Return the kernels under test for the pool of a case."""
        raise NotImplementedError

    @pytest.mark.parametrize("options", ["plain", "window and softcap", "sinks"])
    @pytest.mark.parametrize(
        "queries", [(1,) * 7, (1, 1, 1, 5, 16, 9, 40)], ids=["decodes", "decodes and prompts"]
    )
    @pytest.mark.parametrize("dtype", TOLERANCE)
    def test_a_prepared_step_is_a_write_and_attention(
        self, dtype: torch.dtype, queries: tuple[int, ...], options: str
    ) -> None:
        """Bit by bit, pool and answer."""
        case = KernelCase(queries, (1, 16, 17, 130, 512, 700, 1300), dtype=dtype)
        scene = Scene(case, self.device)
        asked = {
            "plain": AttentionOptions(),
            "window and softcap": AttentionOptions(window=100, softcap=20.0),
            "sinks": AttentionOptions(sinks=torch.randn(scene.query.shape[1], device=self.device)),
        }[options]
        slots = torch.cat([scene.slots(r)[-n:] for r, n in enumerate(queries)])
        key = torch.randn(len(slots), *scene.keys[0].shape[1:], device=self.device).to(dtype)
        value = torch.randn(len(slots), *scene.values[0].shape[1:], device=self.device).to(dtype)
        self.compare_prepared(scene, scene.batch, key, value, slots, asked)

    @pytest.mark.parametrize("dtype", TOLERANCE)
    def test_decodes_that_read_each_others_tokens(self, dtype: torch.dtype) -> None:
        """The tokens of one prompt, each a decode of its own, as a batch-invariant engine asks."""
        length = 150
        scene = Scene(KernelCase((length,), (length,), dtype=dtype), self.device)
        table = scene.batch.block_tables[:1].expand(length, -1)
        batch = AttentionBatch.build(
            [1] * length,
            list(range(1, length + 1)),
            table.tolist(),
            scene.case.block_size,
            self.device,
        )
        key, value = scene.keys[0], scene.values[0]
        self.compare_prepared(scene, batch, key, value, scene.slots(0), AttentionOptions())

    def compare_prepared(
        self,
        scene: Scene,
        batch: AttentionBatch,
        key: Tensor,
        value: Tensor,
        slots: Tensor,
        asked: AttentionOptions,
    ) -> None:
        """See that a prepared step does in two layers what a write and attention do."""
        case, query = scene.case, scene.query
        kernels, layout = self.select(case), scene.case.layout
        if kernels.prepare is None:
            pytest.skip("these kernels have no such operation")
        before, after = scene.pool.clone(), scene.pool.clone()
        out = torch.zeros_like(query)
        window = asked.window or 0
        step = kernels.prepare(
            query, key, value, slots, after, layout, batch, out, (window, window + 7)
        )
        for layer in (LAYER, 0):
            kernels.write_kv(before, layout, layer, key, value, slots)
            expected = kernels.attention(
                query, before, layout, layer, batch, case.scale, options=asked
            )
            step.attend(layer, case.scale, window, asked.softcap or 0.0, asked.sinks)
            assert isinstance(expected, Tensor)
            assert same_bytes(expected, out)
        assert same_bytes(before, after)

    def test_a_prepared_step_refuses(self) -> None:
        """Slots that are not where contexts end, windows and layers that nobody named."""
        case = KernelCase((1,) * 3, (16, 17, 130))
        scene = Scene(case, self.device)
        kernels = self.select(case)
        if kernels.prepare is None:
            pytest.skip("these kernels have no such operation")
        slots = torch.cat([scene.slots(r)[-1:] for r in range(3)])
        key, value = (each[0][-3:] for each in (scene.keys, scene.values))
        out = torch.zeros_like(scene.query)
        rest = (scene.pool, case.layout, scene.batch, out)
        with pytest.raises(ValueError, match="where its context ends"):
            kernels.prepare(scene.query, key, value, slots.flip(0), *rest)
        with pytest.raises(ValueError, match="3 tokens, and slots 2"):
            kernels.prepare(scene.query, key[1:], value[1:], slots[1:], *rest)
        step = kernels.prepare(scene.query, key, value, slots, *rest)
        with pytest.raises(ValueError, match="window"):
            step.attend(0, case.scale, 5, 0.0, None)
        with pytest.raises(IndexError, match="layer"):
            step.attend(case.layout.num_layers, case.scale, 0, 0.0, None)
        with pytest.raises(ValueError, match="sinks"):
            step.attend(0, case.scale, 0, 0.0, torch.zeros(scene.query.shape[1] + 1))
