"""Plain formats: every element stored as it is, in 16 or 32 bit."""

from __future__ import annotations

from kvist.formats.base import KVFormat
from kvist.spec import DTYPE_BYTES, PAIR_PACKING

BF16 = KVFormat(
    name="bf16",
    dtype="bfloat16",
    itemsize=DTYPE_BYTES["bfloat16"],
    error_bound="none from bfloat16; else relative 2^-8 (8 significant bits)",
    source="bfloat16: the upper half of IEEE 754 binary32",
    exact_for=frozenset({"bfloat16"}),
    packing_id=PAIR_PACKING,
)

FP16 = KVFormat(
    name="fp16",
    dtype="float16",
    itemsize=DTYPE_BYTES["float16"],
    error_bound=(
        "none from float16; else relative 2^-11 between 2^-14 and 65504, absolute 2^-25 below, "
        "infinite above"
    ),
    source="IEEE 754 binary16",
    exact_for=frozenset({"float16"}),
    packing_id=PAIR_PACKING,
)

FP32 = KVFormat(
    name="fp32",
    dtype="float32",
    itemsize=DTYPE_BYTES["float32"],
    error_bound="none",
    source="IEEE 754 binary32",
    exact_for=frozenset({"bfloat16", "float16", "float32"}),
)
