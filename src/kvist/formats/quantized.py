"""Quantized formats as numbers: what they would cost. None of them runs yet.

Owns bytes a token of `fp8`, `int8`, `k8v4` and `int4`, for planning. Knows no tensors.

::

    int8, one token and head     | code 0 … code D-1 | scale |        8 + 16/D bits an element
    int4, groups of 32           | 32 codes | scale, zero | …         4 + 32/32 bits an element
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvist.spec import LayerGroup, LayerKind


@dataclass(frozen=True, slots=True)
class Coding:
    """How the elements of one vector are coded.

    Parameters
    ----------
    bits
        Of a code.
    shared_bits
        Scale, and zero point where there is one, of each group; 0 for codes that need none.
    group
        Elements that share them; ``None``: the whole vector.
    """

    bits: int
    shared_bits: int = 0
    group: int | None = None

    def vector_bytes(self, dim: int) -> int:
        """Bytes of one vector of `dim` elements; a group that is not full costs as much."""
        groups = 1 if self.group is None else -(-dim // self.group)
        return -(-(dim * self.bits + groups * self.shared_bits) // 8) if dim else 0


@dataclass(frozen=True, slots=True)
class QuantizedFormat:
    """Numbers of a format in which K and V are coded each in its own way.

    Parameters
    ----------
    name
        As `--kv-cache-dtype` will take it.
    key, value
        How K and V of a token and head are coded.
    source
        Where the idea comes from.
    """

    name: str
    key: Coding
    value: Coding
    source: str

    def token_bytes(self, group: LayerGroup) -> int:
        """Bytes a token of `group`, K and V over all its layers; 0 for a group that keeps state."""
        if group.kind is LayerKind.STATE:
            return 0
        vector = self.key.vector_bytes(group.key_dim) + self.value.vector_bytes(group.value_dim)
        return group.num_layers * group.num_kv_heads * vector


_FP8 = Coding(8)
_INT8 = Coding(8, 16)

QUANTIZED: Mapping[str, QuantizedFormat] = MappingProxyType(
    {
        form.name: form
        for form in (
            QuantizedFormat("fp8", _FP8, _FP8, "E4M3 of the OCP 8-bit floating point formats"),
            QuantizedFormat("int8", _INT8, _INT8, "symmetric, a 16-bit scale a token and head"),
            QuantizedFormat(
                "k8v4",
                _INT8,
                Coding(4, 32, 64),
                "keys as int8; values asymmetric in groups of 64: they bear it better than keys",
            ),
            QuantizedFormat(
                "int4",
                Coding(4, 32, 32),
                Coding(4, 32, 32),
                "asymmetric, a 16-bit scale and zero point for 32 elements",
            ),
        )
    }
)
"""Formats that can be planned with, by name."""
