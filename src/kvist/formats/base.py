"""`KVFormat`: the numbers of one way to pack K and V into a block.

Owns byte counts, the open form, error bound and source of a format. Knows no tensor: packing and
unpacking stand in `kvist.kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvist.errors import ConfigError
from kvist.spec import (
    LAYER_PACKING,
    PAIR_PACKING,
    TILE_SLOTS,
    BlockLayout,
    LayerGroup,
    LayerKind,
)


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How K and V are stored; immutable, hashable, part of what a block's key depends on.

    Parameters
    ----------
    name
        Short name, as `--kv-cache-dtype` takes it.
    dtype
        Name of the stored element type.
    itemsize
        Bytes a stored element.
    error_bound
        How far a value read back may be from the value written, in words and numbers.
    source
        Where the format comes from, and where ours differs.
    exact_for
        Compute dtypes whose every value is read back unchanged.
    packing_id
        Order of the elements inside a block, wherever a block can have it; see `layout`.
    open_form
        How a block is kept until it is sealed: "same", the sealed form.
    head_blocks
        First blocks of a sequence that stay in 16 bit.
    sidecar_bytes
        Bytes a block and layer beside K and V.
    """

    name: str
    dtype: str
    itemsize: int
    error_bound: str
    source: str
    exact_for: frozenset[str]
    packing_id: str = LAYER_PACKING
    open_form: str = "same"
    head_blocks: int = 0
    sidecar_bytes: int = 0

    def layout(self, group: LayerGroup, block_size: int) -> BlockLayout:
        """Where K and V of one block of `group` lie.

        A block that the format's packing does not hold is packed plainly: one whose slots are no
        multiple of `TILE_SLOTS`, one with an odd `key_dim`, and a latent one, whose K is also V.

        Raises
        ------
        ConfigError
            If the group keeps state, which has no blocks, or `block_size` is not at least 1.
        """
        if group.kind is LayerKind.STATE:
            raise ConfigError(
                f"{len(group.layers)} layers keep a constant state a sequence and have no blocks; "
                "size them with LayerGroup.state_bytes"
            )
        if block_size < 1:
            raise ConfigError(f"block_size must be at least 1 slot, got {block_size}")
        paired = block_size % TILE_SLOTS == 0 and group.key_dim % 2 == 0 and group.value_dim > 0
        plain = self.packing_id == PAIR_PACKING and not paired
        return BlockLayout(
            num_layers=group.num_layers,
            num_kv_heads=group.num_kv_heads,
            key_dim=group.key_dim,
            value_dim=group.value_dim,
            block_size=block_size,
            itemsize=self.itemsize,
            packing_id=LAYER_PACKING if plain else self.packing_id,
        )

    def block_bytes(self, group: LayerGroup, block_size: int) -> int:
        """Bytes of one block of `group`, sidecar included."""
        layout = self.layout(group, block_size)
        return layout.block_bytes + self.sidecar_bytes * layout.num_layers

    def token_bytes(self, group: LayerGroup) -> int:
        """Bytes a token of `group`, sidecars left out; 0 for a group that keeps state."""
        return group.token_elements * self.itemsize

    def is_exact_for(self, compute_dtype: str) -> bool:
        """Whether storing loses nothing of values computed in `compute_dtype`."""
        return compute_dtype in self.exact_for
