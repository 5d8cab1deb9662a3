"""Layers run in one call give what they give call by call, bit by bit.

Guards: a layer left before its attention, K and V in another layer of the pool, one layer's window
or sinks for another's, and attention over buffers that are not the stack's.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvist.formats.registry import resolve_format
from kvist.kernels import linear
from kvist.kernels.batch import AttentionBatch
from kvist.kernels.dispatch import select
from kvist.kernels.linear import pack
from kvist.kernels.options import AttentionOptions
from kvist.spec import LayerGroup, LayerKind

CPU = torch.device("cpu")
NO_CPP = linear.obstacle(CPU, torch.bfloat16)

pytestmark = pytest.mark.skipif(NO_CPP is not None, reason=str(NO_CPP))

HIDDEN, HEADS, KV_HEADS, DIM, INTERMEDIATE, LAYERS = 64, 4, 2, 32, 160, 3
SCALE = DIM**-0.5
STEPS = {"decodes": ((1, 1, 1), (9, 40, 33)), "decode and prompts": ((1, 20, 70), (9, 40, 70))}


class Scene:
    """Some layers, and a step of tokens for them."""

    def __init__(self, query_lens: tuple[int, ...], seq_lens: tuple[int, ...]) -> None:
        self._generator = torch.Generator().manual_seed(3)
        self.asked = (
            AttentionOptions(window=8),
            AttentionOptions(softcap=5.0),
            AttentionOptions(sinks=torch.randn(HEADS, generator=self._generator)),
        )
        self.stack = linear.new_stack(
            HIDDEN, HEADS, KV_HEADS, DIM, INTERMEDIATE, DIM, torch.bfloat16
        )
        shapes = (
            ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
            (HIDDEN, HEADS * DIM),
            (2 * INTERMEDIATE, HIDDEN),
            (HIDDEN, INTERMEDIATE),
        )
        for number, asked in enumerate(self.asked):
            packed = [
                pack(self.drawn(*shape) / shape[1] ** 0.5, "bfloat16").native for shape in shapes
            ]
            norms = 1 + self.drawn(HIDDEN) / 8, 1 + self.drawn(HIDDEN) / 8
            self.stack.add_layer(norms[0], 1e-5, norms[1], 1e-5, None, None, 0.0, *packed, True)
            # Layers of the pool from the last to the first: not by chance the stack's own numbers.
            self.stack.set_attention(
                number,
                self.layer(number),
                SCALE,
                asked.window or 0,
                asked.softcap or 0,
                asked.sinks,
            )
        group = LayerGroup(LayerKind.FULL, tuple(range(LAYERS)), KV_HEADS, DIM, DIM)
        self.layout = resolve_format("auto", "bfloat16").layout(group, 16)
        self.kernels = select(CPU, torch.bfloat16, self.layout, HEADS, "cpp")
        tables = [[5 * r + b for b in range(5)] for r in range(len(seq_lens))]
        self.batch = AttentionBatch.build(query_lens, seq_lens, tables, 16)
        self.slots = torch.tensor(
            [
                tables[r][p // 16] * 16 + p % 16
                for r, (new, length) in enumerate(zip(query_lens, seq_lens, strict=True))
                for p in range(length - new, length)
            ]
        )
        self.pool = self.drawn(5 * len(seq_lens), self.layout.block_elements)
        tokens = len(self.slots)
        sizes = ((HIDDEN,), (HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, DIM), (HEADS, DIM))
        angles = self.drawn(tokens, DIM).float()
        self.buffers = [
            torch.zeros(tokens, dtype=torch.int64),
            *(self.drawn(tokens, *size) for size in sizes),
            angles.cos().to(torch.bfloat16),
            angles.sin().to(torch.bfloat16),
        ]

    def drawn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator).to(torch.bfloat16)

    @staticmethod
    def layer(number: int) -> int:
        return LAYERS - 1 - number

    def bind(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Give the stack buffers of its own, and return them with a pool."""
        buffers = [each.clone() for each in self.buffers]
        self.stack.bind(*buffers)
        return buffers, self.pool.clone()

    def prepare(self, buffers: list[torch.Tensor], pool: torch.Tensor, **changes: Any) -> Any:
        _, _, query, key, value, out, _, _ = buffers
        tensors = {"query": query, "key": key, "value": value, "out": out, **changes}
        assert self.kernels.prepare is not None
        return self.kernels.prepare(
            tensors["query"],
            tensors["key"],
            tensors["value"],
            self.slots,
            pool,
            self.layout,
            self.batch,
            tensors["out"],
            (0, 8),
        )


