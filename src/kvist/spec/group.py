"""One geometry of layers and where its bytes lie inside a block.

Owns `LayerKind`, `LayerGroup` and `BlockLayout`. Knows nothing of whole models (`kvist.spec.model`)
and nothing of formats: a layout counts elements of one size, whatever they mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvist.errors import ConfigError

LAYER_PACKING = "lhkv-1"
"""Packing id of plain blocks: layer, KV head, then K `[S, key_dim]` before V `[S, value_dim]`."""

PAIR_PACKING = "lhkv-2"
"""Packing id of blocks for matrix instructions: the same runs of K and V, in pairs of elements."""

TILE_SLOTS = 16
"""Slots that `PAIR_PACKING` keeps together: what one vector of scores covers."""


class LayerKind(StrEnum):
    """What a layer keeps of the past.

    `FULL` every token; `SLIDING` the last `window` tokens; `CHUNKED` the tokens of the current
    chunk of `window` tokens (chunks start at multiples of it); `LATENT` one compressed vector and
    one rope key a token, shared by all heads (MLA); `STATE` a constant number of bytes a sequence
    (linear attention, Mamba, short convolutions).
    """

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    LATENT = "latent"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share one geometry, and so one shape of block.

    Parameters
    ----------
    kind
        What the layers keep.
    layers
        Indices of the decoder layers that own storage here, ascending. A layer that reads another
        layer's K and V (Gemma 3n) owns none and is in no group.
    num_kv_heads
        H. One for `LATENT`, zero for `STATE`.
    key_dim, value_dim
        Elements a head and token stored as K and as V. For `LATENT` the whole vector is K
        (`kv_lora_rank + qk_rope_head_dim`) and `value_dim` is 0: V is read out of K.
    window
        Tokens that a query can see, itself included. Set for `SLIDING` and `CHUNKED` only.
    state_elements
        `STATE` only: elements a layer and sequence in the compute dtype (convolution inputs).
    state_fp32_elements
        `STATE` only: elements a layer and sequence of the recurrent state, which is carried in
        fp32 because its rounding errors add up over the whole sequence.

    Raises
    ------
    ConfigError
        If the numbers contradict the kind.

    Notes
    -----
    Groups are cut so that layers with equal (kind, heads, dims, window) are together. A later rule
    will split such a group further where that gives all groups the same block bytes, so that they
    can draw from one free list (Jenga's idea; we cut whole layers and pad by 5 % at most instead
    of lending pages of a common multiple). Nothing above may rely on one group a kind.
    """

    kind: LayerKind
    layers: tuple[int, ...]
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    state_elements: int = 0
    state_fp32_elements: int = 0

    def __post_init__(self) -> None:
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise ConfigError(
                f"a {self.kind} layer group needs ascending layer indices from 0 on, "
                f"got {self.layers}"
            )
        if self.kind is LayerKind.STATE:
            if self.num_kv_heads or self.key_dim or self.value_dim:
                raise ConfigError(
                    "a state layer group stores nothing a token, got "
                    f"num_kv_heads={self.num_kv_heads}, key_dim={self.key_dim}, "
                    f"value_dim={self.value_dim}; use state_elements"
                )
            if self.state_elements < 0 or self.state_fp32_elements < 0:
                raise ConfigError(
                    f"state sizes cannot be negative, got {self.state_elements} and "
                    f"{self.state_fp32_elements} elements"
                )
        elif self.num_kv_heads < 1 or self.key_dim < 1 or self.value_dim < 0:
            raise ConfigError(
                f"a {self.kind} layer group needs num_kv_heads >= 1, key_dim >= 1 and "
                f"value_dim >= 0, got {self.num_kv_heads}, {self.key_dim}, {self.value_dim}"
            )
        elif self.state_elements or self.state_fp32_elements:
            raise ConfigError(f"only a state layer group has state elements, not {self.kind}")
        windowed = self.kind in (LayerKind.SLIDING, LayerKind.CHUNKED)
        if windowed != (self.window is not None) or (self.window is not None and self.window < 1):
            raise ConfigError(
                f"a {self.kind} layer group needs "
                f"{'a window of at least 1 token' if windowed else 'no window'}, got {self.window}"
            )

    @property
    def num_layers(self) -> int:
        """L of this group."""
        return len(self.layers)

    @property
    def token_elements(self) -> int:
        """Elements a token, K and V, over the layers of the group. 0 for `STATE`."""
        return self.num_layers * self.num_kv_heads * (self.key_dim + self.value_dim)

    def live_tokens(self, context_tokens: int) -> int:
        """Most tokens of a context of `context_tokens` that a sequence must hold here."""
        if self.kind is LayerKind.STATE:
            return 0
        return context_tokens if self.window is None else min(context_tokens, self.window)

    def live_blocks(self, context_tokens: int, block_size: int) -> int:
        """Most blocks of `block_size` slots that a sequence must hold here.

        A window that slides starts anywhere in a block, so it can touch one block more than it
        fills; a chunk does so only if its length is no multiple of the block size::

            blocks   |........|........|........|      S = 8
            window        [----------------]           W = 18: 3 blocks filled, up to 4 touched
        """
        if block_size < 1:
            raise ConfigError(f"block_size must be at least 1 slot, got {block_size}")
        if self.kind is LayerKind.STATE:
            return 0
        whole = -(-context_tokens // block_size)
        if self.window is None:
            return whole
        if self.kind is LayerKind.CHUNKED and self.window % block_size == 0:
            return min(whole, self.window // block_size)
        return min(whole, -(-(self.window - 1) // block_size) + 1)

    def state_bytes(self, itemsize: int) -> int:
        """Bytes a sequence that do not grow with it; `itemsize` of the compute dtype."""
        return self.num_layers * (self.state_elements * itemsize + self.state_fp32_elements * 4)


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where K and V of one block lie: one contiguous run of elements.

    ::

        block   | layer 0           | layer 1           | ...
        layer   | head 0  | head 1  | ...
        head    | K of all slots | V of all slots |

        "lhkv-1"   K [S, key_dim]                 V [S, value_dim]
        "lhkv-2"   K [S/16, key_dim/2, 16, 2]     V [S/2, value_dim, 2]

    A head's K of all slots lies together, so a kernel streams it, and a range of layers is one
    range of bytes, so a transfer can move it alone. In "lhkv-2" two dims of sixteen keys, or two
    slots of sixteen dims of V, are one vector of 64 bytes in 16 bit: the operand of instructions
    that multiply pairs and add both products up, and a row of the tiles of matrix units.

    Parameters
    ----------
    num_layers, num_kv_heads, key_dim, value_dim
        L, H and the elements a head and token, as in `LayerGroup`. Layers count within the group.
    block_size
        S, slots a block.
    itemsize
        Bytes an element.
    packing_id
        Name of the order inside a head; part of what a block's key depends on.

    Raises
    ------
    ConfigError
        If a number is not positive (`value_dim` may be 0), an index is out of range, or the packing
        is unknown or does not hold such a block.
    """

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    block_size: int
    itemsize: int
    packing_id: str = LAYER_PACKING

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "key_dim", "block_size", "itemsize"):
            number = getattr(self, name)
            if number < 1:
                raise ConfigError(f"a block layout needs {name} >= 1, got {number}")
        if self.value_dim < 0:
            raise ConfigError(f"a block layout needs value_dim >= 0, got {self.value_dim}")
        if self.packing_id not in (LAYER_PACKING, PAIR_PACKING):
            raise ConfigError(
                f"packing {self.packing_id!r} is unknown; this version packs {LAYER_PACKING!r} "
                f"and {PAIR_PACKING!r}"
            )
        if self.packing_id == PAIR_PACKING and (self.block_size % TILE_SLOTS or self.key_dim % 2):
            raise ConfigError(
                f"packing {PAIR_PACKING!r} needs slots in multiples of {TILE_SLOTS} and an even "
                f"key_dim, got block_size={self.block_size} and key_dim={self.key_dim}"
            )

    @property
    def head_elements(self) -> int:
        """Elements of one layer and head of a block, K and V."""
        return self.block_size * (self.key_dim + self.value_dim)

    @property
    def layer_elements(self) -> int:
        """Elements of one layer of a block."""
        return self.num_kv_heads * self.head_elements

    @property
    def block_elements(self) -> int:
        """Elements of a block."""
        return self.num_layers * self.layer_elements

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.block_elements * self.itemsize

    def key_offset(self, layer: int, head: int) -> int:
        """Element of a block at which K `[S, key_dim]` of a layer and head begins."""
        if not (0 <= layer < self.num_layers and 0 <= head < self.num_kv_heads):
            raise ConfigError(
                f"layer {layer}, head {head} lie outside a block of {self.num_layers} layers "
                f"and {self.num_kv_heads} heads"
            )
        return layer * self.layer_elements + head * self.head_elements

    def value_offset(self, layer: int, head: int) -> int:
        """Element of a block at which V `[S, value_dim]` of a layer and head begins."""
        return self.key_offset(layer, head) + self.block_size * self.key_dim

    def key_index(self, layer: int, head: int, slot: int, dim: int) -> int:
        """Element of a block that is element `dim` of the K in `slot`."""
        self._check_element(slot, dim, self.key_dim)
        start = self.key_offset(layer, head)
        if self.packing_id == LAYER_PACKING:
            return start + slot * self.key_dim + dim
        tile, lane = divmod(slot, TILE_SLOTS)
        pair, part = divmod(dim, 2)
        return start + tile * TILE_SLOTS * self.key_dim + (pair * TILE_SLOTS + lane) * 2 + part

    def value_index(self, layer: int, head: int, slot: int, dim: int) -> int:
        """Element of a block that is element `dim` of the V in `slot`."""
        self._check_element(slot, dim, self.value_dim)
        start = self.value_offset(layer, head)
        if self.packing_id == LAYER_PACKING:
            return start + slot * self.value_dim + dim
        pair, part = divmod(slot, 2)
        return start + (pair * self.value_dim + dim) * 2 + part

    def _check_element(self, slot: int, dim: int, dims: int) -> None:
        if not (0 <= slot < self.block_size and 0 <= dim < dims):
            raise ConfigError(
                f"slot {slot}, element {dim} lie outside {self.block_size} slots of {dims} elements"
            )
