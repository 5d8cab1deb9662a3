"""`kvist serve` as a process of its own, seen from outside: its memory, its CPU time, its stats.

Owns the life of the process and of a tiny model's folder. What is read comes from ``/proc`` and
from ``GET /v1/kv/stats``. Linux only. Imports no torch: libraries that two processes map count half
in the proportional memory of each.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START_S = 600
"""A model may have to be fetched and converted first."""

_TINY = """
import pathlib, sys
from kvist.testing.models import tiny_model
tiny_model("llama", pathlib.Path(sys.argv[1]))
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what says which server is started."""
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model instead")
    parser.add_argument("--kv-cache-memory-bytes", default=None, help="default: 1GiB, tiny 64MiB")
    parser.add_argument("--max-num-seqs", type=int, default=64)


class RunningServer:
    """A server that answers.

    Parameters
    ----------
    process : subprocess.Popen
    port : int
    model : str
        The name that requests use.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int, model: str) -> None:
        self.port = port
        self.model = model
        self._process = process

    def wait_ready(self) -> None:
        """Wait until ``/health`` says 200; raise `RuntimeError` if the process ends before."""
        give_up_s = time.monotonic() + START_S
        while time.monotonic() < give_up_s:
            if self._process.poll() is not None:
                raise RuntimeError(f"kvist serve ended with {self._process.returncode}; see above")
            try:
                if self.get("/health")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise RuntimeError(f"kvist serve is not ready after {START_S} s")

    def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def stats(self) -> dict[str, Any]:
        """Return ``GET /v1/kv/stats``, made after this call began.

        The server may answer with what it knew half a second ago; then it is asked again.
        """
        called_s = time.monotonic()
        while True:
            status, body = self.get("/v1/kv/stats")
            if status != 200:
                raise RuntimeError(f"GET /v1/kv/stats: {status} {body[:200]!r}")
            stats: dict[str, Any] = json.loads(body)
            if time.monotonic() - stats["age_s"] >= called_s:
                return stats
            time.sleep(0.1)

    def idle_stats(self, patience_s: float = 30) -> dict[str, Any]:
        """Return the stats once nothing runs or waits, or those after `patience_s`."""
        give_up_s = time.monotonic() + patience_s
        while True:
            stats = self.stats()
            queue = stats["queue"]
            open_ = queue["running"] + sum(queue["waiting"].values())
            if not open_ or time.monotonic() > give_up_s:
                return stats

    def memory(self) -> dict[str, int]:
        """Return bytes of server and engine together, as the kernel counts them.

        ``pss``: pages that others map too count in part; ``rss``: they count in full, in each
        process; ``anonymous``: what is no file's, so nobody else moves it.
        """
        each = [_memory(pid) for pid in self._pids()]
        return {kind: sum(held[kind] for held in each) for kind in each[0]}

    def cpu_s(self) -> float:
        """Return CPU seconds of server and engine so far."""
        return sum(_cpu_s(pid) for pid in self._pids())

    def _pids(self) -> list[int]:
        pids = [self._process.pid]
        for pid in pids:  # grows while it is walked: children of children come too
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                pids += [int(child) for child in children.read_text().split()]
        return pids


@contextmanager
def running_server(args: argparse.Namespace) -> Iterator[RunningServer]:
    """Start a server as `add_arguments` says, and stop it in the end."""
    with tempfile.TemporaryDirectory() as folder:
        model, pool = args.model, args.kv_cache_memory_bytes or "1GiB"
        if args.tiny:
            model = str(Path(folder) / "tiny")
            subprocess.run([sys.executable, "-c", _TINY, model], check=True)
            pool = args.kv_cache_memory_bytes or "64MiB"
        port = _free_port()
        command = [sys.executable, "-c", "from kvist.cli import app; app()", "serve", model]
        command += ["--served-model-name", "benchmark", "--port", str(port)]
        command += ["--kv-cache-memory-bytes", pool, "--max-num-seqs", str(args.max_num_seqs)]
        process = subprocess.Popen([*command, "--shutdown-timeout", "5"], stdout=subprocess.DEVNULL)
        try:
            server = RunningServer(process, port, "benchmark")
            server.wait_ready()
            yield server
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _memory(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    fields = {
        name: int(rest.split()[0]) * 1024 for name, _, rest in (s.partition(":") for s in lines)
    }
    return {"pss": fields["Pss"], "rss": fields["Rss"], "anonymous": fields["Anonymous"]}


def _cpu_s(pid: int) -> float:
    # The name of the program, in brackets, may hold spaces.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
