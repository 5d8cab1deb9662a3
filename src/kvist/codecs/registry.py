"""From the name a person types, or the number a header holds, to a codec.

Owns the spellings. A new codec is one file and one line in `make_codec` and `decoder`.
"""

from __future__ import annotations

from kvist.codecs.base import Codec
from kvist.codecs.raw import RawCodec
from kvist.errors import ConfigError

CODEC_NAMES = ("raw", "zstd")


def make_codec(text: str) -> Codec:
    """Build the codec that `text` asks for: ``raw``, ``zstd`` or ``zstd:LEVEL``.

    Raises
    ------
    ConfigError
        If there is no such codec or level, or its library is not installed.
    """
    name, _, parameter = text.partition(":")
    if name == "raw" and not parameter:
        return RawCodec()
    if name == "zstd":
        try:
            from kvist.codecs.zstd import DEFAULT_LEVEL, ZstdCodec
        except ImportError as error:
            raise ConfigError(
                f"codec {text!r} needs a library that is not installed ({error});"
                " pip install 'kvist[tiers]', or use raw"
            ) from error
        try:
            level = int(parameter) if parameter else DEFAULT_LEVEL
        except ValueError as error:
            raise ConfigError(f"codec {text!r}: the level is a number, such as zstd:3") from error
        return ZstdCodec(level)
    raise ConfigError(f"codec {text!r} is unknown; there are raw, zstd and zstd:LEVEL")


def decoder(wire_id: int) -> Codec | None:
    """Return a codec that decodes what a header with that number holds; None if unknown here."""
    for name in CODEC_NAMES:
        codec = make_codec(name)
        if codec.wire_id == wire_id:
            return codec
    return None