@pytest.mark.parametrize("name", STEPS)
def test_a_run_is_its_calls(name: str) -> None:
    scene = Scene(*STEPS[name])
    stack = scene.stack
    apart, pool_apart = scene.bind()
    _, residual, query, key, value, out, _, _ = apart
    stack.enter(0)
    for number, asked in enumerate(scene.asked):
        layer = scene.layer(number)
        scene.kernels.write_kv(pool_apart, scene.layout, layer, key, value, scene.slots)
        out.copy_(
            scene.kernels.attention(
                query, pool_apart, scene.layout, layer, scene.batch, SCALE, options=asked
            )
        )
        if number + 1 < LAYERS:
            stack.advance(number)
    stack.leave(LAYERS - 1)
    at_once, pool_at_once = scene.bind()
    stack.run(0, LAYERS - 1, scene.prepare(at_once, pool_at_once))
    assert bool(residual.isfinite().all())
    assert torch.equal(residual.view(torch.int16), at_once[1].view(torch.int16))
    assert torch.equal(pool_apart.view(torch.int16), pool_at_once.view(torch.int16))
    # In two pieces, too.
    pieces, pool_pieces = scene.bind()
    attention = scene.prepare(pieces, pool_pieces)
    stack.run(0, 0, attention)
    stack.run(1, LAYERS - 1, attention)
    assert torch.equal(residual.view(torch.int16), pieces[1].view(torch.int16))


def test_a_run_refuses() -> None:
    scene = Scene(*STEPS["decodes"])
    stack = scene.stack
    buffers, pool = scene.bind()
    right = scene.prepare(buffers, pool)
    for first, last in ((0, LAYERS), (-1, 0), (2, 1)):
        with pytest.raises((IndexError, ValueError), match=r"first|last"):
            stack.run(first, last, right)
    for other in ("query", "key", "value", "out"):
        index = {"query": 2, "key": 3, "value": 4, "out": 5}[other]
        with pytest.raises(ValueError, match="of bind"):
            stack.run(0, 1, scene.prepare(buffers, pool, **{other: buffers[index].clone()}))
    stack.set_attention(1, LAYERS, SCALE, 0, 0.0, None)
    with pytest.raises(IndexError, match="layer has 3"):
        stack.run(0, 1, right)
    stack.set_attention(1, 0, SCALE, 9, 0.0, None)
    with pytest.raises(ValueError, match="window is 9"):
        stack.run(0, 1, right)
    stack.set_attention(1, 0, 0.0, 0, 0.0, None)
    with pytest.raises(ValueError, match="scale"):
        stack.run(0, 1, right)
    with pytest.raises(ValueError, match="sinks"):
        stack.set_attention(1, 0, SCALE, 0, 0.0, torch.zeros(HEADS + 1))
    with pytest.raises(IndexError, match="number"):
        stack.set_attention(LAYERS, 0, SCALE, 0, 0.0, None)
    assert torch.equal(pool.view(torch.int16), scene.pool.view(torch.int16))
    bare = linear.new_stack(HIDDEN, HEADS, KV_HEADS, DIM, INTERMEDIATE, DIM, torch.bfloat16)
    with pytest.raises(ValueError, match="bind"):
        bare.run(0, 0, right)
