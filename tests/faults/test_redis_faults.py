"""Whatever a Redis server does, blocks come whole or not at all, and nobody waits for it twice."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import contextmanager, suppress
from random import Random

import pytest

if not os.environ.get("KVIST_REQUIRE_REDIS"):
    pytest.importorskip("redis", reason="needs the redis extra")
    pytest.importorskip("xxhash", reason="tiers need the tiers extra")

from redis.crc import key_slot

from kvist.testing.redis_server import RedisServer, free_port, need_server, redis_cluster
from kvist.testing.tier_driver import PATIENCE_S, TierDriver, block_bytes, block_key, chain, space
from kvist.tiers.base import LookupStatus, Outcome
from kvist.tiers.redis.tier import RedisTier

A = space("a")
KEYS = chain("x", 3)
SMALL = space("small", segments=(40, 60))
NO_CLUSTER = b"-ERR This instance has cluster support disabled\r\n"


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory):
    need_server()
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(tmp_path):
    need_server()
    with RedisServer(tmp_path / "redis") as server:
        yield server


@contextmanager
def driving(url, *spaces, **options):
    tier = RedisTier(url, **options)
    try:
        yield TierDriver(tier, *(spaces or (A,)))
    finally:
        tier.close()


class FakeServer:
    """Accepts connections on the loopback and does with each what a test says."""

    def __init__(self, behave):
        self.num_connections = 0
        self._behave = behave
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def url(self):
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}"

    def _accept(self):
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            self._sockets.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection):
        with suppress(OSError):
            self._behave(connection)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for one in (self._listener, *self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join()


def until(condition):
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up, "it did not come"
        time.sleep(0.02)


def use_in_vain(driver, keys=KEYS):
    """Do all that there is to do with a server that is not there."""
    (first, *_) = driver.lookup(A, keys)
    assert first.status is LookupStatus.MISS
    assert first.reason
    assert driver.store(A, keys) == (Outcome.FAILED,) * len(keys)
    assert driver.load(A, keys) == [Outcome.FAILED] * len(keys)
    driver.tier.touch(A.digest, keys)
    driver.tier.lock(A.digest, keys, 5.0)
    driver.tier.delete(A.digest, keys)
    driver.tier.usage()
    assert list(driver.tier.entries(A.digest)) == []
    assert driver.tier.drain(PATIENCE_S)


def silent(connection):
    while connection.recv(1 << 16):
        pass


def test_a_server_that_is_not_there_is_asked_once(monkeypatch):
    """On a clock that stands still no probe is ever due: all further answers come from here."""
    tried = []
    connect = socket.socket.connect
    monkeypatch.setattr(
        socket.socket, "connect", lambda self, at: tried.append(at) or connect(self, at)
    )
    with driving(f"redis://127.0.0.1:{free_port()}", clock=lambda: 0.0) as driver:
        for _ in range(5):
            use_in_vain(driver)
        assert "refused" in driver.tier.trouble()
    assert len(tried) == 1


def test_a_server_that_hangs_is_waited_for_once():
    with (
        FakeServer(silent) as fake,
        driving(fake.url, timeout_s=0.3, clock=lambda: 0.0) as driver,
    ):
        for _ in range(5):
            use_in_vain(driver)
        assert "imeout" in driver.tier.trouble()
        assert fake.num_connections == 1


def test_a_server_that_is_never_silent_and_never_done_is_cut_off():
    """The timeout of the library never comes: a byte every now and then is no silence."""

    def trickle(connection):
        connection.recv(1 << 16)
        connection.sendall(NO_CLUSTER)
        connection.recv(1 << 16)
        connection.sendall(b"$1000000\r\n")
        while True:
            connection.sendall(b"x")
            time.sleep(0.02)

    with FakeServer(trickle) as fake, driving(fake.url, timeout_s=0.2) as driver:
        assert driver.hits(A, KEYS) == [False] * 3
        assert driver.tier.trouble()


def test_a_server_that_is_slow_in_the_handshake_is_cut_off_too():
    def trickle(connection):
        connection.recv(1 << 16)
        while True:
            connection.sendall(b"+")
            time.sleep(0.02)

    with FakeServer(trickle) as fake:
        url = fake.url.replace("redis://", "redis://user:password@")
        with driving(url, timeout_s=0.2) as driver:
            assert driver.hits(A, KEYS) == [False] * 3


GARBAGE = {
    "noise": Random(1).randbytes(4096),
    "http": b"HTTP/1.1 400 Bad Request\r\nServer: nginx\r\n\r\n",
    "yes to all": b"+OK\r\n" * 200,
    "numbers": b":1\r\n" * 200,
    "nothing": b"$-1\r\n" * 200,
    "empty": b"$0\r\n\r\n" * 200,
    "short string": b"$5\r\nab\r\n",
    "endless string": b"$99999999999\r\nabc",
    "bad number": b":abc\r\n",
    "bad length": b"*-7\r\n$-3\r\n",
    "deep": b"*1\r\n" * 20_000 + b":1\r\n",
    "wide": b"*1000000000\r\n:1\r\n",
    "moved": b"-MOVED 1 127.0.0.1:1\r\n" * 200,
    "moved nowhere": b"-MOVED\r\n" * 200,
    "error": b"-ERR go away\r\n" * 200,
    "loading": b"-LOADING Redis is loading the dataset in memory\r\n" * 200,
    "lists": b"*2\r\n$1\r\na\r\n*1\r\n:3\r\n" * 200,
    "zeros": bytes(4096),
}


@pytest.mark.parametrize("known", [False, True], ids=["from the start", "once it is known"])
@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_is_a_miss(kind, known):
    """No error reaches the caller, no block is invented, and the tier still closes."""

    def babble(connection):
        if known:
            connection.recv(1 << 16)
            connection.sendall(NO_CLUSTER)
        while connection.recv(1 << 16):
            connection.sendall(GARBAGE[kind])

    with FakeServer(babble) as fake, driving(fake.url, timeout_s=0.3) as driver:
        assert driver.hits(A, KEYS) == [False] * 3
        driver.store(A, KEYS)
        for came in driver.load(A, KEYS):
            assert isinstance(came, Outcome)
        driver.tier.delete(A.digest, KEYS)
        driver.tier.touch(A.digest, KEYS)
        driver.tier.usage()
        assert list(driver.tier.entries(A.digest)) == []
        assert driver.tier.drain(PATIENCE_S)


def test_a_byte_flipped_anywhere_is_never_believed(shared_server):
    """Every byte of header and chunk, one after the other: the bytes stored, or none."""
    client = shared_server.client()
    client.flushall()
    (key,) = chain("x", 1)
    with driving(shared_server.url, SMALL, chunk_bytes=64) as driver:
        driver.store(SMALL, [key])
        sound = {name: client.get(name) for name in client.keys("*{*}*")}
        assert len(sound) == 3
        outcomes = set()
        for name, value in sound.items():
            for position in range(len(value)):
                flipped = bytearray(value)
                flipped[position] ^= 1 << (position % 8)
                for other, whole in sound.items():
                    client.set(other, whole)
                client.set(name, bytes(flipped))
                (came,) = driver.load(SMALL, [key])
                assert came in (Outcome.MISS, Outcome.DAMAGED)
                outcomes.add(came)
        assert Outcome.DAMAGED in outcomes
        for name, whole in sound.items():
            client.set(name, whole)
        assert driver.load(SMALL, [key]) == [block_bytes(key, 100)]


def test_a_sound_value_under_another_name_is_not_believed(shared_server):
    """Server or proxy mix up replies, or somebody copies names: identity is in the checksums."""
    client = shared_server.client()
    client.flushall()
    mine, other = block_key("mine"), block_key("other")
    with driving(shared_server.url, SMALL) as driver:
        driver.store(SMALL, [mine])
        driver.store(SMALL, [other])

        def names(key):
            found = sorted(client.keys(f"*{key.hex()}*"), key=len)
            assert len(found) == 2
            return found

        (my_header, my_chunk), (its_header, its_chunk) = names(mine), names(other)
        client.set(my_chunk, client.get(its_chunk))
        assert driver.load(SMALL, [mine]) == [Outcome.DAMAGED]
        client.set(my_header, client.get(its_header))
        assert driver.load(SMALL, [mine]) == [Outcome.DAMAGED]
        assert driver.load(SMALL, [other]) == [block_bytes(other, 100)]


def test_without_the_tier_key_nobody_makes_a_block_that_passes(shared_server):
    """Who may write to the server, but lacks the key, puts bytes and plain checksums there."""
    shared_server.client().flushall()
    (key,) = chain("x", 1)
    with (
        driving(shared_server.url, SMALL, tier_key="ours") as ours,
        driving(shared_server.url, SMALL) as forger,
    ):
        ours.store(SMALL, [key])
        forger.wait(forger.begin_store(SMALL, {key: b"\x66" * 100}))
        client = shared_server.client()
        headers = [name for name in client.keys("*") if name.endswith(b"}")]
        assert len(headers) == 2
        values = [client.get(name) for name in headers]
        for name, value in zip(headers, reversed(values), strict=True):
            client.set(name, value)
        assert ours.load(SMALL, [key]) == [Outcome.DAMAGED]


def test_a_server_that_was_restarted_lost_its_blocks_and_is_used_again(server):
    with driving(server.url) as driver:
        driver.store(A, KEYS)
        server.kill()
        assert driver.load(A, KEYS) == [Outcome.FAILED] * 3
        assert driver.store(A, chain("y", 1)) == (Outcome.FAILED,)
        server.start()
        until(lambda: not driver.tier.trouble())
        assert driver.load(A, KEYS) == [Outcome.MISS] * 3
        assert driver.store(A, KEYS) == (Outcome.DONE,) * 3
        assert driver.load(A, KEYS) == [block_bytes(key) for key in KEYS]


def test_a_restart_between_two_uses_goes_unnoticed(server):
    """Connections that the server closed while nobody looked are not held against it."""
    with driving(server.url) as driver:
        driver.store(A, KEYS)
        assert driver.tier.drain(PATIENCE_S), "nothing is on its way"
        server.kill()
        server.start()
        assert driver.load(A, KEYS) == [Outcome.MISS] * 3
        assert driver.tier.trouble() == ""


def test_a_server_that_hung_is_used_again_with_all_it_has(server):
    with driving(server.url, timeout_s=0.5) as driver:
        driver.store(A, KEYS)
        server.freeze()
        assert driver.load(A, KEYS) == [Outcome.FAILED] * 3
        assert "imeout" in driver.tier.trouble()
        server.thaw()
        until(lambda: not driver.tier.trouble())
        assert driver.load(A, KEYS) == [block_bytes(key) for key in KEYS]


def test_a_tier_can_be_closed_while_its_server_hangs(server):
    """Every job is told, though the server would be waited for much longer."""
    tier = RedisTier(server.url, timeout_s=600.0)
    driver = TierDriver(tier, A)
    driver.store(A, KEYS)
    server.freeze()
    jobs = [driver.begin_load(A, KEYS)[0] for _ in range(4)]
    jobs.append(driver.begin_store(A, {key: block_bytes(key) for key in chain("y", 2)}))
    tier.lookup(A.digest, [block_key("z")])
    tier.close()
    driver.poll()
    assert driver.ended.keys() == set(jobs)
    assert not any(Outcome.DONE in done.outcomes for done in driver.ended.values())


def test_a_full_server_refuses_and_is_left_alone_for_a_while(server):
    now = [0.0]
    client = server.client()
    with driving(server.url, clock=lambda: now[0]) as driver:
        driver.store(A, KEYS)
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 300_000)
        more = [block_key(("more", index)) for index in range(40)]
        outcomes = [driver.store(A, [key])[0] for key in more]
        assert set(outcomes) == {Outcome.DONE, Outcome.REFUSED}
        stored = [key for key, o in zip(more, outcomes, strict=True) if o is Outcome.DONE]
        assert driver.load(A, [*KEYS, *stored]) == [block_bytes(key) for key in [*KEYS, *stored]]
        before = client.info("stats")["total_net_input_bytes"]
        done = driver.wait(driver.begin_store(A, {more[-1]: block_bytes(more[-1])}))
        assert (done.outcomes, done.reason) == ((Outcome.REFUSED,), "server_full")
        assert client.info("stats")["total_net_input_bytes"] - before < A.block_bytes
        assert driver.tier.trouble() == "", "it serves what it has"
        client.config_set("maxmemory", 0)
        now[0] += 5.0
        assert driver.store(A, [more[-1]]) == (Outcome.DONE,)


def test_a_server_that_evicts_what_it_likes_serves_whole_blocks_or_none(server):
    """It evicts strings, not blocks: headers without chunks, chunks without headers."""
    client = server.client()
    client.config_set("maxmemory-policy", "allkeys-random")
    client.config_set("maxmemory", client.info("memory")["used_memory"] + 2_500_000)
    with driving(server.url, chunk_bytes=20_000) as driver:
        keys = [block_key(index) for index in range(100)]
        for key in keys:
            driver.store(A, [key])
        came = driver.load(A, keys)
        for key, got in zip(keys, came, strict=True):
            assert got in (Outcome.MISS, block_bytes(key))
        assert Outcome.MISS in came
        assert any(isinstance(got, bytes) for got in came)


@pytest.fixture
def cluster(tmp_path):
    need_server()
    with redis_cluster(tmp_path) as servers:
        yield servers


def test_a_cluster_that_lost_a_node_serves_what_the_others_hold(cluster):
    keys = [block_key(index) for index in range(30)]
    with driving(cluster[0].url, timeout_s=0.5) as driver:
        for key in keys:
            assert driver.store(A, [key]) == (Outcome.DONE,)
        dead = f"127.0.0.1:{cluster[1].port}"
        name = driver.tier._blocks.name
        lost = [
            key for key in keys if driver.tier._servers.node_for(name(A.digest, key)).label == dead
        ]
        assert 0 < len(lost) < len(keys)
        kept = [key for key in keys if key not in lost]
        cluster[1].kill()
        driver.load(A, lost[:1])
        came = dict(zip(keys, driver.load(A, keys), strict=True))
        assert {came[key] for key in lost} == {Outcome.FAILED}
        assert [came[key] for key in kept] == [block_bytes(key) for key in kept]
        assert dead in driver.tier.trouble()
        fresh = {key: block_bytes(key) for key in [block_key(("new", i)) for i in range(20)]}
        outcomes = driver.wait(driver.begin_store(A, fresh)).outcomes
        assert set(outcomes) == {Outcome.DONE, Outcome.FAILED}
        cluster[1].start()
        until(lambda: not driver.tier.trouble())
        until(lambda: driver.store(A, lost)[0] is not Outcome.FAILED)
        assert driver.load(A, keys) == [block_bytes(key) for key in keys]


def test_a_slot_that_moved_is_found_again(cluster):
    """What the map says is found out to be old by the first that uses it, and learnt anew."""
    with driving(cluster[0].url) as driver:
        driver.hits(A, KEYS)
        (key,) = KEYS[:1]
        name = driver.tier._blocks.name(A.digest, key)
        slot = key_slot(name)
        owner = driver.tier._servers.node_for(name).label
        target = next(node for node in cluster if not owner.endswith(f":{node.port}"))
        target_id = target.client().execute_command("CLUSTER MYID")
        for node in sorted(cluster, key=lambda node: node is not target):
            node.client().execute_command("CLUSTER SETSLOT", slot, "NODE", target_id)
        assert driver.store(A, [key]) == (Outcome.FAILED,)
        until(lambda: driver.store(A, [key])[0] is not Outcome.FAILED)
        assert driver.tier._servers.node_for(name).label == f"127.0.0.1:{target.port}"
        assert driver.load(A, [key]) == [block_bytes(key)]
