"""A paged KV cache in a hundred lines: blocks from one pool, a table for each sequence.

::

    pool     | b0 | b1 | b2 | b3 | b4 |        each block: block_size slots
    table A  [ 3, 0 ]                          token 5 of A, 4 slots a block: block 0, slot 1
    table B  [ 1 ]

A sequence takes a block when it needs one, so at most the last block is partly empty, and any free
block will do: there is no fragmentation. Kvist's own pool adds what a server needs (sharing,
eviction, copy-on-write, tiers); the idea is this one.

    python examples/paged_kv_cache.py
"""

from __future__ import annotations

import torch
from torch import Tensor


class PagedKVCache:
    """K and V of many sequences in one pool of equal blocks.

    Parameters
    ----------
    num_layers, num_blocks, block_size : int
    hidden_size : int
        Elements of K a token and layer, and of V: ``num_kv_heads * head_dim``.
    dtype : torch.dtype
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        hidden_size: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.block_size = block_size
        # [block, layer, K or V, slot, hidden]: one block is one contiguous run of bytes.
        self.pool = torch.zeros(num_blocks, num_layers, 2, block_size, hidden_size, dtype=dtype)
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def allocate(self, name: str, num_tokens: int) -> bool:
        """Make room for `num_tokens` more tokens of a sequence.

        Returns
        -------
        bool
            False if there are not enough free blocks: then nothing has changed. Full is a value
            that a scheduler acts on, not an error.
        """
        held = self.tables.get(name, [])
        wanted = self.lengths.get(name, 0) + num_tokens
        missing = max(0, -(-wanted // self.block_size) - len(held))
        if missing > len(self._free):
            return False
        self.tables[name] = held + [self._free.pop() for _ in range(missing)]
        self.lengths.setdefault(name, 0)
        return True

    def write(self, name: str, layer: int, key: Tensor, value: Tensor) -> None:
        """Write K and V [tokens, hidden_size] behind what is there. REQUIRES `allocate`."""
        first = self.lengths[name]
        for offset in range(key.shape[0]):
            index, slot = divmod(first + offset, self.block_size)
            block = self.tables[name][index]
            self.pool[block, layer, 0, slot] = key[offset]
            self.pool[block, layer, 1, slot] = value[offset]

    def advance(self, name: str, num_tokens: int) -> None:
        """Count `num_tokens` as written, after every layer wrote them."""
        room = len(self.tables[name]) * self.block_size - self.lengths[name]
        if not 0 <= num_tokens <= room:
            raise ValueError(f"cannot advance {name!r} by {num_tokens}: room for {room}")
        self.lengths[name] += num_tokens

    def read(self, name: str, layer: int) -> tuple[Tensor, Tensor]:
        """Gather K and V [tokens, hidden_size] of a sequence, in token order: a copy."""
        blocks = self.pool[self.tables[name], layer]  # [blocks, 2, S, hidden]
        tokens = self.lengths[name]
        return blocks[:, 0].flatten(0, 1)[:tokens], blocks[:, 1].flatten(0, 1)[:tokens]

    def free(self, name: str) -> None:
        """Give all blocks of a sequence back."""
        self._free.extend(reversed(self.tables.pop(name)))
        del self.lengths[name]


def main() -> None:
    cache = PagedKVCache(num_layers=1, num_blocks=6, block_size=4, hidden_size=2)
    for name, num_tokens in (("A", 5), ("B", 3), ("A", 6)):
        fits = cache.allocate(name, num_tokens)
        if fits:
            cache.advance(name, num_tokens)
        print(f"{name} +{num_tokens}: {'ok' if fits else 'full'}; {cache.tables}")
    cache.free("A")
    print(f"A is gone: {cache.num_free_blocks} of 6 blocks are free")


if __name__ == "__main__":
    main()
