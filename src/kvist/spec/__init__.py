"""What a model asks of KV memory: its layer groups, their shapes and their bytes.

Owns the names that every floor above speaks of (`LayerGroup`, `BlockLayout`, `KVSpec`). Knows no
format, no block, no tensor and no third-party package: everything here is integers.
"""

from __future__ import annotations

from kvist.spec.group import (
    LAYER_PACKING,
    PAIR_PACKING,
    TILE_SLOTS,
    BlockLayout,
    LayerGroup,
    LayerKind,
)
from kvist.spec.model import KVSpec, read_config
from kvist.spec.reading import DTYPE_BYTES

__all__ = [
    "DTYPE_BYTES",
    "LAYER_PACKING",
    "PAIR_PACKING",
    "TILE_SLOTS",
    "BlockLayout",
    "KVSpec",
    "LayerGroup",
    "LayerKind",
    "read_config",
]
