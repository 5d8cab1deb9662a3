"""`kvist inspect`: what it says of a store, and what it does to one."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvist.cli import app
from kvist.codecs.registry import make_codec
from kvist.errors import ConfigError
from kvist.testing.tier_driver import TierDriver, block_bytes, chain, metas, space
from kvist.tiers.base import Outcome
from kvist.tiers.checksum import SegmentChecksum
from kvist.tiers.disk.layout import Header, Kind
from kvist.tiers.disk.slab import SLAB_NAME
from kvist.tiers.disk.tier import DiskTier

BUDGET = 9 << 20
A, B = space("a"), space("b", tenant="someone")
KEYS, OTHERS = chain("x", 5), chain("y", 2)


def run(*args: object, code: int = 0) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["inspect", *map(str, args), "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout) if code < 2 else {"output": result.output}


def hits(directory: Path, **options: Any) -> int:
    tier = DiskTier(directory, BUDGET, **options)
    driver = TierDriver(tier, A, B)
    got = [*driver.load(A, KEYS), *driver.load(B, OTHERS)]
    for key, data in zip([*KEYS, *OTHERS], got, strict=True):
        assert data in (block_bytes(key), Outcome.MISS)
    tier.check()
    tier.close()
    return sum(isinstance(data, bytes) for data in got)


@pytest.fixture(params=["raw", "zstd"])
def directory(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    tier = DiskTier(tmp_path / "store", BUDGET, codec=make_codec(request.param))
    driver = TierDriver(tier, A, B)
    driver.store(A, KEYS)
    driver.store(B, OTHERS)
    tier.touch(A.digest, KEYS)
    tier.close()
    return tmp_path / "store"


def damage(directory: Path, place: int, length: int = 200) -> None:
    with (directory / SLAB_NAME).open("r+b") as file:
        file.seek(place)
        file.write(b"\x5a" * length)


def test_says_what_is_there(directory: Path) -> None:
    store = run(directory)["store"]
    assert store["num_blocks"] == 7
    assert store["budget_bytes"] <= BUDGET
    first, second = store["namespaces"]
    assert (first["model"], first["num_blocks"], first["hits"]) == ("model-a", 5, 5)
    assert (second["model"], second["num_blocks"], second["tenant"]) == ("model-b", 2, "someone")
    assert first["oldest_s"] >= first["newest_s"] >= 0
    plain = CliRunner().invoke(app, ["inspect", str(directory)])
    assert plain.exit_code == 0
    assert "model-a" in plain.stdout


def test_verify_finds_damage_and_repair_drops_it(directory: Path) -> None:
    assert run(directory, "--verify")["verify"]["is_whole"]
    # Anywhere in the records: what is hit is found.
    damage(directory, (64 << 10) + (32 << 10) * 3 + 5_000)
    verdict = run(directory, "--verify", code=1)["verify"]
    assert len(verdict["damaged"]) == 1
    repaired = run(directory, "--repair", code=1)
    assert repaired["repair"]["damaged"] == verdict["damaged"]
    assert repaired["store"]["num_blocks"] == 6
    assert run(directory, "--verify")["verify"]["is_whole"]
    assert hits(directory) == 6


def test_repair_without_superblocks_and_index(directory: Path) -> None:
    damage(directory, 0, 8192)
    (directory / "kvist.index").unlink()
    assert "no slab" in run(directory, code=2)["output"].replace("\n", " ")
    assert run(directory, "--repair")["repair"]["num_records"] == 9
    assert hits(directory) == 7


def test_repair_leaves_foreign_files_alone(tmp_path: Path) -> None:
    foreign = tmp_path / SLAB_NAME
    foreign.write_bytes(b"somebody's diary " * 10_000)
    run(tmp_path, "--repair", code=2)
    assert foreign.read_bytes() == b"somebody's diary " * 10_000


def test_backup_and_restore(directory: Path, tmp_path: Path) -> None:
    """While another process serves from it; into a new directory, and beside what is there."""
    tier = DiskTier(directory, BUDGET)
    file = tmp_path / "blocks.kvist"
    assert run(directory, "--backup", file)["backup"]["num_records"] == 9
    tier.close()
    assert file.stat().st_mode & 0o777 == 0o600
    restored = run(tmp_path / "new", "--restore", file)
    assert (restored["restore"]["num_records"], restored["restore"]["refused"]) == (7, 0)
    assert hits(tmp_path / "new") == 7
    again = run(directory, "--restore", file)
    assert (again["restore"]["num_records"], again["restore"]["refused"]) == (0, 7)
    assert hits(directory) == 7


def test_a_backup_has_no_room_in_the_tiers_own_directory(directory: Path) -> None:
    before = sorted(directory.iterdir())
    assert "bounded" in run(directory, "--backup", directory / "copy", code=2)["output"]
    assert sorted(directory.iterdir()) == before


def test_a_backup_that_claims_more_than_there_is_memory(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "backup"
    run(directory, "--backup", file)
    whole = file.read_bytes()
    start = 16 + int.from_bytes(whole[8:12], "little") - 4
    segments = tuple((0xFFFF_FFFF, bytes(16)) for _ in range(15))
    header = Header(
        Kind.BLOCK, True, 0, 1, A.digest, KEYS[0], b"", 0, 0.0, 0.0, segments, ((0, 1),)
    ).pack(SegmentChecksum())
    file.write_bytes(whole[:start] + len(header).to_bytes(4, "little") + header + b"few bytes")
    assert "cut short" in run(directory, "--restore", file, code=2)["output"]


def test_a_slab_that_lost_both_superblocks_is_left_alone_and_can_be_repaired(
    directory: Path,
) -> None:
    """Zeros where they were do not make it a new file: there are headers."""
    with (directory / SLAB_NAME).open("r+b") as file:
        file.write(bytes(8192))
    with pytest.raises(ConfigError, match="left alone"):
        DiskTier(directory, BUDGET)
    run(directory, "--repair")
    assert hits(directory) == 7


def test_a_backup_that_is_damaged(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "blocks.kvist"
    run(directory, "--backup", file)
    data = bytearray(file.read_bytes())
    file.write_bytes(data[:-30_000])
    assert "cut short" in run(tmp_path / "cut", "--restore", file, code=2)["output"]
    assert 0 < hits(tmp_path / "cut") < 7
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert run(tmp_path / "flip", "--restore", file)["restore"]["left_out"] == 1
    assert hits(tmp_path / "flip") == 6
    file.write_bytes(b"x" * 100)
    assert "no backup" in run(tmp_path / "none", "--restore", file, code=2)["output"]


def test_gc_frees_what_the_dead_left(directory: Path) -> None:
    tier = DiskTier(directory, BUDGET)
    tier.open_namespace(A)
    tier.delete(A.digest, KEYS)
    assert tier.drain(20.0)
    tier.close()
    swept = run(directory, "--gc")
    assert swept["gc"]["reclaimed"] == 0
    assert swept["store"]["num_blocks"] == 2
    assert hits(directory) == 2


def test_gc_takes_what_is_too_old_and_what_continues_it(directory: Path) -> None:
    """Blocks behind one that is gone would never be found: room for nothing."""
    now = [1e9]
    tier = DiskTier(directory, BUDGET, wall=lambda: now[0])
    driver = TierDriver(tier, A)
    old, young = chain("old", 3), chain("young", 2)
    driver.store(A, old[:1])
    now[0] = time.time()
    blocks = {key: block_bytes(key) for key in old[1:]}
    done = driver.wait(driver.begin_store(A, blocks, metas(old)[1:]))
    assert set(done.outcomes) == {Outcome.DONE}
    driver.store(A, young)
    tier.close()
    assert run(directory, "--gc")["gc"]["old"] == 0
    swept = run(directory, "--gc", "--older-than", 24)
    assert swept["gc"]["old"] == 3
    assert swept["store"]["num_blocks"] == 7 + 2
    assert run(directory, "--gc", "--older-than", 24)["gc"]["old"] == 0
    assert "--gc" in run(directory, "--older-than", 1, code=2)["output"]


def test_another_key_is_refused(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, BUDGET, tier_key="one")
    TierDriver(tier, A).store(A, KEYS)
    tier.close()
    assert "--tier-key" in run(tmp_path, code=2)["output"]
    assert "--tier-key" in run(tmp_path, "--tier-key", "two", code=2)["output"]
    assert run(tmp_path, "--tier-key", "one", "--verify")["verify"]["is_whole"]
    assert hits(tmp_path, tier_key="one") == 5
