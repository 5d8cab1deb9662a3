"""Calls of the C++ border with one or two arguments that are off, in ways that nobody listed.

Each call starts from one that is right. Either it is refused, with an ordinary exception, or it
runs; either way nothing outside of the tensors that it may write is written: they lie between
guards. What is *read* outside, ``make check-native`` sees, where these tests run too, on tensors
that have the sanitizer's guards in place of ours.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

torch = pytest.importorskip("torch")
_C = pytest.importorskip("kvist._C")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

BF16, F32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
LAYERS, HEADS, GROUP, DIM, SLOTS, BLOCKS = 2, 2, 3, 32, 16, 6
TOKENS = 5
REFUSALS = (ValueError, TypeError, IndexError, OverflowError, RuntimeError, AttributeError)
SANITIZED = bool(os.environ.get("KVIST_CHECK_NATIVE"))
GUARD = 0 if SANITIZED else 256
"""Elements before and behind a tensor that is written."""
ISAS = _C.build_info()["isa"]
_CANARY = 77.0

DTYPES = (BF16, torch.float16, F32, torch.float64, I32, I64, torch.int16, torch.uint8, torch.bool)
INTEGERS = (
    *(-(2**63), -(2**31), -17, -1, 0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 48, 64, 95, 96, 97, 4096),
    *(2**16, 2**20, 2**20 + 16, 2**31 - 1, 2**31, 2**32 + 5, 2**62, 2**63 - 1, 2**64),
)
FLOATS = (float("nan"), float("inf"), float("-inf"), -1.0, 0.0, 1e-45, 1e30, 0.5)
OTHERS = (None, "text", [1, 2], 3, b"bytes", object())

pytestmark = pytest.mark.usefixtures("one_torch_thread")

fuzz = settings(
    max_examples=200 if SANITIZED else 60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)


@pytest.fixture(scope="module")
def one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Guarded:
    """Tensors of a call, those that it may write between guards."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def tensor(self, shape: tuple[int, ...], dtype: Any = BF16) -> Any:
        count = torch.Size(shape).numel()
        whole = torch.full((count + 2 * GUARD,), _CANARY, dtype=dtype)
        inside = whole[GUARD : GUARD + count].view(shape)
        inside.zero_()
        self._kept.append(whole)
        return inside

    def check(self) -> None:
        for whole in self._kept:
            assert (whole[:GUARD] == _CANARY).all()
            assert (whole[len(whole) - GUARD :] == _CANARY).all()


def ids(*values: int, dtype: Any = I64) -> Any:
    return torch.tensor(values, dtype=dtype)


def layout() -> Any:
    return _C.Layout(LAYERS, HEADS, DIM, DIM, SLOTS, "lhkv-2")


def pool(guarded: Guarded) -> Any:
    return guarded.tensor((BLOCKS, LAYERS * HEADS * SLOTS * 2 * DIM))


def off(draw: Any, value: Any) -> Any:
    """Return something like `value` that may be wrong."""
    if isinstance(value, torch.Tensor):
        return _off_tensor(draw, value)
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return draw(st.sampled_from([*OTHERS, True, False, "int4", "lhkv-1"]))
    if isinstance(value, int):
        return draw(st.sampled_from([*INTEGERS, *OTHERS, 1.5]))
    if isinstance(value, float):
        return draw(st.sampled_from([*FLOATS, *OTHERS]))
    if isinstance(value, _C.Isa):
        return draw(st.sampled_from([*_ISAS, *OTHERS]))
    return draw(st.sampled_from(OTHERS))


_ISAS = [_C.Isa.portable, _C.Isa.avx2, _C.Isa.avx512, _C.Isa.avx512bf16, _C.Isa.amx]


