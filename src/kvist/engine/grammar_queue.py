"""Where requests wait for their grammar.

Compiling takes milliseconds, reading a vocabulary a second or two; neither may hold up a step, so
both are done on a thread. Owns that thread; knows neither grammars nor the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from kvist.engine.grammar import GrammarSpec, Matcher


class GrammarQueue:
    """Requests whose grammar is being compiled.

    Parameters
    ----------
    compile_grammar : callable
        From spec to matcher; called on a thread of its own, one at a time.

    Notes
    -----
    Step thread only. The thread is started by the first grammar.
    """

    def __init__(self, compile_grammar: Callable[[GrammarSpec], Matcher]) -> None:
        self._compile = compile_grammar
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: dict[str, Future[Matcher]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def enter(self, request_id: str, spec: GrammarSpec) -> None:
        """Begin to compile the grammar of a request."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="kvist-grammar")
        self._waiting[request_id] = self._pool.submit(self._compile, spec)

    def leave(self, request_id: str) -> bool:
        """Forget a request; false if it is not here."""
        future = self._waiting.pop(request_id, None)
        return future is not None and (future.cancel() or True)

    def ready(self, wait_s: float) -> list[tuple[str, Matcher | Exception]]:
        """Take out the requests whose grammar is there, or wrong, in the order in which they came.

        Waits up to `wait_s` for the first of them; one behind an unfinished one is not held up.
        """
        if self._waiting and wait_s > 0:
            first = next(iter(self._waiting.values()))
            try:
                first.exception(wait_s)
            except TimeoutError:
                return []
        done = [(name, future) for name, future in self._waiting.items() if future.done()]
        for request_id, _ in done:
            del self._waiting[request_id]
        return [(name, future.exception() or future.result()) for name, future in done]  # type: ignore[misc]
