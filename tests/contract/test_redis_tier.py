"""The Redis tier over real servers: the shipped contract, on one server and on a cluster."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading

import pytest

if not os.environ.get("KVIST_REQUIRE_REDIS"):
    pytest.importorskip("redis", reason="needs the redis extra")
    pytest.importorskip("zstandard", reason="tiers need the tiers extra")

from kvist.codecs.zstd import ZstdCodec
from kvist.errors import ConfigError
from kvist.testing.redis_server import RedisServer, need_server, redis_cluster
from kvist.testing.tier_contract import A, TierContract
from kvist.testing.tier_driver import TierDriver, block_bytes, block_key, chain, space
from kvist.tiers.base import BlockMeta, LookupStatus, Outcome
from kvist.tiers.redis.tier import RedisTier


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    need_server()
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    need_server()
    with redis_cluster(tmp_path_factory.mktemp("cluster")) as servers:
        yield servers


@pytest.fixture
def tiers(server):
    """Make tiers over the server, emptied first; close them in the end."""
    made = []
    server.client().flushall()

    def make(**options):
        made.append(RedisTier(server.url, **options))
        return made[-1]

    yield make
    for tier in made:
        tier.close()


class TestOneServer(TierContract):
    counts = False
    histories = 15

    @pytest.fixture
    def make(self, server):
        def make(num_blocks):
            server.client().flushall()
            return RedisTier(server.url)

        return make


class TestSmallChunksCompressedAndKeyed(TierContract):
    counts = False
    histories = 8

    @pytest.fixture
    def make(self, server):
        def make(num_blocks):
            server.client().flushall()
            return RedisTier(
                server.url, chunk_bytes=7_000, codec=ZstdCodec(), tier_key="secret", num_threads=3
            )

        return make


class TestCluster(TierContract):
    counts = False
    histories = 8

    @pytest.fixture
    def make(self, cluster):
        def make(num_blocks):
            for node in cluster:
                node.client().flushall()
            return RedisTier(cluster[0].url)

        return make


def values(server):
    """Return everything on the server but descriptors, by name."""
    client = server.client()
    names = [name for name in client.keys("*") if b"{" in name]
    return {name: client.get(name) for name in names}


def is_header(name):
    return name.endswith(b"}")


def test_another_process_finds_what_was_stored(tiers):
    """And the same one after a restart: nothing that counts is kept here."""
    writer, reader = TierDriver(tiers(), A), TierDriver(tiers(), A)
    keys = chain("x", 3)
    writer.store(A, keys)
    assert reader.hits(A, keys) == [True] * 3
    assert reader.load(A, keys) == [block_bytes(key) for key in keys]


def test_a_miss_is_remembered_for_a_second_and_no_longer(tiers):
    now = [100.0]
    writer, reader = TierDriver(tiers(), A), TierDriver(tiers(clock=lambda: now[0]), A)
    (key,) = chain("x", 1)
    assert reader.hits(A, [key]) == [False]
    writer.store(A, [key])
    assert reader.hits(A, [key]) == [False]
    now[0] += 1.0
    assert reader.hits(A, [key]) == [True]


def test_the_waker_is_called_when_a_lookup_is_answered(tiers):
    """Whoever got RETRY sleeps until then."""
    driver = TierDriver(tiers(), A)
    woken = threading.Event()
    driver.tier.set_waker(woken.set)
    (answer,) = driver.tier.lookup(A.digest, [block_key("x")])
    assert answer.status is LookupStatus.RETRY
    assert woken.wait(20)
    (answer,) = driver.tier.lookup(A.digest, [block_key("x")])
    assert (answer.status, answer.reason) == (LookupStatus.MISS, "absent")


@pytest.mark.parametrize("where", ["one server", "cluster"])
def test_a_lookup_costs_one_round_trip_to_each_node(where, server, cluster):
    servers = [server] if where == "one server" else cluster
    tier = RedisTier(servers[0].url)
    driver = TierDriver(tier, A)
    driver.hits(A, [block_key("to connect")])
    assert tier.drain(20)
    nodes = tier._servers.nodes()
    assert len(nodes) == len(servers)
    exchanges = []
    for node in nodes:
        inner = node._exchange
        node._exchange = lambda connection, commands, node=node, inner=inner: (
            exchanges.append((node.label, len(commands))) or inner(connection, commands)
        )
    keys = [block_key(("many", index)) for index in range(500)]
    assert driver.hits(A, keys) == [False] * 500
    assert len(exchanges) == len(nodes)
    assert sum(count for _, count in exchanges) == 500
    tier.close()


def test_no_string_is_longer_than_a_chunk_and_all_expire(tiers, server):
    driver = TierDriver(tiers(chunk_bytes=7_000, ttl_s=3600.0), A)
    (key,) = chain("x", 1)
    driver.store(A, [key])
    found = values(server)
    assert sorted(len(value) for value in found.values()) == [
        len(next(value for name, value in found.items() if is_header(name))), 5_000, *[7_000] * 5
    ]  # fmt: skip
    client = server.client()
    assert driver.tier.drain(20)
    lives = {name: client.ttl(name) for name in client.keys("*")}
    assert all(3590 <= life <= 3660 for life in lives.values()), lives
    (header,) = filter(is_header, found)
    chunks = [name for name in found if name != header]
    assert min(lives[name] for name in chunks) > lives[header] + 50, "they outlive their header"


def test_touch_and_lock_renew_the_time_to_live(tiers, server):
    driver = TierDriver(tiers(ttl_s=1000.0), A)
    touched, locked, left = (block_key(name) for name in ("touched", "locked", "left"))
    for key in (touched, locked, left):
        driver.store(A, [key])
    client = server.client()
    for name in client.keys("*"):
        client.expire(name, 100)
    driver.tier.touch(A.digest, [touched, block_key("stranger")])
    assert driver.tier.lock(A.digest, [locked, block_key("stranger")], 5000.0) == [True, False]
    assert driver.tier.drain(20)
    lives = {
        key: min(client.ttl(name) for name in client.keys(f"*{key.hex()}*"))
        for key in (touched, locked, left)
    }
    assert 900 < lives[touched] <= 1000
    assert 4900 < lives[locked] <= 5000
    assert lives[left] <= 100


def test_touching_again_and_again_costs_the_server_nothing(tiers, server):
    """Hot blocks are touched in every step; a life that was just renewed needs no renewal."""
    now = [0.0]
    driver = TierDriver(tiers(ttl_s=1000.0, clock=lambda: now[0]), A)
    (key,) = chain("x", 1)
    driver.store(A, [key])
    client = server.client()

    def renewals():
        driver.tier.touch(A.digest, [key])
        assert driver.tier.drain(20)
        return client.info("commandstats")["cmdstat_pexpire"]["calls"]

    first = renewals()
    assert [renewals() for _ in range(5)] == [first] * 5
    now[0] += 100.0
    assert renewals() > first


def test_a_block_whose_time_is_up_is_a_miss(tiers, server):
    now = [0.0]
    driver = TierDriver(tiers(clock=lambda: now[0]), A)
    (key,) = chain("x", 1)
    driver.store(A, [key])
    for name in values(server):
        server.client().delete(name)
    assert driver.hits(A, [key]) == [True], "remembered"
    assert driver.load(A, [key]) == [Outcome.MISS]
    assert driver.hits(A, [key]) == [False]


def test_chunks_without_a_header_are_no_block(tiers, server):
    """A writer that died half way: what it left is not found, and does not keep others out."""
    driver = TierDriver(tiers(), A)
    (key,) = chain("x", 1)
    driver.store(A, [key])
    (header,) = filter(is_header, values(server))
    server.client().delete(header)
    other = TierDriver(tiers(), A)
    assert other.hits(A, [key]) == [False]
    assert other.store(A, [key]) == (Outcome.DONE,)
    assert other.load(A, [key]) == [block_bytes(key)]


def test_a_header_whose_chunk_was_evicted_goes_too(tiers, server):
    driver = TierDriver(tiers(chunk_bytes=10_000), A)
    (key,) = chain("x", 1)
    driver.store(A, [key])
    chunks = sorted(name for name in values(server) if not is_header(name))
    server.client().delete(chunks[2])
    assert driver.load(A, [key], range(1)) == [block_bytes(key)[:12_000]], "it is not in there"
    assert driver.load(A, [key]) == [Outcome.MISS]
    assert values(server) == {}, "nothing is left that could be found"


def test_writers_of_one_block_do_not_mix(tiers, server):
    """They may encode differently: a header must never point to another writer's chunks."""
    drivers = [
        TierDriver(tiers(chunk_bytes=3_000), A),
        TierDriver(tiers(chunk_bytes=5_000, codec=ZstdCodec()), A),
    ]
    keys = [block_key(index) for index in range(20)]
    jobs = [
        (driver, driver.begin_store(A, {key: block_bytes(key) for key in keys}, [BlockMeta()] * 20))
        for driver in drivers
    ]
    outcomes = [driver.wait(job).outcomes for driver, job in jobs]
    assert all(pair.count(Outcome.DONE) == 1 for pair in zip(*outcomes, strict=True))
    for driver in drivers:
        assert driver.load(A, keys) == [block_bytes(key) for key in keys]
    headers = [name for name in values(server) if is_header(name)]
    assert len(headers) == 20
    drivers[0].tier.delete(A.digest, keys)
    assert drivers[0].tier.drain(20)
    assert values(server) == {}, "the losers' chunks are gone as well"