def _off_tensor(draw: Any, value: Any) -> Any:
    ways = [
        lambda t: t.to(draw(st.sampled_from(DTYPES))),
        lambda t: torch.stack((t, t), -1)[..., 0],  # rows are scattered
        lambda t: t.repeat_interleave(2, -1)[..., ::2],
        lambda t: t.transpose(0, -1),
        lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
        lambda t: t[:-1],
        lambda t: t[:0],
        lambda t: t[..., :-1],
        lambda t: t[..., :0],
        lambda t: t[..., 1:],
        lambda t: torch.cat((t, t)),
        lambda t: t[:1].expand_as(t),  # one row for all
        lambda t: t[None],
        lambda t: t.flatten(),
        lambda t: t.view(*t.shape, 1, 1, 1),
        lambda t: t.to("meta"),
        lambda t: t.to_sparse() if t.is_floating_point() else t.tolist(),
        lambda t: t.float().numpy(),
        lambda t: torch.full_like(t, float("nan") if t.is_floating_point() else -1),
        lambda t: torch.empty_like(t).random_(
            0 if t.dtype == torch.uint8 else -3, 120, generator=_generator(draw)
        ),
        lambda t: _some(draw, t),
        lambda _: draw(st.sampled_from(OTHERS)),
    ]
    return draw(st.sampled_from(ways))(value)


def _generator(draw: Any) -> Any:
    return torch.Generator().manual_seed(draw(st.integers(0, 1000)))


def _some(draw: Any, value: Any) -> Any:
    """Put one number in that has no place there."""
    changed = value.clone()
    if changed.numel():
        at = draw(st.integers(0, changed.numel() - 1))
        if changed.is_floating_point():
            number: float = draw(st.sampled_from(FLOATS))
        else:
            info = torch.iinfo(changed.dtype)
            number = draw(st.sampled_from([n for n in INTEGERS if info.min <= n <= info.max]))
        changed.view(-1)[at] = number
    return changed


