"""The text side of requests: the tokenizer in the server's process, and one answer as it grows.

Owns what lies between ids and text here. The engine's process knows ids only, so neither a long
prompt nor a long answer's text ever holds up a step.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvist.engine.step import Update
from kvist.engine.tokenizer import Tokenizer

_QUIET = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a model's tokenizer into a process that is never to hold a tensor.

    transformers imports torch if it finds it, and its tokenizers never use it: several seconds of
    start-up and 230 MB for nothing. So here it does not find it, unless somebody imported it
    before. From then on transformers serves nothing but tokenizers in this process.

    Raises
    ------
    ModelError
        As `Tokenizer`.
    """
    with _torch_hidden():
        return Tokenizer(path)


@contextmanager
def _torch_hidden() -> Iterator[None]:
    if "torch" in sys.modules:
        yield
        return
    told = os.environ.get(_QUIET)
    # What Python itself understands as "there is no such module".
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ[_QUIET] = "1"
    try:
        yield
    finally:
        del sys.modules["torch"]
        if told is None:
            del os.environ[_QUIET]
        else:
            os.environ[_QUIET] = told


class Answer:
    """One continuation as it grows: updates in, new text out.

    Attributes
    ----------
    num_tokens : int
        Generated so far, the one that ended the text included.
    num_cached_tokens : int
        Of the prompt, those whose K and V were there.
    finish_reason : str or None
    error : str or None
        Why, when the reason is ``"error"``.

    Notes
    -----
    A token that stops the text is no part of it, as in vLLM.
    """

    __slots__ = ("_detokenizer", "error", "finish_reason", "num_cached_tokens", "num_tokens")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenizer = tokenizer.stream()
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason: str | None = None
        self.error: str | None = None

    def take(self, update: Update) -> str:
        """Add news; return the text that they make certain, possibly none."""
        token_ids = update.token_ids
        self.num_tokens += len(token_ids)
        self.num_cached_tokens = update.num_cached_tokens
        self.finish_reason = update.finish_reason
        self.error = update.error
        if update.stop_reason is not None:
            token_ids = token_ids[:-1]
        text = "".join(map(self._detokenizer.push, token_ids))
        if update.finish_reason is not None:
            text += self._detokenizer.flush()
        return text
