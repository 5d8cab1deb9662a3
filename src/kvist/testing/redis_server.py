"""Real Redis servers for tests, on free ports of the loopback. Needs `redis-server` and redis-py.

Owns their processes and directories. Knows nothing of tiers. Servers keep nothing on disk, and are
killed when their `with` block ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import redis

_NUM_SLOTS = 16384
_START_S = 20.0
_TRIES = 2
PROGRAM = "redis-server"


def obstacle() -> str:
    """Why no server can be started here; ``""`` if one can."""
    if shutil.which(PROGRAM) is None:
        return f"{PROGRAM} is not installed (Debian: apt-get install redis-server)"
    return ""


def need_server() -> None:
    """Skip a test where no server can be started; fail it where KVIST_REQUIRE_REDIS is set."""
    why = obstacle()
    if why and os.environ.get("KVIST_REQUIRE_REDIS"):
        pytest.fail(f"KVIST_REQUIRE_REDIS is set, but {why}")
    if why:
        pytest.skip(why)


def free_port() -> int:
    """Return a port that nobody listens on now, low enough for a cluster bus above it."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port < 50_000:
            return port


class RedisServer:
    """One server.

    Parameters
    ----------
    directory : Path
        Its working directory and log.
    options : str
        For its command line, such as ``"--maxmemory", "4mb"``.
    tls : bool
        Whether `port` speaks TLS; the options name the certificates.

    Attributes
    ----------
    port : int
        The same after a restart.
    """

    def __init__(self, directory: Path, *options: str, tls: bool = False) -> None:
        self.port = free_port()
        self._directory = directory
        self._tls = tls
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RedisServer:
        for _ in range(_TRIES):
            try:
                self.start()
                return self
            except RuntimeError:  # somebody was faster with the port
                self.kill()
                self.port = free_port()
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    @property
    def url(self) -> str:
        """Address, without credentials."""
        return f"{'rediss' if self._tls else 'redis'}://127.0.0.1:{self.port}/0"

    def client(self, **options: Any) -> Any:
        """Return a client of the library for the test, which gives its commands no types."""
        return redis.Redis(host="127.0.0.1", port=self.port, socket_timeout=10, **options)

    def start(self) -> None:
        """Start it, and wait until it listens."""
        ports = (
            ["--port", "0", "--tls-port", str(self.port)]
            if self._tls
            else ["--port", str(self.port)]
        )
        self._directory.mkdir(parents=True, exist_ok=True)
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    PROGRAM, *ports, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
                    "--dir", str(self._directory), *self._options,
                ],
                stdout=log,
                stderr=log,
            )  # fmt: skip
        give_up = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                if time.monotonic() > give_up or self._process.poll() is not None:
                    said = (self._directory / "log").read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"{PROGRAM} did not start: {said}") from None
                time.sleep(0.01)

    def kill(self) -> None:
        """End it at once. What it held is lost."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Let it hang: the kernel accepts connections, nobody answers."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Undo `freeze`."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)


@contextmanager
def redis_cluster(directory: Path, num_nodes: int = 3) -> Iterator[list[RedisServer]]:
    """Run a cluster of masters without replicas; what one loses the others do not cover."""
    options = (
        "--cluster-enabled", "yes", "--cluster-node-timeout", "1000",
        "--cluster-require-full-coverage", "no",
    )  # fmt: skip
    with ExitStack() as stack:
        servers = []
        buses = []
        for index in range(num_nodes):
            buses.append(free_port())
            bus = ("--cluster-port", str(buses[-1]))
            server = RedisServer(directory / str(index), *options, *bus)
            servers.append(stack.enter_context(server))
        _join(servers, buses)
        yield servers


def _join(servers: Sequence[RedisServer], buses: Sequence[int]) -> None:
    clients = [server.client() for server in servers]
    share = -(-_NUM_SLOTS // len(servers))
    for index, client in enumerate(clients):
        last = min((index + 1) * share, _NUM_SLOTS) - 1
        client.execute_command("CLUSTER ADDSLOTSRANGE", index * share, last)
    for other, bus in zip(servers[1:], buses[1:], strict=True):
        clients[0].execute_command("CLUSTER MEET", "127.0.0.1", other.port, bus)
    give_up = time.monotonic() + _START_S
    while not all(_is_complete(client, len(servers)) for client in clients):
        if time.monotonic() > give_up:
            raise RuntimeError("the nodes of the cluster did not find each other")
        time.sleep(0.02)
    for client in clients:
        client.close()


def _is_complete(client: Any, num_nodes: int) -> bool:
    said = client.execute_command("CLUSTER INFO")
    fields = said if isinstance(said, dict) else {}
    return (
        fields.get("cluster_state") == "ok"
        and fields.get("cluster_known_nodes") == str(num_nodes)
        and fields.get("cluster_slots_assigned") == str(_NUM_SLOTS)
    )