def wrong(data: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    names = data.draw(st.lists(st.sampled_from(list(arguments)), min_size=1, max_size=2))
    return {**arguments, **{name: off(data.draw, arguments[name]) for name in names}}


def run(function: Any, arguments: dict[str, Any], guarded: Guarded) -> bool:
    """Return whether the call ran."""
    try:
        function(*arguments.values())
    except REFUSALS:
        ran = False
    else:
        ran = True
    guarded.check()
    return ran


def writing(guarded: Guarded) -> dict[str, Any]:
    return {
        "pool": pool(guarded),
        "layout": layout(),
        "layer": 1,
        "key": torch.ones(3, HEADS, DIM, dtype=BF16),
        "value": torch.ones(3, HEADS, DIM, dtype=BF16),
        "slots": ids(1, 40, BLOCKS * SLOTS - 1),
    }


def rotating(guarded: Guarded) -> dict[str, Any]:
    return {
        "query": guarded.tensor((3, HEADS * GROUP, DIM)),
        **writing(guarded),
        "cos": torch.ones(3, 16),
        "sin": torch.ones(3, 16),
        "isa": _C.Isa.portable,
    }


def copying(guarded: Guarded) -> dict[str, Any]:
    return {"pool": pool(guarded), "src": ids(0, 2), "dst": ids(BLOCKS - 1, 3)}


def tables(_: Guarded) -> dict[str, Any]:
    return {
        "block_tables": ids(3, 1, 0, BLOCKS - 1, dtype=I32).view(2, 2),
        "seq_lens": ids(20, 30, dtype=I32),
        "query_start": ids(0, 1, TOKENS, dtype=I32),
        "num_decodes": 1,
        "block_size": SLOTS,
        "window": 0,
    }


def runs(_: Guarded) -> dict[str, Any]:
    rows = [(2, 0, 4, 0), (5, 3, 13, 4), (0, 0, 16, 0), (1, 0, 14, 16)]
    return {
        "runs": torch.tensor(rows, dtype=I32),
        "run_start": ids(0, 2, 4, dtype=I32),
        **dict(list(tables(Guarded()).items())[1:]),
    }


def attending(guarded: Guarded, contexts: Any) -> dict[str, Any]:
    return {
        "query": torch.zeros(TOKENS, HEADS * GROUP, DIM, dtype=BF16),
        "pool": pool(guarded),
        "contexts": contexts,
        "out": guarded.tensor((TOKENS, HEADS * GROUP, DIM)),
        "lse": guarded.tensor((TOKENS, HEADS * GROUP), F32),
        "sinks": torch.zeros(HEADS * GROUP),
        "layout": layout(),
        "layer": 1,
        "scale": 0.1,
        "softcap": 0.0,
        "isa": _C.Isa.portable,
        "workspace": _C.Workspace(),
    }


WRITES = {
    "write_kv": (_C.write_kv, writing),
    "rotate_write_kv": (_C.rotate_write_kv, rotating),
    "copy_blocks": (_C.copy_blocks, copying),
}


@pytest.mark.parametrize("name", WRITES)
@fuzz
@given(data=st.data())
def test_writes(name, data):
    function, right = WRITES[name]
    guarded = Guarded()
    run(function, wrong(data, right(guarded)), guarded)


@pytest.mark.parametrize("isa", ISAS if SANITIZED else ISAS[:1] + ISAS[1:][-1:])
@pytest.mark.parametrize("kernel", ["decode", "prefill"])
@pytest.mark.parametrize("right", [tables, runs])
@fuzz
@given(data=st.data())
def test_attention(right, kernel, isa, data):
    """Contexts that are off and got through, under calls that are off or not."""
    guarded = Guarded()
    make = _C.Contexts.of_tables if right is tables else _C.Contexts.of_runs
    arguments = right(guarded)
    if data.draw(st.booleans()):
        arguments = wrong(data, arguments)
    try:
        contexts = make(*arguments.values())
    except REFUSALS:
        return
    call = {**attending(guarded, contexts), "isa": getattr(_C.Isa, isa)}
    if data.draw(st.booleans()):
        call = wrong(data, call)
    run(getattr(_C, kernel), call, guarded)


def preparing(guarded: Guarded, contexts: Any) -> dict[str, Any]:
    call = attending(guarded, contexts)
    return {
        "query": call["query"],
        "key": torch.ones(TOKENS, HEADS, DIM, dtype=BF16),
        "value": torch.ones(TOKENS, HEADS, DIM, dtype=BF16),
        "slots": ids(19, 13, 80, 81, 82),
        "pool": call["pool"],
        "contexts": [contexts],
        "out": call["out"],
        "layout": call["layout"],
        "isa": call["isa"],
        "workspace": call["workspace"],
    }


@pytest.mark.parametrize("decodes", [True, False])
@fuzz
@given(data=st.data())
def test_prepared_steps(decodes, data):
    """Made of what is off and got through, then asked for what is off or not."""
    guarded = Guarded()
    arguments = tables(guarded)
    if decodes:
        arguments |= {
            "block_tables": ids(3, 1, 0, 5, 2, dtype=I32).view(TOKENS, 1),
            "seq_lens": ids(4, 5, 6, 7, 16, dtype=I32),
            "query_start": ids(*range(TOKENS + 1), dtype=I32),
            "num_decodes": TOKENS,
        }
    contexts = _C.Contexts.of_tables(*arguments.values())
    assert contexts.ends_apart == decodes
    call = preparing(guarded, contexts)
    if decodes:
        call["slots"] = ids(3 * 16 + 3, 16 + 4, 5, 5 * 16 + 6, 2 * 16 + 15)
    if data.draw(st.booleans()):
        call = wrong(data, call)
    try:
        step = _C.StepAttention(*call.values())
    except REFUSALS:
        return
    asked = {"layer": 1, "scale": 0.1, "window": 0, "softcap": 0.0, "sinks": torch.zeros(6)}
    if data.draw(st.booleans()):
        asked = wrong(data, asked)
    run(step.attend, asked, guarded)


@fuzz
@given(numbers=st.lists(st.sampled_from(INTEGERS), min_size=5, max_size=5), paired=st.booleans())
def test_layouts_hold_what_they_say_or_are_refused(numbers, paired):
    """Sizes whose product wraps around must not pass for those of a small pool."""
    guarded = Guarded()
    call = writing(guarded)
    try:
        call["layout"] = _C.Layout(*numbers, "lhkv-2" if paired else "lhkv-1")
    except REFUSALS:
        return
    layers, heads, key_dim, value_dim, block_size = numbers
    elements = layers * heads * block_size * (key_dim + value_dim)
    assert elements < 2**48
    for width in {elements % 2**16, 0, 1}:
        call["pool"] = guarded.tensor((BLOCKS, width))
        fits = width == elements
        call["key"] = torch.ones(3, min(heads, 8), min(key_dim, 64), dtype=BF16)
        call["value"] = torch.ones(3, min(heads, 8), min(value_dim, 64), dtype=BF16)
        call["layer"] = layers - 1
        assert fits or not run(_C.write_kv, call, guarded)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
@fuzz
@given(data=st.data())
def test_packing_and_products(kind, data):
    guarded = Guarded()
    outputs, inputs = 40, 64
    nbytes = _C.packed_bytes(kind, inputs, outputs)
    packed = guarded.tensor((nbytes,), torch.uint8)
    generator = torch.Generator().manual_seed(0)
    source = torch.randn(outputs, inputs, generator=generator).to(
        data.draw(st.sampled_from((BF16, F32)))
    )
    packing = {"source": source, "weights": kind, "packed": packed}
    _C.pack(*packing.values())
    run(_C.pack, wrong(data, packing), guarded)
    _C.pack(*packing.values())
    right = {
        "weights": kind,
        "inputs": inputs,
        "outputs": outputs,
        "packed": packed,
        "bias": torch.zeros(outputs),
        "alone": False,
    }
    linear = _C.Linear(*right.values())
    x = torch.zeros(3, inputs, dtype=data.draw(st.sampled_from((BF16, F32))))
    product = {"x": x, "out": guarded.tensor((3, outputs), F32)}
    run(linear.multiply, wrong(data, product), guarded)
    rows = {"ids": ids(0, outputs - 1), "out": guarded.tensor((2, inputs), F32)}
    run(linear.rows, wrong(data, rows), guarded)


def test_sizes_that_wrap_around_are_refused():
    """Else a matrix of nothing would have 2^60 outputs to read."""
    nothing = torch.empty(0, dtype=torch.uint8)
    for inputs, outputs in ((32, 1 << 60), (1 << 60, 32)):
        with pytest.raises(ValueError, match=r"2\^30"):
            _C.Linear("float32", inputs, outputs, nothing, None, False)


def test_two_calls_at_once_need_two_workspaces():
    """The second is refused: it might give the memory of the first back to the system."""
    import threading

    guarded, workspace = Guarded(), _C.Workspace()
    many = 64
    arguments = {
        "block_tables": torch.arange(BLOCKS, dtype=I32).repeat(many, 1),
        "seq_lens": torch.full((many,), BLOCKS * SLOTS, dtype=I32),
        "query_start": torch.arange(many + 1, dtype=I32),
        "num_decodes": many,
        "block_size": SLOTS,
        "window": 0,
    }
    contexts = _C.Contexts.of_tables(*arguments.values())
    results: list[str] = []

    def work() -> None:
        call = attending(guarded, contexts)
        shape = (many, HEADS * GROUP, DIM)
        call |= {"query": torch.zeros(shape, dtype=BF16), "out": torch.zeros(shape, dtype=BF16)}
        call |= {"lse": None, "workspace": workspace}
        for _ in range(200):
            try:
                _C.decode(*call.values())
            except RuntimeError as error:
                results.append(str(error))
            else:
                results.append("ran")

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 400
    assert "ran" in results
    refusal = "workspace: another call uses it; give each thread one of its own"
    assert set(results) <= {"ran", refusal}