def test_what_was_stored_compressed_is_read_by_a_raw_tier(tiers):
    TierDriver(tiers(codec=ZstdCodec()), A).store(A, chain("x", 2))
    reader = TierDriver(tiers(), A)
    assert reader.load(A, chain("x", 2)) == [block_bytes(key) for key in chain("x", 2)]


def test_who_has_another_tier_key_finds_nothing(tiers):
    keys = chain("x", 1)
    TierDriver(tiers(tier_key="ours"), A).store(A, keys)
    for tier_key, found in (("", False), ("theirs", False), ("ours", True)):
        assert TierDriver(tiers(tier_key=tier_key), A).hits(A, keys) == [found]


def test_a_namespace_that_means_something_else_on_the_server_is_not_used(tiers):
    keys = chain("x", 1)
    TierDriver(tiers(), A).store(A, keys)
    liar = space("a", segments=(20_000, 20_000))
    driver = TierDriver(tiers(), liar)
    assert driver.tier.drain(20)
    (answer,) = driver.lookup(liar, keys)
    assert (answer.status, answer.reason) == (LookupStatus.MISS, "namespace_conflict")
    assert driver.load(liar, keys) == [Outcome.MISS]
    assert driver.store(liar, keys) == (Outcome.REFUSED,)
    assert "another layout" in driver.tier.trouble()
    assert TierDriver(tiers(), A).load(A, keys) == [block_bytes(keys[0])], "the others' is unharmed"


