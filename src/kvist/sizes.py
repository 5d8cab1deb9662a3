"""Sizes in bytes, as people read and write them."""

from __future__ import annotations

import re

from kvist.errors import ConfigError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_SIZE = re.compile(r"^\s*([0-9]*\.?[0-9]+)\s*([KMGT]?)(i?)(B?)\s*$", re.IGNORECASE)


def parse_size(text: str | int, option: str = "size") -> int:
    """Read a size in bytes: ``8GiB`` or ``8G`` (2**30), ``8GB`` (10**9), ``512MiB``, ``1048576``.

    Raises
    ------
    ConfigError
        Naming `option`, if `text` is no size.
    """
    if isinstance(text, int):
        return text
    m = _SIZE.match(text)
    if m is None:
        raise ConfigError(f"{option}={text!r} is not a size; write 8GiB, 512MiB, 8GB or bytes")
    number, unit, binary, byte = m.groups()
    decimal = bool(byte) and not binary
    factor = (_DECIMAL if decimal else _UNITS)[unit.upper()]
    return int(float(number) * factor)


def option_size(nbytes: int) -> str:
    """Write a size as options take it, rounded up: ``3.21GiB`` holds what was asked for."""
    for unit, factor in _BINARY:
        if nbytes >= factor:
            hundredths = -(-100 * nbytes // factor)
            return f"{hundredths / 100:.2f}".rstrip("0").rstrip(".") + unit
    return str(nbytes)


def format_size(nbytes: float) -> str:
    """Write a size for people: ``1.50 GiB``, ``360 KiB``, ``12 B``."""
    for unit, factor in _BINARY:
        if abs(nbytes) >= factor:
            value = nbytes / factor
            return f"{value:.0f} {unit}" if value == int(value) else f"{value:.2f} {unit}"
    return f"{nbytes:.0f} B"
