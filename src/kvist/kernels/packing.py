"""K and V of whole blocks out of a pool and into it, in torch, whatever their packing.

Owns the meaning of `BlockLayout` for tensors. Knows no batch and no attention. Runs on any device.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvist.spec import LAYER_PACKING, TILE_SLOTS, BlockLayout


@dataclass(frozen=True, eq=False)
class LayerBlocks:
    """K and V of one layer of a pool, as views of it; see `layer_blocks`.

    Attributes
    ----------
    layout : BlockLayout
    key : Tensor
        [N, H, S, Dk], or [N, H, S / 16, 16, Dk / 2, 2] for pairs.
    value : Tensor
        [N, H, S, Dv], or [N, H, S / 2, 2, Dv] for pairs.
    """

    layout: BlockLayout
    key: Tensor
    value: Tensor

    def read(self, blocks: Tensor, head: int | slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Copy K and V of some blocks out.

        Parameters
        ----------
        blocks : Tensor
            int64 [...], block ids.
        head : int or slice
            Which KV heads; a number leaves their axis out.

        Returns
        -------
        key, value : Tensor
            [..., H, S, Dk] and [..., H, S, Dv], in the pool's dtype.
        """
        key, value = self.key[:, head][blocks], self.value[:, head][blocks]
        if self.layout.packing_id == LAYER_PACKING:
            return key, value
        return key.flatten(-2).flatten(-3, -2), value.flatten(-3, -2)

    def write(self, block: Tensor, slot: Tensor, key: Tensor, value: Tensor) -> None:
        """Write K [T, H, Dk] and V [T, H, Dv] into slots, int64 [T] each; cast to the pool."""
        key, value = key.to(self.key.dtype), value.to(self.value.dtype)
        if self.layout.packing_id == LAYER_PACKING:
            self.key.transpose(1, 2)[block, slot] = key
            self.value.transpose(1, 2)[block, slot] = value
            return
        tile, lane = slot // TILE_SLOTS, slot % TILE_SLOTS
        self.key.movedim(1, 3)[block, tile, lane] = key.reshape(*key.shape[:-1], -1, 2)
        self.value.movedim(1, 3)[block, slot // 2, slot % 2] = value


def layer_blocks(pool: Tensor, layout: BlockLayout, layer: int) -> LayerBlocks:
    """Find K and V of one layer in a pool.

    Parameters
    ----------
    pool : Tensor
        [N, block elements], bf16, fp16 or fp32, contiguous.
    layout : BlockLayout
        Where K and V lie in a block.
    layer : int
        Which layer of the group, ``0 <= layer < layout.num_layers``.

    Raises
    ------
    ValueError
        If the pool is not contiguous or its rows are not blocks of this layout.
    IndexError
        If there is no such layer.
    """
    heads, slots = layout.num_kv_heads, layout.block_size
    key_dim, value_dim = layout.key_dim, layout.value_dim
    if pool.dim() != 2 or pool.shape[1] != layout.block_elements or not pool.is_contiguous():
        raise ValueError(
            f"the pool has shape {tuple(pool.shape)} and strides {pool.stride()}; layout "
            f"{layout.packing_id} needs a contiguous [N, {layout.block_elements}]"
        )
    if not 0 <= layer < layout.num_layers:
        raise IndexError(f"layer {layer} of a layout with {layout.num_layers} layers")
    if layout.packing_id == LAYER_PACKING:
        key_shape: tuple[int, ...] = (slots, key_dim)
        key_steps: tuple[int, ...] = (key_dim, 1)
        value_shape: tuple[int, ...] = (slots, value_dim)
        value_steps: tuple[int, ...] = (value_dim, 1)
    else:
        key_shape = (slots // TILE_SLOTS, TILE_SLOTS, key_dim // 2, 2)
        key_steps = (TILE_SLOTS * key_dim, 2, 2 * TILE_SLOTS, 1)
        value_shape, value_steps = (slots // 2, 2, value_dim), (2 * value_dim, 1, 2)

    def view(shape: tuple[int, ...], steps: tuple[int, ...], start: int) -> Tensor:
        return pool.as_strided(
            (pool.shape[0], heads, *shape),
            (layout.block_elements, layout.head_elements, *steps),
            pool.storage_offset() + start,
        )

    start = layer * layout.layer_elements
    return LayerBlocks(
        layout,
        view(key_shape, key_steps, start),
        view(value_shape, value_steps, start + slots * key_dim),
    )