def test_bytes_that_are_there_are_not_sent_again(tiers, server):
    first, second = TierDriver(tiers(), A), TierDriver(tiers(), A)
    keys = chain("x", 3)
    first.store(A, keys)
    before = server.client().info("stats")["total_net_input_bytes"]
    job = second.begin_store(A, {key: block_bytes(key) for key in keys})
    done = second.wait(job)
    assert (done.outcomes, done.reason) == ((Outcome.REFUSED,) * 3, "there_already")
    assert server.client().info("stats")["total_net_input_bytes"] - before < A.block_bytes


def test_usage_is_the_servers_memory(tiers, server):
    server.client().config_set("maxmemory", "64mb")
    try:
        driver = TierDriver(tiers(), A)
        driver.store(A, chain("x", 5))
        driver.tier.usage()
        assert driver.tier.drain(20)
        usage = driver.tier.usage()
    finally:
        server.client().config_set("maxmemory", 0)
    assert usage.capacity_bytes == 64 << 20
    assert 5 * A.block_bytes < usage.used_bytes < 64 << 20


@pytest.mark.parametrize(
    "url",
    ["http://u:secret@host:1", "redis://u:secret@host:port", "redis://u:secret@", "host:6379", ""],
)
def test_a_bad_address_is_said_without_its_password(url):
    with pytest.raises(ConfigError, match="redis://host:6379/0") as caught:
        RedisTier(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("option", ["ttl_s", "timeout_s", "chunk_bytes", "num_threads"])
def test_numbers_must_be_positive(option):
    with pytest.raises(ConfigError, match="above 0"):
        RedisTier("redis://127.0.0.1:1", **{option: 0})


@pytest.fixture
def secured(tmp_path):
    """Run a server that wants TLS and a user's password."""
    need_server()
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: no certificate to serve")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )  # fmt: skip
    options = [
        "--tls-cert-file", str(certificate), "--tls-key-file", str(key),
        "--tls-ca-cert-file", str(certificate), "--tls-auth-clients", "no",
        "--user", "default", "off", "--user", "kvist", "on", ">hush", "~kvist:*", "+@all",
    ]  # fmt: skip
    with RedisServer(tmp_path / "server", *options, tls=True) as server:
        yield f"127.0.0.1:{server.port}/0?ssl_ca_certs={certificate}"


def test_tls_and_a_user(secured):
    driver = TierDriver(RedisTier(f"rediss://kvist:hush@{secured}"), A)
    driver.store(A, chain("x", 2))
    assert driver.load(A, chain("x", 2)) == [block_bytes(key) for key in chain("x", 2)]
    assert driver.tier.trouble() == ""
    driver.tier.close()


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("rediss://kvist:wrong@{}", "Authentication"),
        ("rediss://{}", "Authentication|NOAUTH|NoPermission"),
        ("redis://kvist:hush@{}", "ConnectionError|closed"),
    ],
)
def test_who_is_not_let_in_is_told_and_goes_on_without(secured, url, complaint):
    address = secured if url.startswith("rediss") else secured.partition("?")[0]
    driver = TierDriver(RedisTier(url.format(address)), A)
    assert driver.hits(A, chain("x", 2)) == [False, False]
    assert driver.store(A, chain("x", 2)) == (Outcome.FAILED,) * 2
    assert re.search(complaint, driver.tier.trouble())
    assert "hush" not in driver.tier.trouble()
    driver.tier.close()
