"""CPU kernels, compiled. Absent from a pure install: only `kvist.kernels` imports it."""

from enum import Enum
from typing import TypedDict

from torch import Tensor

class BuildInfo(TypedDict):
    version: str
    compiler: str
    openmp: bool
    threads: int
    isa: list[str]

class Isa(Enum):
    portable = 0
    avx2 = 1
    avx512 = 2
    avx512bf16 = 3
    amx = 4

class Layout:
    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        key_dim: int,
        value_dim: int,
        block_size: int,
        packing_id: str,
    ) -> None: ...

class Workspace:
    def __init__(self) -> None: ...
    @property
    def nbytes(self) -> int: ...

class Contexts:
    @staticmethod
    def of_tables(
        block_tables: Tensor,
        seq_lens: Tensor,
        query_start: Tensor,
        num_decodes: int,
        block_size: int,
        window: int,
    ) -> Contexts: ...
    @staticmethod
    def of_runs(
        runs: Tensor,
        run_start: Tensor,
        seq_lens: Tensor,
        query_start: Tensor,
        num_decodes: int,
        block_size: int,
        window: int,
    ) -> Contexts: ...
    @property
    def ends_apart(self) -> bool: ...

class StepAttention:
    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        slots: Tensor,
        pool: Tensor,
        contexts: list[Contexts],
        out: Tensor,
        layout: Layout,
        isa: Isa,
        workspace: Workspace,
    ) -> None: ...
    def attend(
        self, layer: int, scale: float, window: int, softcap: float, sinks: Tensor | None
    ) -> None: ...

def version() -> str: ...
def build_info() -> BuildInfo: ...
def write_kv(
    pool: Tensor, layout: Layout, layer: int, key: Tensor, value: Tensor, slots: Tensor
) -> None: ...
def rotate_write_kv(
    query: Tensor,
    pool: Tensor,
    layout: Layout,
    layer: int,
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    isa: Isa,
) -> None: ...
def copy_blocks(pool: Tensor, src: Tensor, dst: Tensor) -> None: ...
def decode(
    query: Tensor,
    pool: Tensor,
    contexts: Contexts,
    out: Tensor,
    lse: Tensor | None,
    sinks: Tensor | None,
    layout: Layout,
    layer: int,
    scale: float,
    softcap: float,
    isa: Isa,
    workspace: Workspace,
) -> None: ...
def prefill(
    query: Tensor,
    pool: Tensor,
    contexts: Contexts,
    out: Tensor,
    lse: Tensor | None,
    sinks: Tensor | None,
    layout: Layout,
    layer: int,
    scale: float,
    softcap: float,
    isa: Isa,
    workspace: Workspace,
) -> None: ...
def read_seconds(data: Tensor, isa: Isa, streams: int, ahead: bool) -> float: ...
def held_bytes() -> int: ...
def chosen_isa() -> Isa: ...
def packed_bytes(weights: str, inputs: int, outputs: int) -> int: ...
def pack(source: Tensor, weights: str, packed: Tensor) -> None: ...
def multiply_path(rows: int, alone: bool) -> str: ...

class Linear:
    def __init__(
        self,
        weights: str,
        inputs: int,
        outputs: int,
        packed: Tensor,
        bias: Tensor | None,
        alone: bool,
    ) -> None: ...
    def multiply(self, x: Tensor, out: Tensor) -> None: ...
    def rows(self, ids: Tensor, out: Tensor) -> None: ...

class Stack:
    def __init__(
        self,
        hidden: int,
        num_query_heads: int,
        num_kv_heads: int,
        head_dim: int,
        intermediate: int,
        rotary_dim: int,
        bf16: bool,
    ) -> None: ...
    def add_layer(
        self,
        first: Tensor,
        first_epsilon: float,
        second: Tensor,
        second_epsilon: float,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        head_epsilon: float,
        qkv: Linear,
        output: Linear,
        gate_up: Linear,
        down: Linear,
        rotary: bool,
    ) -> None: ...
    def set_attention(
        self,
        number: int,
        layer: int,
        scale: float,
        window: int,
        softcap: float,
        sinks: Tensor | None,
    ) -> None: ...
    def set_embedding(self, embedding: Linear) -> None: ...
    def set_head(self, norm: Tensor, epsilon: float, head: Linear) -> None: ...
    def bind(
        self,
        ids: Tensor,
        residual: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attended: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> None: ...
    def want(self, rows: Tensor, logits: Tensor) -> None: ...
    def begin(self) -> None: ...
    def enter(self, layer: int) -> None: ...
    def leave(self, layer: int) -> None: ...
    def advance(self, layer: int) -> None: ...
    def run(self, first: int, last: int, attention: StepAttention) -> None: ...
    def finish(self) -> None: ...
