"""From the name a person types, or the number a header holds, to a codec.

Owns the spellings, and loads no codec that nobody asks for: they need libraries of the tiers extra.
A new codec is one file, and a line in `_load`.
"""

from __future__ import annotations

from kvist.codecs.base import Codec
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
    if name not in CODEC_NAMES or (name == "raw" and parameter):
        raise ConfigError(f"codec {text!r} is unknown; there are raw, zstd and zstd:LEVEL")
    try:
        return _load(name, int(parameter) if parameter else None)
    except ImportError as error:
        raise ConfigError(
            f"codec {text!r} needs a library that is not installed ({error});"
            " pip install 'kvist[tiers]'"
        ) from error
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"codec {text!r}: the level is a number, such as zstd:3") from error


def decoder(wire_id: int) -> Codec | None:
    """Return a codec that decodes what a header with that number holds; None if unknown here."""
    for name in CODEC_NAMES:
        codec = make_codec(name)
        if codec.wire_id == wire_id:
            return codec
    return None


def _load(name: str, level: int | None) -> Codec:
    if name == "raw":
        from kvist.codecs.raw import RawCodec

        return RawCodec()
    from kvist.codecs.zstd import ZstdCodec

    return ZstdCodec(level)
