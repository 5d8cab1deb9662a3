"""What the C++ kernels refuse before they touch memory.

Guards: a wrong dtype, shape, stride, block id or layer read as if it were right. The calls here go
to ``kvist._C`` itself, past all that Python checks or casts first.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
_C = pytest.importorskip("kvist._C")

BF16, I32 = torch.bfloat16, torch.int32
LAYERS, HEADS, GROUP, DIM, SLOTS, BLOCKS = 2, 2, 3, 64, 16, 6


def ids(*values):
    return torch.tensor(values, dtype=I32)


def layout(packing="lhkv-2", block_size=SLOTS, key_dim=DIM):
    return _C.Layout(LAYERS, HEADS, key_dim, DIM, block_size, packing)


def pool(dtype=BF16):
    return torch.zeros(BLOCKS, LAYERS * HEADS * SLOTS * 2 * DIM, dtype=dtype)


def contexts(**changes):
    arguments = {
        "block_tables": ids(3, 1, 0, 5).view(2, 2),
        "seq_lens": ids(20, 30),
        "query_start": ids(0, 1, 5),
        "num_decodes": 1,
        "block_size": SLOTS,
        "window": 0,
    }
    return _C.Contexts.of_tables(**{**arguments, **changes})


def attend(kernel, **changes):
    arguments = {
        "query": torch.zeros(5, HEADS * GROUP, DIM, dtype=BF16),
        "pool": pool(),
        "contexts": contexts(),
        "out": torch.zeros(5, HEADS * GROUP, DIM, dtype=BF16),
        "lse": None,
        "sinks": None,
        "layout": layout(),
        "layer": 1,
        "scale": 0.1,
        "softcap": 0.0,
        "isa": _C.Isa.portable,
        "workspace": _C.Workspace(),
    }
    arguments.update(changes)
    getattr(_C, kernel)(*arguments.values())
    return arguments["out"]


WRONG_CALLS = {
    "a query of integers": ({"query": torch.zeros(5, 6, DIM, dtype=I32)}, TypeError, "query"),
    "a query of doubles": ({"query": torch.zeros(5, 6, DIM).double()}, TypeError, "query"),
    "too few queries": ({"query": torch.zeros(4, 6, DIM)}, ValueError, "query"),
    "queries that KV heads cannot share": (
        {"query": torch.zeros(5, 5, DIM), "out": torch.zeros(5, 5, DIM)},
        ValueError,
        "no multiple of 2",
    ),
    "a query whose rows are scattered": (
        {"query": torch.zeros(5, 6, 2 * DIM)[..., ::2]},
        ValueError,
        "query must be contiguous",
    ),
    "an out whose rows are scattered": (
        {"out": torch.zeros(5, DIM, 6).transpose(1, 2)},
        ValueError,
        "out must be contiguous",
    ),
    "an out that is too small": ({"out": torch.zeros(4, 6, DIM)}, ValueError, "out"),
    "an out of integers": ({"out": torch.zeros(5, 6, DIM, dtype=I32)}, TypeError, "out"),
    "a pool in parts": ({"pool": pool()[:, 1:]}, ValueError, "pool"),
    "a pool turned around": ({"pool": pool().t().contiguous().t()}, ValueError, "pool"),
    "a pool of integers": ({"pool": pool(torch.int16)}, TypeError, "pool"),
    "a pool whose packing does not hold it": ({"pool": pool(torch.float32)}, ValueError, "lhkv-2"),
    "a pool of fewer blocks": ({"pool": pool()[:5]}, IndexError, "block_tables has 5"),
    "another block size": ({"layout": layout(block_size=32)}, ValueError, "block_size of 16"),
    "a layer too many": ({"layer": LAYERS}, IndexError, "layer has 2"),
    "a layer below zero": ({"layer": -1}, IndexError, "layer has -1"),
    "a lse of bf16": ({"lse": torch.zeros(5, 6, dtype=BF16)}, TypeError, "lse"),
    "a lse too small": ({"lse": torch.zeros(5, 5)}, ValueError, "lse"),
    "sinks too few": ({"sinks": torch.zeros(5)}, ValueError, "sinks"),
    "sinks in bf16": ({"sinks": torch.zeros(6, dtype=BF16)}, TypeError, "sinks"),
    "a scale of zero": ({"scale": 0.0}, ValueError, "scale"),
    "a scale that is no number": ({"scale": float("nan")}, ValueError, "scale"),
    "no tensor at all": ({"query": [1, 2]}, TypeError, "query is no tensor"),
    "a tensor elsewhere": ({"query": torch.zeros(5, 6, DIM, device="meta")}, TypeError, "CPU"),
}


@pytest.mark.parametrize("kernel", ["decode", "prefill"])
@pytest.mark.parametrize("name", WRONG_CALLS)
def test_attention_refuses(kernel, name):
    changes, error, says = WRONG_CALLS[name]
    with pytest.raises(error, match=says):
        attend(kernel, **changes)


def test_the_calls_above_are_right_but_for_what_they_change():
    assert not attend("decode")[0].any()
    assert not attend("prefill")[1:].any()


WRONG_TABLES = {
    "ids of 64 bits": ({"block_tables": torch.zeros(2, 2, dtype=torch.int64)}, TypeError, "int64"),
    "a block below zero": ({"block_tables": ids(0, -1, 0, 0).view(2, 2)}, IndexError, "-1"),
    "columns turned around": (
        {"block_tables": ids(0, 1, 2, 3).view(2, 2).t()},
        ValueError,
        "table",
    ),
    "a table too short": ({"seq_lens": ids(20, 33)}, ValueError, "needs 3"),
    "a table too few": ({"block_tables": ids(0, 1).view(1, 2)}, ValueError, "block_tables"),
    "a context of nothing": ({"seq_lens": ids(0, 30)}, ValueError, "query_start"),
    "more queries than context": ({"seq_lens": ids(20, 3)}, ValueError, "4 query tokens"),
    "queries that go back": ({"query_start": ids(0, 5, 1)}, ValueError, "query_start"),
    "queries that begin late": ({"query_start": ids(1, 2, 5)}, IndexError, "query_start has 1"),
    "a decode of two": ({"num_decodes": 2}, ValueError, "query_start"),
    "more decodes than sequences": ({"num_decodes": 3}, IndexError, "num_decodes has 3"),
    "a window below zero": ({"window": -1}, ValueError, "window"),
    "no slots": ({"block_size": 0}, ValueError, "block_size"),
}


@pytest.mark.parametrize("name", WRONG_TABLES)
def test_contexts_refuse(name):
    changes, error, says = WRONG_TABLES[name]
    with pytest.raises(error, match=says):
        contexts(**changes)


@pytest.mark.parametrize(
    ("run", "error", "says"),
    [
        ((-1, 0, 4, 0), IndexError, "-1"),
        ((0, -1, 4, 0), ValueError, "slot -1"),
        ((0, 13, 4, 0), ValueError, "4 tokens from slot 13"),
        ((0, 0, 0, 0), ValueError, "0 tokens"),
        ((0, 0, 4, 3), ValueError, "position 3"),
        ((0, 0, 4, 17), ValueError, "position 17"),
    ],
)
def test_runs_refuse(run, error, says):
    runs = torch.tensor([(2, 0, 4, 0), run], dtype=I32)
    with pytest.raises(error, match=says):
        _C.Contexts.of_runs(runs, ids(0, 2), ids(20), ids(0, 1), 1, SLOTS, 0)


@pytest.mark.parametrize(
    ("name", "wrong", "error", "says"),
    [
        ("slots", torch.zeros(3, dtype=I32), TypeError, "slots is int32"),
        ("slots", torch.tensor([0, 1, BLOCKS * SLOTS]), IndexError, "96 at position 2"),
        ("slots", torch.tensor([-1, 1, 2]), IndexError, "-1 at position 0"),
        ("slots", torch.arange(6)[::2], ValueError, "slots must be contiguous"),
        ("key", torch.zeros(3, HEADS, DIM), TypeError, "key is float32"),
        ("value", torch.zeros(3, HEADS, DIM, dtype=torch.float16), TypeError, "value is float16"),
        ("key", torch.zeros(3, HEADS, 2 * DIM, dtype=BF16)[..., ::2], ValueError, "contiguous"),
        ("value", torch.zeros(3, HEADS + 1, DIM, dtype=BF16), ValueError, "value"),
        ("key", torch.zeros(2, HEADS, DIM, dtype=BF16), ValueError, "key"),
        ("pool", pool()[:, :-1], ValueError, "pool"),
    ],
)
def test_a_write_refuses_and_writes_nothing(name, wrong, error, says):
    arguments = {
        "pool": pool(),
        "layout": layout(),
        "layer": 0,
        "key": torch.ones(3, HEADS, DIM, dtype=BF16),
        "value": torch.ones(3, HEADS, DIM, dtype=BF16),
        "slots": torch.tensor([1, 2, 3]),
    }
    arguments[name] = wrong
    with pytest.raises(error, match=says):
        _C.write_kv(*arguments.values())
    assert not arguments["pool"].any()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"packing": "lhkv-9"}, "lhkv-9"),
        ({"block_size": 24}, "block_size is 24"),
        ({"key_dim": 63}, "key_dim 63"),
        ({"key_dim": 0}, "at least 1"),
    ],
)
def test_a_layout_refuses(arguments, says):
    with pytest.raises(ValueError, match=says):
        layout(**arguments)


def test_memory_that_is_held_is_counted_and_given_back():
    before = _C.held_bytes()
    workspace = _C.Workspace()
    attend("decode", workspace=workspace)
    assert _C.held_bytes() - before == workspace.nbytes > 0
    attend("prefill", workspace=workspace)
    assert _C.held_bytes() - before == workspace.nbytes
    del workspace
    assert _C.held_bytes() == before
