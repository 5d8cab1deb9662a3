"""The cases of the kernel contract: shapes, and a pool filled accordingly.

Owns what a step looks like in the tests: named edges, shapes drawn from a seed, and a pool whose
blocks are shuffled and whose unwritten slots hold NaN. Knows no backend under test.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvist.kernels import reference
from kvist.kernels.batch import PIECE_TOKENS, AttentionBatch
from kvist.kernels.dispatch import KernelSet
from kvist.kernels.options import AttentionOptions
from kvist.spec import LAYER_PACKING, PAIR_PACKING, TILE_SLOTS, BlockLayout

LAYERS, LAYER = 3, 1


@dataclass(frozen=True)
class KernelCase:
    """Shapes of one step; decodes (one query token) come first."""

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    num_kv_heads: int = 2
    group: int = 3
    key_dim: int = 64
    value_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    seed: int = 0
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def layout(self) -> BlockLayout:
        """Where K and V lie in the pool of this case: in pairs where a 16-bit block can be."""
        paired = self.dtype.itemsize == 2 and not (self.block_size % TILE_SLOTS or self.key_dim % 2)
        return BlockLayout(
            num_layers=LAYERS,
            num_kv_heads=self.num_kv_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            block_size=self.block_size,
            itemsize=self.dtype.itemsize,
            packing_id=PAIR_PACKING if paired else LAYER_PACKING,
        )

    @property
    def num_query_heads(self) -> int:
        """Q, query heads."""
        return self.num_kv_heads * self.group

    @property
    def scale(self) -> float:
        """Factor on the scores; not a power of two."""
        return float(self.key_dim**-0.5)


def generated_case(seed: int) -> KernelCase:
    """Return a case drawn from the seed: any head size, ratio, block size, dtype and mix."""
    draw = random.Random(seed)
    block_size = draw.choice((8, 16, 32))
    key_dim = draw.choice((16, 32, 64, 80, 96, 128, 256))
    heads, group = draw.choice(((3, 1), (1, 3), (2, 3), (1, 8), (4, 1)))
    lengths = (1, 2, block_size - 1, block_size, block_size + 1, 5 * block_size, 77, 300)
    long = (PIECE_TOKENS - 1, PIECE_TOKENS, PIECE_TOKENS + 1, 2 * PIECE_TOKENS + 13)
    decodes = [draw.choice(lengths + long) for _ in range(draw.randrange(4))]
    prompts = [draw.choice(lengths[1:]) for _ in range(draw.randrange(3))] if decodes else [33]
    cached = [draw.choice((0, 0, block_size, 3 * block_size, 45)) for _ in prompts]
    return KernelCase(
        query_lens=(*(1 for _ in decodes), *prompts),
        context_lens=(*decodes, *(p + c for p, c in zip(prompts, cached, strict=True))),
        num_kv_heads=heads,
        group=group,
        key_dim=key_dim,
        value_dim=draw.choice((key_dim, key_dim, 48)),
        block_size=block_size,
        dtype=draw.choice((torch.float32, torch.bfloat16, torch.float16)),
        seed=seed,
        window=draw.choice((None, None, 1, 20, 130)),
        softcap=draw.choice((None, None, 3.0)),
        sinks=draw.random() < 0.3,
    )


EDGES = {
    "one token": KernelCase((1,), (1,)),
    "one full block": KernelCase((1, 16), (16, 16)),
    "exactly one piece and one more token": KernelCase((1, 1), (PIECE_TOKENS, PIECE_TOKENS + 1)),
    "many pieces": KernelCase((1, 1), (5 * PIECE_TOKENS + 3, 20), dtype=torch.bfloat16),
    "pieces that begin inside a block": KernelCase((1,), (1100,), block_size=24),
    "blocks larger than a tile": KernelCase((1, 9), (300, 200), block_size=128),
    "one slot a block": KernelCase((1, 3), (40, 9), block_size=1),
    "head sizes that fill no vector": KernelCase(
        (1, 1, 7), (33, 530, 20), key_dim=20, value_dim=12, dtype=torch.bfloat16
    ),
    "head sizes that fill no vector, fp16": KernelCase(
        (1, 7), (33, 20), key_dim=36, value_dim=36, dtype=torch.float16
    ),
    "one KV head for eight": KernelCase((1, 4), (70, 44), num_kv_heads=1, group=8, key_dim=256),
    "a prompt longer than a tile of queries, over a cached prefix": KernelCase(
        (520,), (900,), num_kv_heads=1, group=2, key_dim=32, value_dim=32
    ),
    "the same with another size of V": KernelCase(
        (520,), (900,), num_kv_heads=1, group=2, key_dim=32, value_dim=16
    ),
}
HEADS = {
    f"heads of {key_dim} and {value_dim}": KernelCase(
        (1, 1, 19), (45, 18, 50), heads, group, key_dim, value_dim, dtype=torch.bfloat16
    )
    for key_dim, value_dim, heads, group in (
        (32, 32, 1, 9),
        (80, 80, 2, 1),
        (96, 96, 1, 5),
        (112, 112, 2, 4),
        (128, 128, 1, 7),
        (160, 160, 1, 2),
        (192, 128, 1, 17),
        (256, 256, 2, 2),
        (512, 512, 1, 6),
        (6, 10, 2, 3),
    )
}
OPTIONS = {
    "a window shorter than a block": KernelCase((1, 9), (40, 60), window=5, dtype=torch.bfloat16),
    "a window of more than a step": KernelCase(
        (1, 600), (1100, 900), 1, 2, window=300, dtype=torch.bfloat16
    ),
    "a window in fp32": KernelCase((1, 70), (700, 300), window=33),
    "a window of the query alone": KernelCase((1, 20), (17, 20), window=1, dtype=torch.bfloat16),
    "softcap": KernelCase((1, 40), (600, 300), softcap=2.0, dtype=torch.bfloat16),
    "softcap in fp32": KernelCase((1, 40), (600, 300), softcap=2.0),
    "sinks": KernelCase((1, 40), (600, 300), sinks=True, dtype=torch.bfloat16),
    "sinks in fp32, with a window": KernelCase((1, 40), (600, 300), sinks=True, window=100),
    "all of them in fp16": KernelCase(
        (1, 40), (600, 300), sinks=True, window=100, softcap=5.0, dtype=torch.float16
    ),
}
HOLES = {
    "bf16": KernelCase((1, 1, 30), (600, 40, 300), dtype=torch.bfloat16),
    "fp32": KernelCase((1, 1, 30), (600, 40, 300)),
    "fp16, a block larger than a tile": KernelCase(
        (1, 30), (600, 300), block_size=48, dtype=torch.float16
    ),
    "slots that fill no tile": KernelCase((1, 30), (600, 300), block_size=24),
}
CASES = {
    **EDGES,
    **HEADS,
    **OPTIONS,
    **{f"seed {seed}": generated_case(seed) for seed in range(24)},
}


class Scene:
    """A case brought to life: dense K and V of every sequence, and a pool that holds them.

    Physical blocks are shuffled, and every slot that no token wrote holds NaN.

    Parameters
    ----------
    case : KernelCase
        The shapes.
    device : torch.device
        Where the pool is.
    unwritten : float
        What unwritten slots hold.
    placement : int
        Seed of the shuffle; other seeds put the same tokens elsewhere.
    """

    def __init__(
        self,
        case: KernelCase,
        device: torch.device,
        unwritten: float = float("nan"),
        placement: int = 0,
    ) -> None:
        draw = torch.Generator().manual_seed(case.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw).to(device, case.dtype)

        heads = case.num_kv_heads
        self.case, self.device = case, device
        self.keys = [normal(context, heads, case.key_dim) for context in case.context_lens]
        self.values = [normal(context, heads, case.value_dim) for context in case.context_lens]
        self.query = normal(sum(case.query_lens), case.num_query_heads, case.key_dim)
        sinks = torch.randn(case.num_query_heads, generator=draw).to(device)
        self.options = AttentionOptions(case.window, case.softcap, sinks if case.sinks else None)
        needs = [-(-context // case.block_size) for context in case.context_lens]
        num_blocks = sum(needs) + 3
        ids = list(range(num_blocks))
        random.Random(placement).shuffle(ids)
        self.tables = [[ids.pop() for _ in range(need)] for need in needs]
        self.pool = torch.full(
            (num_blocks, case.layout.block_elements), unwritten, dtype=case.dtype, device=device
        )
        for sequence, (key, value) in enumerate(zip(self.keys, self.values, strict=True)):
            reference.write_kv(self.pool, case.layout, LAYER, key, value, self.slots(sequence))

    def slots(self, sequence: int) -> Tensor:
        """int64 [context], where each token of a sequence lies."""
        size, table = self.case.block_size, self.tables[sequence]
        context = self.case.context_lens[sequence]
        return torch.tensor(
            [table[p // size] * size + p % size for p in range(context)], device=self.device
        )

    @cached_property
    def batch(self) -> AttentionBatch:
        """All sequences of the case as one step."""
        return self.batch_of(range(len(self.tables)))

    def batch_of(self, sequences: range | list[int]) -> AttentionBatch:
        """Some sequences of the case, in the order given, as one step."""
        return AttentionBatch.build(
            [self.case.query_lens[r] for r in sequences],
            [self.case.context_lens[r] for r in sequences],
            [self.tables[r] for r in sequences],
            self.case.block_size,
            self.device,
        )

    def attend(self, kernels: KernelSet, batch: AttentionBatch, query: Tensor) -> Tensor:
        """Attention of `query` over this pool."""
        case = self.case
        out = kernels.attention(
            query, self.pool, case.layout, LAYER, batch, case.scale, options=self.options
        )
        assert isinstance(out, Tensor)
        return out

    def with_holes(self) -> tuple[AttentionBatch, list[Tensor]]:
        """All sequences of the case with most of their tokens, and bool [context] of which.

        Runs begin and end inside tiles, two lie in one block, and blocks are missing; the query's
        own tokens stay.
        """
        draw, size = random.Random(self.case.seed), self.case.block_size
        held, runs = [], []
        for r, context in enumerate(self.case.context_lens):
            own = context - self.case.query_lens[r]
            keep = torch.zeros(context, dtype=torch.bool)
            keep[own:] = True
            rows = []
            position = 0
            while position < context:
                count = min(
                    draw.choice((1, 3, 7, 16, 40)), size - position % size, context - position
                )
                if draw.random() < 0.6 or position + count > own:
                    keep[position : position + count] = True
                    block = self.tables[r][position // size]
                    rows.append((block, position % size, count, position))
                position += count
            held.append(keep.to(self.device))
            runs.append(rows)
        case = self.case
        batch = AttentionBatch.of_runs(case.query_lens, case.context_lens, runs, size, self.device)
        return batch, held

    def expected(self, batch: AttentionBatch | None = None) -> tuple[Tensor, Tensor]:
        """Result of the reference for all sequences, not rounded to the query's dtype; its LSE."""
        case = self.case
        tokens = self.query.shape[0]
        out = torch.empty(tokens, case.num_query_heads, case.value_dim, device=self.device)
        lse = torch.empty(tokens, case.num_query_heads, device=self.device)
        reference.attend(
            self.query.float(),
            self.pool,
            case.layout,
            LAYER,
            self.batch if batch is None else batch,
            case.scale,
            out,
            lse,
            range(len(self.tables)),
            self.options,
        )
        return out, lse
