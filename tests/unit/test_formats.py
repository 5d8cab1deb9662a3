"""KV formats: bytes that add up, names that people type, and names that do not exist."""

from __future__ import annotations

import dataclasses

import pytest

from kvist.errors import ConfigError
from kvist.formats.registry import FORMATS, resolve_format
from kvist.spec import LAYER_PACKING, PAIR_PACKING, KVSpec, LayerGroup, LayerKind

GROUP = LayerGroup(LayerKind.FULL, tuple(range(30)), 3, 64, 64)


@pytest.mark.parametrize(
    ("name", "block"), [("bf16", 368_640), ("fp16", 368_640), ("fp32", 737_280)]
)
def test_a_block_is_its_tokens_and_nothing_else(name, block):
    form = FORMATS[name]
    assert form.block_bytes(GROUP, 16) == 16 * form.token_bytes(GROUP) == block
    assert form.layout(GROUP, 16).block_bytes == block
    assert form.layout(GROUP, 16).itemsize == form.itemsize


def test_a_latent_group_packs_one_vector_a_token():
    group = LayerGroup(LayerKind.LATENT, tuple(range(61)), 1, 576, 0)
    assert FORMATS["bf16"].token_bytes(group) == 70_272
    layout = FORMATS["bf16"].layout(group, 64)
    assert layout.value_offset(0, 0) == layout.key_offset(1, 0) == 64 * 576


def test_a_spec_is_sized_by_a_format():
    spec = KVSpec.from_config({"model_type": "gemma2", "dtype": "bfloat16"})
    fp32 = FORMATS["fp32"]
    assert spec.token_bytes(packed=fp32.token_bytes) == 2 * spec.token_bytes()
    assert spec.kv_bytes(8192, packed=fp32.token_bytes) == 2 * spec.kv_bytes(8192)


def test_sidecar_bytes_are_on_the_bill_once_a_layer():
    form = dataclasses.replace(FORMATS["bf16"], sidecar_bytes=7)
    assert form.block_bytes(GROUP, 16) == FORMATS["bf16"].block_bytes(GROUP, 16) + 30 * 7


def test_a_state_group_has_no_blocks():
    group = LayerGroup(LayerKind.STATE, (0,), 0, 0, 0, state_elements=8)
    with pytest.raises(ConfigError, match="no blocks"):
        FORMATS["bf16"].layout(group, 16)
    assert FORMATS["bf16"].token_bytes(group) == 0


@pytest.mark.parametrize("block_size", [0, -16])
def test_a_block_has_at_least_one_slot(block_size):
    with pytest.raises(ConfigError, match=f"got {block_size}"):
        FORMATS["bf16"].layout(GROUP, block_size)


@pytest.mark.parametrize("block_size", [1, 7, 256])
def test_any_number_of_slots_is_a_layout(block_size):
    assert FORMATS["bf16"].layout(GROUP, block_size).block_size == block_size


@pytest.mark.parametrize(
    ("name", "block_size", "packing"),
    [
        ("bf16", 16, PAIR_PACKING),
        ("fp16", 48, PAIR_PACKING),
        ("fp32", 16, LAYER_PACKING),
        ("bf16", 8, LAYER_PACKING),
        ("bf16", 24, LAYER_PACKING),
    ],
)
def test_sixteen_bits_are_packed_in_pairs_where_a_block_can_be(name, block_size, packing):
    assert FORMATS[name].layout(GROUP, block_size).packing_id == packing


def test_what_pairs_do_not_hold_is_packed_plainly():
    odd = LayerGroup(LayerKind.FULL, (0,), 1, 65, 64)
    latent = LayerGroup(LayerKind.LATENT, (0,), 1, 576, 0)
    assert FORMATS["bf16"].layout(odd, 16).packing_id == LAYER_PACKING
    assert FORMATS["bf16"].layout(latent, 16).packing_id == LAYER_PACKING


@pytest.mark.parametrize(
    ("asked", "compute", "name"),
    [
        ("auto", "bfloat16", "bf16"),
        ("auto", "float16", "fp16"),
        ("auto", "float32", "fp32"),
        ("bfloat16", "float32", "bf16"),
        ("half", "float32", "fp16"),
        ("float16", "bfloat16", "fp16"),
        ("float", "bfloat16", "fp32"),
        ("float32", "bfloat16", "fp32"),
        ("bf16", "float16", "bf16"),
    ],
)
def test_names_resolve_as_in_vllm(asked, compute, name):
    assert resolve_format(asked, compute) is FORMATS[name]


@pytest.mark.parametrize("asked", ["fp8", "int8", "int4", "", "BF16", "float64"])
def test_a_format_that_cannot_run_is_refused_with_those_that_can(asked):
    with pytest.raises(ConfigError, match="bf16, fp16, fp32") as caught:
        resolve_format(asked, "bfloat16")
    assert f"kv_cache_dtype={asked!r}" in str(caught.value)


def test_an_unknown_compute_dtype_is_named_as_the_option_it_came_from():
    with pytest.raises(ConfigError, match=r"^dtype='float64'"):
        resolve_format("auto", "float64")


def test_exactness_follows_from_the_bits_of_the_types():
    exact = {(form.name, dtype) for form in FORMATS.values() for dtype in form.exact_for}
    assert exact == {
        ("bf16", "bfloat16"),
        ("fp16", "float16"),
        ("fp32", "bfloat16"),
        ("fp32", "float16"),
        ("fp32", "float32"),
    }
    assert FORMATS["fp32"].is_exact_for("float16")
    assert not FORMATS["bf16"].is_exact_for("float16")


def test_a_format_is_a_value():
    assert hash(FORMATS["bf16"]) == hash(dataclasses.replace(FORMATS["bf16"]))
    with pytest.raises(dataclasses.FrozenInstanceError):
        FORMATS["bf16"].itemsize = 1
