"""Packed products equal plain ones, on every instruction set that this processor has.

Guards: a weight in the wrong place of the packing, a tail of rows or outputs that is lost, scales
and minima of another output, a level decoded to another number, and rows whose sums depend on their
neighbours where that was ruled out. The instruction set is chosen once a process, so each runs in
one of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from kvist.kernels import linear
from kvist.kernels.linear import WEIGHT_KINDS, pack

CPU = torch.device("cpu")
NO_CPP = linear.obstacle(CPU, torch.bfloat16)

pytestmark = pytest.mark.skipif(NO_CPP is not None, reason=str(NO_CPP))

ISAS = ("portable", "avx2", "avx512", "avx512bf16", "amx")
ROWS = (1, 2, 3, 4, 5, 8, 11, 16, 17, 32, 33, 49, 300)
SHAPES = ((32, 32), (40, 32), (261, 64), (576, 160))


def weights(outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(outputs * 1000 + inputs)
    drawn = torch.randn(outputs, inputs, generator=generator)
    # Outputs of very different size: a scale that belongs to another one shows.
    return (drawn * torch.logspace(-2, 0, outputs)[:, None]).to(dtype)


def rows_of(count: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, inputs, generator=generator).to(dtype)


def unpacked(packed: linear.PackedMatrix) -> torch.Tensor:
    return packed.rows(torch.arange(packed.outputs), torch.float32)


def check_products(outputs: int, inputs: int, kind: str, dtype: torch.dtype) -> None:
    bias = torch.linspace(-1, 1, outputs)
    packed = pack(weights(outputs, inputs, dtype), kind, bias)
    plain = unpacked(packed)
    for count in ROWS:
        x = rows_of(count, inputs, dtype)
        expected = x.float() @ plain.T + bias
        found = packed.multiply(x, torch.float32)
        # Weights of 4 bits are rounded to bf16 on their way into tiles, and elsewhere level and
        # minimum are summed apart; everything else is exact.
        loss = 2**-21
        if kind == "int4":
            loss = 2**-8 if dtype == torch.bfloat16 else 2**-18
        size = x.float().abs() @ plain.abs().T + bias.abs()
        allowed = loss * size + 1e-30
        if kind == "int8" and dtype == torch.bfloat16:
            # Rows become whole numbers: 32,767 steps to each side of a row's greatest.
            step = x.float().abs().amax(1, keepdim=True) / 32767
            allowed = allowed + 0.5001 * step * plain.abs().sum(1)
        assert ((found - expected).abs() <= allowed).all(), (count, kind)
        rounded = packed.multiply(x)
        assert rounded.dtype == dtype
        assert torch.equal(rounded, found.to(dtype)), (count, kind)


def check_alone(kind: str, dtype: torch.dtype, alone: bool = True) -> None:
    packed = pack(weights(261, 64, dtype), kind, alone=alone)
    x = rows_of(70, 64, dtype)
    together = packed.multiply(x, torch.float32)
    for begin, end in ((0, 1), (1, 3), (3, 40), (40, 45), (45, 70)):
        part = packed.multiply(x[begin:end].clone(), torch.float32)
        assert torch.equal(part, together[begin:end]), (kind, begin, end)


def check_all() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for kind in WEIGHT_KINDS:
            for outputs, inputs in SHAPES:
                check_products(outputs, inputs, kind, dtype)
            check_alone(kind, dtype)
    # Sums of whole numbers are exact, whoever adds them up.
    check_alone("int8", torch.bfloat16, alone=False)


@pytest.mark.parametrize("isa", ISAS)
def test_products(isa):
    """An instruction set that is not there falls back to the next lower one and must be right."""
    done = subprocess.run(
        [sys.executable, "-c", f"import runpy; runpy.run_path({__file__!r})['check_all']()"],
        env={**os.environ, "KVIST_ISA": isa, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_of_16_and_32_bits_come_back_as_they_were(dtype):
    weight = weights(261, 64, dtype)
    kind = "bfloat16" if dtype == torch.bfloat16 else "float32"
    assert torch.equal(unpacked(pack(weight, kind)), weight.float())


def test_int8_is_the_nearest_of_127_steps_to_each_side():
    weight = weights(261, 64, torch.float32)
    weight[7] = 0
    step = weight.abs().amax(1, keepdim=True) / 127
    found = unpacked(pack(weight, "int8"))
    assert ((found - weight).abs() <= step * 0.5001).all()
    assert torch.equal(found[7], torch.zeros(64))


def test_int4_is_at_least_as_near_as_16_steps_from_least_to_greatest():
    weight = weights(261, 64, torch.float32)
    weight[5, :32] = 0.25  # a group without any spread
    groups = weight.reshape(261, 2, 32)
    least, most = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (most - least) / 15
    plain = ((groups - least) / step.clamp(min=1e-30)).round() * step + least
    error = (unpacked(pack(weight, "int4")).reshape(groups.shape) - groups).pow(2).sum(-1)
    # Scale and minimum are fp16, which the plain form here is not.
    allowed = (plain - groups).pow(2).sum(-1) * 1.02 + (most - least)[..., 0] ** 2 * 1e-5
    assert (error <= allowed + 1e-9).all()


def test_int4_finds_a_grid_of_its_own_kind_again():
    """Weights that were 4-bit groups of 32 once, then rounded to bf16, as GGUF's Q4_1 are here."""
    generator = torch.Generator().manual_seed(3)
    levels = torch.randint(0, 16, (64, 4, 32), generator=generator)
    levels[..., 0], levels[..., 1] = 0, 15
    scale = (torch.rand(64, 4, 1, generator=generator) * 0.01 + 0.001).half().float()
    least = (-8 * scale * (1 + 0.1 * torch.rand(64, 4, 1, generator=generator))).half().float()
    weight = (levels * scale + least).reshape(64, 128)
    found = unpacked(pack(weight.to(torch.bfloat16), "int4"))
    assert (found - weight).norm() <= 2**-8 * weight.norm()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: pack(torch.zeros(4, 33), "int8"), "multiple of 32"),
        (lambda: pack(torch.zeros(0, 32), "int8"), "output"),
        (lambda: pack(torch.zeros(4, 32, dtype=torch.float16), "int8"), "float32 or bfloat16"),
        (lambda: pack(torch.full((4, 32), float("nan")), "int8"), "not finite"),
        (lambda: pack(torch.full((40, 32), float("inf")), "int4"), "not finite"),
        (lambda: pack(torch.full((4, 32), 7e4), "int4"), "too large for int4"),
        (lambda: pack(torch.zeros(4, 32), "int2"), "int2"),
        (lambda: pack(torch.zeros(4, 32), "int8", torch.zeros(3)), "bias has shape"),
        (lambda: pack(torch.zeros(4, 32), "int8").multiply(torch.zeros(2, 64)), "x has shape"),
        (lambda: pack(torch.zeros(4, 32), "int8").multiply(torch.zeros(2, 32).half()), "x must be"),
        (lambda: pack(torch.zeros(4, 64), "int8").multiply(torch.zeros(64, 2).T), "contiguous"),
        (lambda: pack(torch.zeros(4, 32), "int4").rows(torch.tensor([4]), torch.float32), "ids"),
        (lambda: pack(torch.zeros(4, 32), "int4").rows(torch.tensor([-1]), torch.float32), "ids"),
    ],
)
def test_what_does_not_fit_is_refused(call, words):
    with pytest.raises((ValueError, TypeError, IndexError), match=words):
        call()


