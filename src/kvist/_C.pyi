"""CPU kernels, compiled. Absent from a pure install: only `kvist.kernels` imports it."""

from typing import TypedDict

from torch import Tensor

class BuildInfo(TypedDict):
    version: str
    compiler: str
    openmp: bool
    threads: int
    baseline_isa: list[str]
    processor_isa: list[str]

def version() -> str: ...
def build_info() -> BuildInfo: ...
def write_kv(
    pool: Tensor,
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    layer: int,
    num_layers: int,
    block_size: int,
) -> None: ...
def copy_blocks(pool: Tensor, src: Tensor, dst: Tensor) -> None: ...
def decode(
    query: Tensor,
    pool: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    lse: Tensor | None,
    layer: int,
    num_layers: int,
    num_kv_heads: int,
    key_dim: int,
    block_size: int,
    split_tokens: int,
    scale: float,
) -> None: ...
