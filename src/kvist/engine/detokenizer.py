"""Token ids to text, one id at a time, as the whole would decode.

Owns the state between two tokens of one sequence. What a token's bytes are, it is told by
`TokenBytes`, which is shared by all sequences of a tokenizer.

The text of a sequence is not the sum of its tokens' texts: a character may be spread over several
tokens, and some decoders look at neighbours. What is certain is emitted at once, the rest is held::

    byte-level BPE    bytes so far    e2 82 | ac 20 41 ...     held: an unfinished character
    byte fallback     ▁the <0xE2> <0x82> <0xAC> ▁is            held: a run of byte tokens
    other             decoded in a window that begins one token back

Promise: what `push` and `flush` returned, joined, is the tokenizer's own decoding of all ids.
"""

from __future__ import annotations

import codecs
import json
import re
from enum import StrEnum
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\ufffd"


class DecoderKind(StrEnum):
    """How a tokenizer turns tokens into text, as far as streaming has to know."""

    BYTE_LEVEL = "byte level"
    BYTE_FALLBACK = "byte fallback"
    OTHER = "other"


class TokenBytes:
    """What one tokenizer's tokens stand for; shared by its detokenizers, filled as they ask.

    Parameters
    ----------
    tokenizer
        A transformers tokenizer.

    Notes
    -----
    Not for several threads at once (the worst that happens is that a token is looked up twice).
    """

    __slots__ = ("_alphabet", "_backend", "_bytes", "_tokenizer", "kind", "special_ids")

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self.kind = _decoder_kind(self._backend)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special_ids = frozenset(
            index for index, token in added.items() if getattr(token, "special", False)
        )
        self._alphabet = _byte_alphabet()
        self._bytes: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """Bytes of a token of a byte-level vocabulary; of an id that does not exist, none."""
        found = self._bytes.get(token_id)
        if found is None:
            token = self.token(token_id)
            found = b"" if token is None else self._spell(token)
            self._bytes[token_id] = found
        return found

    def is_byte(self, token_id: int) -> bool:
        """Whether a token stands for one raw byte, in a vocabulary with byte fallback."""
        return _BYTE_TOKEN.fullmatch(self.token(token_id) or "") is not None

    def decode(self, token_ids: list[int]) -> str:
        """The tokenizer's own decoding; special tokens are skipped where the caller did so."""
        if self._backend is not None:
            return str(self._backend.decode(token_ids, skip_special_tokens=False))
        text = self._tokenizer.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)

    def token(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it; None for an id that does not exist."""
        if self._backend is not None:
            token = self._backend.id_to_token(token_id)
        else:
            token = self._tokenizer.convert_ids_to_tokens(token_id)
        return None if token is None else str(token)

    def _spell(self, token: str) -> bytes:
        """A byte-level token's bytes: one a letter of the alphabet, else its text's."""
        try:
            return bytes(self._alphabet[letter] for letter in token)
        except KeyError:
            return token.encode()


class IncrementalDetokenizer:
    """Text of one sequence, as it grows.

    Parameters
    ----------
    tokens
        Of the tokenizer.
    skip_special_tokens
        Leave special tokens out of the text, as `decode(..., skip_special_tokens=True)` does.

    Notes
    -----
    Cost: O(1) a token, amortised over held tokens; a tokenizer with an unknown decoder may hold
    (and decode again) a long run of broken characters. One thread a sequence.

    The window that starts one token back is llama.cpp's and vLLM's idea too. Theirs decodes any
    vocabulary in it and holds text that ends in U+FFFD; ours knows where a character ends in the
    two common kinds, so a broken byte in the middle neither stalls the stream nor costs a second
    decoding, and a text cut inside a character still ends as the whole decodes.
    """

    __slots__ = ("_anchor", "_anchor_text", "_decoder", "_held", "_skip", "_tokens")

    def __init__(self, tokens: TokenBytes, skip_special_tokens: bool = True) -> None:
        self._tokens = tokens
        self._skip = tokens.special_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held: list[int] = []
        self._anchor: list[int] = []
        self._anchor_text = ""

    def push(self, token_id: int) -> str:
        """Take one id; returns the text that it makes certain, often of earlier ids too."""
        if token_id in self._skip:
            return ""
        kind = self._tokens.kind
        if kind is DecoderKind.BYTE_LEVEL:
            return self._decoder.decode(self._tokens.bytes_of(token_id))
        if self._tokens.token(token_id) is None:
            # A model padded past its tokenizer can sample such an id. It has no text, and as the
            # anchor it would let the next token believe that it begins the text.
            return ""
        self._held.append(token_id)
        if kind is DecoderKind.BYTE_FALLBACK and self._tokens.is_byte(token_id):
            # Whether a run of bytes is text shows at its end: one bad byte spoils all of it.
            return ""
        text = self._tokens.decode(self._anchor + self._held)
        if kind is DecoderKind.OTHER and text.endswith(_REPLACEMENT):
            return ""
        return self._emit(text)

    def flush(self) -> str:
        """The rest, at the end of the sequence: what was held, broken or not. Call it once."""
        if self._tokens.kind is DecoderKind.BYTE_LEVEL:
            return self._decoder.decode(b"", final=True)
        return self._emit(self._tokens.decode(self._anchor + self._held)) if self._held else ""

    def _emit(self, text: str) -> str:
        delta = text[len(self._anchor_text) :]
        # One token is enough to say "not the beginning". At a flush that may be one byte of a
        # run, but then nothing comes after it.
        self._anchor = self._held[-1:]
        self._anchor_text = self._tokens.decode(self._anchor)
        self._held = []
        return delta


def _decoder_kind(backend: Any) -> DecoderKind:
    """Read the kind off the serialised decoder of a `tokenizers.Tokenizer`."""
    if backend is None or backend.decoder is None:
        return DecoderKind.OTHER
    decoder = json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    names = [step["type"] for step in steps]
    if names == ["ByteLevel"]:
        return DecoderKind.BYTE_LEVEL
    if "ByteLevel" not in names and "ByteFallback" in names:
        return DecoderKind.BYTE_FALLBACK
    return DecoderKind.OTHER


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes by printable letters: itself if printable, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    letters.update({chr(0x100 + place): byte for place, byte in enumerate(hidden)})
    return letters