def test_weights_next_to_nothing_become_nothing():
    """Their scale's inverse is no number."""
    assert not unpacked(pack(torch.full((4, 32), 1e-40), "int8")).any()


HIDDEN, HEADS, KV_HEADS, DIM, INTERMEDIATE = 64, 4, 2, 32, 160


def layer_outputs(kind: str, tokens: int, pieces: int) -> torch.Tensor:
    """Residual, query, key and value of two layers without attention, `pieces` tokens a time."""
    widths = ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), (HIDDEN, HEADS * DIM)
    shapes = (*widths, (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    generator = torch.Generator().manual_seed(7)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    stack = linear.new_stack(HIDDEN, HEADS, KV_HEADS, DIM, INTERMEDIATE, DIM, torch.bfloat16)
    for _ in range(2):
        packed = [pack(drawn(*shape) / shape[1] ** 0.5, kind).native for shape in shapes]
        norms = 1 + drawn(HIDDEN) / 8, 1 + drawn(HIDDEN) / 8
        heads = 1 + drawn(DIM) / 8, 1 + drawn(DIM) / 8
        stack.add_layer(norms[0], 1e-5, norms[1], 1e-5, *heads, 1e-5, *packed, True)
    sizes = ((HIDDEN,), (HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, DIM), (HEADS, DIM))
    residual, query, key, value, attended = (drawn(tokens, *size) for size in sizes)
    angles = drawn(tokens, DIM).float()
    cos, sin = angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)
    ids = torch.zeros(tokens, dtype=torch.int64)
    found = []
    for start in range(0, tokens, pieces):
        buffers = [
            t[start : start + pieces].clone()
            for t in (ids, residual, query, key, value, attended, cos, sin)
        ]
        stack.bind(*buffers)
        stack.advance(0)
        stack.leave(1)
        found.append(torch.cat([b.flatten(1).float() for b in buffers[1:5]], 1))
    return torch.cat(found)


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("tokens", [128, 301, 1100])
def test_many_tokens_go_through_a_layer_as_few_do(kind: str, tokens: int) -> None:
    """Guards: rows lost at the end of a block, a tile of another row, an epilogue's wrong place."""
    whole, pieces = layer_outputs(kind, tokens, tokens), layer_outputs(kind, tokens, 16)
    # Sums in another order, rounded to bf16 a few times on the way.
    assert (whole - pieces).abs().max() <= 2**-5 * pieces.abs().max()
    assert (whole - pieces).abs().mean() <= 2**-9 * pieces.abs().mean()
