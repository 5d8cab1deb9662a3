"""The name of a block: the same everywhere for the same bytes, another one for other bytes.

Guards: a field left out of the root is a wrong hit; a changed encoding makes every stored block of
every user unfindable, which must never happen by accident.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, replace

import pytest

from kvist.keys import KEY_BYTES, HashChain, RootFields, block_key, lane_key, root_key

FIELDS = RootFields(
    weights_digest=bytes(range(32)),
    compute_dtype="bfloat16",
    formats=("bf16", "bf16"),
    rope='{"theta":10000.0}',
    windows="",
    block_size=4,
    packing_id="lhkv-1",
    layers="0-1",
    heads="0-2",
)
TOKENS = list(range(1, 13))

# Golden vectors of packing "lhkv-1". A change here is a new packing id or a new domain (".v2"),
# and a line in the release notes: all stored blocks are lost.
ROOT = "cab91c1b9f657de339f03731e236b1afa03c5e8d89c338106ea25129cab1eb94"
LANE = "d3e8dc25589d663de5b1d3f99b3309f2c768f8f6904eb463a2bc8930d6c6495c"
SALTED_LANE = "cc691eb124350846f4648fbaf26b93705561807c1b053cf11c4b96a92a6d45f6"
KEYS = [
    "b7b1be5a310a7513826524e7282bb5c60c9f348749012867c9d9b349281224c2",
    "a834a686f17b63cae73e8696a8f7a0c73abe75064eab3bc8eea43e4aceabd047",
    "eba14e047a20e5aa11b144754380dcd038fb0b7595533ef454ef123dcd8295e8",
]
KEY_WITH_EXTRA = "122decc29db476873a6d4a097582c1361574e4f956c8f1b31aaf205ea5ce3542"


def chain(root: RootFields = FIELDS, adapter: str = "", salt: str = "") -> HashChain:
    key = root_key(root)
    return HashChain(key, lane_key(key, adapter, salt), root.block_size)


def keys_of(root: RootFields = FIELDS, adapter: str = "", salt: str = "") -> list[bytes]:
    it = chain(root, adapter, salt)
    it.extend(TOKENS)
    return list(it.keys)


def test_golden_vectors_of_packing_lhkv_1():
    root = root_key(FIELDS)
    assert root.hex() == ROOT
    assert lane_key(root).hex() == LANE
    assert lane_key(root, "lora-7", "tenant").hex() == SALTED_LANE
    assert [key.hex() for key in keys_of()] == KEYS
    assert block_key(root, lane_key(root), TOKENS[:4], (b"image",)).hex() == KEY_WITH_EXTRA


@pytest.mark.parametrize("hash_seed", ["0", "1", "4242"])
def test_keys_are_the_same_in_another_process(hash_seed: str):
    program = (
        "from kvist.keys import *\n"
        f"f = RootFields(weights_digest=bytes(range(32)), compute_dtype='bfloat16',"
        f" formats=('bf16', 'bf16'), rope={FIELDS.rope!r}, windows='', block_size=4,"
        " packing_id='lhkv-1', layers='0-1', heads='0-2')\n"
        "c = HashChain(root_key(f), lane_key(root_key(f)), 4)\n"
        f"c.extend({TOKENS!r})\n"
        "print(*[k.hex() for k in c.keys])"
    )
    output = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert output.stdout.split() == KEYS


OTHER = {
    "weights_digest": bytes(32),
    "compute_dtype": "float32",
    "formats": ("bf16", "int8"),
    "calibration": "c1",
    "rotation": "hadamard",
    "rope": '{"theta":500000.0}',
    "windows": "[512,null]",
    "block_size": 8,
    "packing_id": "lhkv-2",
    "layers": "0-3",
    "heads": "0-3",
    "arithmetic": "batch-invariant",
}


def test_every_field_of_the_root_is_tried_below():
    assert set(OTHER) == {field.name for field in fields(RootFields)}


@pytest.mark.parametrize("name", OTHER)
def test_a_field_changes_root_lane_and_every_key(name: str):
    other = replace(FIELDS, **{name: OTHER[name]})
    assert root_key(other) != root_key(FIELDS)
    assert lane_key(root_key(other)) != lane_key(root_key(FIELDS))
    assert not set(keys_of(other)) & set(keys_of())


@pytest.mark.parametrize(
    ("adapter", "salt"), [("lora-7", ""), ("", "tenant"), ("lora-7", "tenant")]
)
def test_adapter_and_salt_change_every_key(adapter: str, salt: str):
    assert not set(keys_of(adapter=adapter, salt=salt)) & set(keys_of())


def test_adapter_and_salt_cannot_be_mistaken_for_each_other():
    root = root_key(FIELDS)
    lanes = {lane_key(root, a, s) for a, s in [("ab", ""), ("", "ab"), ("a", "b"), ("b", "a")]}
    assert len(lanes) == 4


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (("ab", "c"), ("a", "bc")),
        (("ab",), ("a", "b")),
        (("a", ""), ("a",)),
    ],
)
def test_formats_are_length_prefixed(left: tuple[str, ...], right: tuple[str, ...]):
    assert root_key(replace(FIELDS, formats=left)) != root_key(replace(FIELDS, formats=right))


def test_neighbouring_fields_cannot_be_mistaken_for_each_other():
    # "layers" and "packing_id" are neighbours in the sorted order of names.
    left = replace(FIELDS, layers="0-1p", packing_id="q")
    right = replace(FIELDS, layers="0-1", packing_id="pq")
    assert root_key(left) != root_key(right)


def test_domains_are_separate():
    """The same bytes as root, as lane and as block never give the same name."""
    root = root_key(FIELDS)
    names = {
        bytes(root),
        bytes(lane_key(root)),
        bytes(block_key(root, lane_key(root), ())),
        bytes(block_key(root, lane_key(root), TOKENS[:4])),
    }
    assert len(names) == 4
    assert all(len(name) == KEY_BYTES for name in names)


def test_a_block_key_depends_on_the_root_even_with_the_same_parent():
    root, other = root_key(FIELDS), root_key(replace(FIELDS, compute_dtype="float16"))
    lane = lane_key(root)
    assert block_key(root, lane, TOKENS[:4]) != block_key(other, lane, TOKENS[:4])


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ([1, 2, 3, 4], [1, 2, 4, 3]),
        ([1], [1, 0]),
        ([256], [1, 0]),
        ([2**32 - 1], [2**16 - 1]),
    ],
)
def test_tokens_change_the_key(left: list[int], right: list[int]):
    root = root_key(FIELDS)
    lane = lane_key(root)
    assert block_key(root, lane, left) != block_key(root, lane, right)


@pytest.mark.parametrize("extra", [(b"a",), (b"",), (b"a", b"b"), (b"ab",), (b"b", b"a")])
def test_extra_keys_change_the_key(extra: tuple[bytes, ...]):
    root = root_key(FIELDS)
    lane = lane_key(root)
    others = [(), (b"a",), (b"",), (b"a", b"b"), (b"ab",), (b"b", b"a")]
    key = block_key(root, lane, TOKENS[:4], extra)
    assert [o for o in others if block_key(root, lane, TOKENS[:4], o) == key] == [extra]


# ---------------------------------------------------------------------------------------- chains


def test_growing_a_chain_gives_the_keys_of_a_chain_from_scratch():
    grown = chain()
    for length in range(len(TOKENS) + 1):
        grown.extend(TOKENS[:length])
        fresh = chain()
        fresh.extend(TOKENS[:length])
        assert list(grown.keys) == list(fresh.keys)
        assert len(grown.keys) == length // 4


def test_a_chain_hashes_each_block_once(monkeypatch: pytest.MonkeyPatch):
    calls = []

    def counting(*args: object) -> bytes:
        calls.append(args)
        return block_key(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("kvist.keys.block_key", counting)
    it = chain()
    for length in range(len(TOKENS) + 1):
        it.extend(TOKENS[:length])
    assert len(calls) == len(TOKENS) // 4


def test_a_key_names_the_whole_past():
    left, right = chain(), chain()
    left.extend(TOKENS)
    right.extend([99, *TOKENS[1:]])
    assert not set(left.keys) & set(right.keys)


def test_parent_of_the_first_block_is_the_lane():
    it = chain()
    it.extend(TOKENS)
    assert it.parent(0) == lane_key(root_key(FIELDS))
    assert it.parent(2) == it.keys[1]


@pytest.mark.parametrize(("num_tokens", "left"), [(12, 3), (11, 2), (8, 2), (7, 1), (3, 0), (0, 0)])
def test_truncate_forgets_the_keys_of_blocks_that_are_no_longer_full(num_tokens: int, left: int):
    it = chain()
    it.extend(TOKENS)
    it.truncate(num_tokens)
    assert len(it.keys) == left
    it.extend(TOKENS)
    assert [key.hex() for key in it.keys] == KEYS


def test_a_forked_chain_goes_its_own_way():
    parent = chain()
    parent.extend(TOKENS[:8])
    child = parent.fork()
    child.extend([*TOKENS[:8], 50, 51, 52, 53])
    parent.extend(TOKENS)
    assert list(child.keys[:2]) == list(parent.keys[:2])
    assert child.keys[2] != parent.keys[2]
    assert parent.keys[2].hex() == KEYS[2]


def test_extra_keys_enter_at_their_block_and_all_after_it():
    root = root_key(FIELDS)
    it = HashChain(root, lane_key(root), 4, {1: (b"image",)})
    it.extend(TOKENS)
    same = [key.hex() == golden for key, golden in zip(it.keys, KEYS, strict=True)]
    assert same == [True, False, False]
