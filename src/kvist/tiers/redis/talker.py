"""A thread that does what the caller's thread must not wait for, and one that watches the clock.

Owns two threads and no data. The talker runs `work` whenever it was woken, or something is due; the
watchdog calls `watch` all the time, and so never waits for anything itself.

Threads: every method from any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

_LOOK_AGAIN_S = 0.25


class Talker:
    """Runs `work` on a thread of its own.

    Parameters
    ----------
    name : str
        The threads bear it.
    work : callable
        Does all there is to do. What it raises is kept in `trouble`, and it runs again when woken.
    is_due : callable
        Whether there is something to do that nobody wakes it for; None if there never is.
    watch : callable
        Cuts `work` short when it hangs.
    watch_every_s : float

    Attributes
    ----------
    trouble : str
        What `work` raised the last time it ran; ``""`` if nothing.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], None],
        is_due: Callable[[], bool | None],
        watch: Callable[[], None],
        watch_every_s: float,
    ) -> None:
        self.trouble = ""
        self._work = work
        self._is_due = is_due
        self._watch = watch
        self._watch_every_s = watch_every_s
        self._changed = threading.Condition()
        self._woken = False
        self._busy = False
        self._closing = False
        self._unwatched = threading.Event()
        self._talking = threading.Thread(
            target=self._talk, name=f"kvist-{name}-talker", daemon=True
        )
        self._looking = threading.Thread(target=self._look, name=f"kvist-{name}-watch", daemon=True)
        self._talking.start()
        self._looking.start()

    def wake(self) -> None:
        """Have `work` run, again if it is running."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Wait until `work` has run for every `wake` so far; say whether that was reached."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._woken and not self._busy, timeout_s)

    def close(self) -> None:
        """Wait for both threads to end."""
        self._closing = True
        self.wake()
        self._talking.join()
        self._unwatched.set()  # not before: what hangs in `work` has to be cut
        self._looking.join()

    def _talk(self) -> None:
        while True:
            with self._changed:
                while not self._woken and not (due := self._is_due()):
                    self._changed.wait(None if due is None else _LOOK_AGAIN_S)
                if self._closing:
                    return
                self._woken, self._busy = False, True
            try:
                self._work()
                self.trouble = ""
            except Exception as error:  # noqa: BLE001 - without this thread nobody is answered
                self.trouble = f"{type(error).__name__}: {error}"
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _look(self) -> None:
        while not self._unwatched.wait(self._watch_every_s):
            self._watch()
