"""The tokenizer in the server's process, and the thread on which it reads prompts.

The engine's process knows ids only, so neither a long prompt nor a long answer's text ever holds up
a step; and a long prompt is read beside the event loop, so it holds up no stream.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from kvist.engine.tokenizer import Tokenizer
from kvist.server.api_errors import unavailable

MAX_WAITING_PROMPTS = 1024
T = TypeVar("T")

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


class TextThread:
    """The thread on which prompts become ids, one at a time; who finds too many there is sent away.

    Parameters
    ----------
    most : int
        Prompts that wait or are at work. Each is held in memory.
    """

    def __init__(self, most: int = MAX_WAITING_PROMPTS) -> None:
        self._most = most
        self._count = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    async def run(self, work: Callable[[], T]) -> T:
        """Do `work` there and return what it returns.

        Raises
        ------
        ApiError
            503, if there is too much to do already.
        """
        if self._count >= self._most:
            raise unavailable(
                f"{self._count} prompts wait to be tokenized, as many as the server takes",
                "overloaded",
            )
        self._count += 1
        try:
            # Whoever is cancelled while still waiting never gets there.
            return await asyncio.wrap_future(self._pool.submit(work))
        finally:
            self._count -= 1
