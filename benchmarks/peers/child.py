"""A driver as a process of its own: asked by JSON lines, watched, and ended with all it started.

Owns processes, time limits and reading what they hold from ``/proc``. Linux only. Does not know
what is measured.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

_CLOSE_S = 20.0


class CallError(Exception):
    """The engine answered that it could not; it can be asked for something else."""


class DriverError(Exception):
    """The driver is gone, or did not answer in time and was ended."""


class Driver:
    """One engine, running.

    Parameters
    ----------
    command : sequence of str
    environ : mapping of str to str
    log : Path
        Gets what the driver and its engine print.

    Attributes
    ----------
    started_s : float
        `time.perf_counter` when the process was made.
    pid : int
        Of the driver, and of its process group.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self._log = log
        self._pending = b""
        self.started_s = time.perf_counter()
        with log.open("wb") as noise:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=noise,
                env=dict(environ),
                # Its group holds the processes that the engine makes, to be ended together.
                process_group=0,
            )
        self.pid = self._process.pid

    def call(self, name: str, limit_s: float, **arguments: Any) -> Any:
        """Ask for something and wait for the answer.

        Raises
        ------
        CallError
            If the engine says why it could not.
        DriverError
            If no answer can come any more, or none came in `limit_s` seconds.
        """
        line = json.dumps({"call": name, **arguments}).encode() + b"\n"
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except OSError as error:
            raise DriverError(self._last_words()) from error
        answer = json.loads(self._read_line(time.monotonic() + limit_s, limit_s))
        if "error" in answer:
            raise CallError(answer["error"])
        return answer["value"]

    def memory(self) -> dict[str, int]:
        """Bytes of the driver and the processes below it, summed.

        ``peak_rss``: the most that each was at, by the kernel's own count, so nothing is sampled
        and nobody disturbed; pages that several of them map count once for each. ``pss``: what they
        hold now, shared pages in part. ``processes``: how many there are.
        """
        peak = pss = 0
        pids = self._pids()
        for pid in pids:
            with suppress(OSError):  # it may end while we look
                peak += _field(Path(f"/proc/{pid}/status"), "VmHWM:")
                pss += _field(Path(f"/proc/{pid}/smaps_rollup"), "Pss:")
        return {"peak_rss": peak, "pss": pss, "processes": len(pids)}

    def close(self) -> None:
        """End it, kindly at first, and everything of its process group."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()

    def __enter__(self) -> Driver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            # Whatever it is at, nobody waits for it any more.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self.close()

    # ------------------------------------------------------------------ inside

    def _read_line(self, give_up_s: float, limit_s: float) -> bytes:
        assert self._process.stdout is not None
        handle = self._process.stdout.fileno()
        while b"\n" not in self._pending:
            left_s = give_up_s - time.monotonic()
            if left_s <= 0 or not select.select([handle], [], [], left_s)[0]:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                raise DriverError(f"no answer within {limit_s:.0f} s")
            part = os.read(handle, 1 << 20)
            if not part:
                raise DriverError(self._last_words())
            self._pending += part
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _last_words(self) -> str:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "it closed its output"
        if code < 0:
            with suppress(ValueError):
                return f"ended by {signal.Signals(-code).name}"
        text = self._log.read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return f"exit {code}: {lines[-1][:300]}" if lines else f"exit {code}"

    def _pids(self) -> list[int]:
        pids = [self._process.pid]
        for pid in pids:  # grows while it is walked: children of children come too
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                with suppress(OSError):
                    pids += [int(child) for child in children.read_text().split()]
        return pids


def _field(path: Path, name: str) -> int:
    """Bytes in a line of ``/proc`` that counts in kB."""
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 0
