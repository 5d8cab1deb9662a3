"""A GGUF file's metadata and tensor table, without its tensor data.

Owns the reading of the header. Does not know what the keys mean to a model: that is
`kvist.engine.weights.gguf_import`.

The `gguf` package reads the same, through numpy views element by element: 9 s for a vocabulary of
49,152 tokens, against a third of a second here. The layout is that of the public specification,
versions 2 and 3, little-endian::

    "GGUF" | version u32 | tensors u64 | keys u64 | key, type, value ... |
    name, dims, type, offset ... | padding to general.alignment | tensor data
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

from kvist.errors import ModelError

_VERSIONS: Final = (2, 3)
_FIXED: Final = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING: Final = 8
_ARRAY: Final = 9
_MAX_DIMS: Final = 8


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One row of the tensor table.

    Parameters
    ----------
    name
        As llama.cpp spells it.
    shape
        In torch order, slowest first (the file has it the other way round).
    ggml_type
        How its values are stored; 0 is float32.
    offset
        First byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int

    @property
    def elements(self) -> int:
        """Values in the tensor."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """What a GGUF file says of itself.

    Parameters
    ----------
    metadata
        Key to value: numbers, booleans, strings, or lists of them.
    tensors
        The tensor table, in the file's order.
    """

    metadata: dict[str, Any]
    tensors: tuple[GGUFTensor, ...]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture, the prefix of the model's own keys."""
        return str(self.metadata["general.architecture"])

    def get(self, key: str, default: Any = None) -> Any:
        """Value of a key; `{arch}` in it stands for the architecture."""
        return self.metadata.get(key.replace("{arch}", self.architecture), default)


def read_header(path: Path) -> GGUFHeader:
    """Read the header of the GGUF file at `path`.

    Raises
    ------
    ModelError
        If the file cannot be read, is no GGUF of version 2 or 3, or ends too early.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data, path).header()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(
            f"{path} is no whole GGUF file ({error}); it has {path.stat().st_size} bytes, so "
            "compare that with where it came from and fetch it again"
        ) from error


class _Reader:
    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._at = 0

    def header(self) -> GGUFHeader:
        magic = self._data[:4]
        if magic != b"GGUF":
            raise ModelError(f"{self._path} is no GGUF file: it begins with {magic!r}")
        self._at = 4
        version = self._number("I")
        if version not in _VERSIONS:
            raise ModelError(
                f"{self._path} is GGUF version {version}; versions 2 and 3 (little-endian) are "
                "read, so convert it anew with a current llama.cpp"
            )
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            metadata[key] = self._value(self._number("I"))
        if "general.architecture" not in metadata:
            raise ModelError(f"{self._path} names no general.architecture, so nothing can load it")
        rows = [self._tensor() for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", 32))
        start = -(-self._at // alignment) * alignment
        tensors = tuple(GGUFTensor(name, shape, kind, start + at) for name, shape, kind, at in rows)
        if any(tensor.offset >= len(self._data) for tensor in tensors):
            raise ValueError("its tensor table points behind its end")
        return GGUFHeader(metadata, tensors)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dims = self._string(), self._number("I")
        if dims > _MAX_DIMS:
            raise ValueError(f"tensor {name!r} claims {dims} dimensions")
        shape = tuple(self._number("Q") for _ in range(dims))
        return name, shape[::-1], self._number("I"), self._number("Q")

    def _value(self, kind: int) -> Any:
        if kind in _FIXED:
            return self._number(_FIXED[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ValueError(f"value type {kind} at byte {self._at} is unknown")
        element, count = self._number("I"), self._number("Q")
        if element in _FIXED:
            layout = struct.Struct(f"<{count}{_FIXED[element]}")
            values = layout.unpack_from(self._data, self._at)
            self._at += layout.size
            return list(values)
        return [self._value(element) for _ in range(count)]

    def _number(self, code: str) -> Any:
        layout = struct.Struct(f"<{code}")
        (value,) = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return value

    def _string(self) -> str:
        length = self._number("Q")
        end = self._at + length
        if end > len(self._data):
            raise ValueError(f"a string of {length} bytes at byte {self._at} runs over its end")
        text = self._data[self._at : end].decode("utf-8")
        self._at = end
        return text
