"""The bill: what the memory of an engine is spent on, in rows that add up.

Plain values, at start-up and live, with their renderings. Measures nothing itself.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvist.sizes import format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupBill:
    """Memory of one engine at start-up.

    Attributes
    ----------
    process_bytes : int
        Interpreter and libraries, before the model came (0 on a GPU).
    weights_bytes, workspace_bytes, kv_pool_bytes : int
        The pool is reserved; its pages arrive when blocks are first written.
    kernels_bytes : int
        Of the workspace, what compiled kernels keep between steps.
    left_bytes : int
        What the device would still have with all of the above in use.
    num_blocks, block_size : int
    kv_token_bytes : int
        Of one token, all layers, K and V.
    max_model_len : int
    kernels : tuple of (operation, backend, why)
    tiers : tuple of (name, bytes, remark)
        Places below the device; those in host memory are part of what is left out of `left_bytes`.
    notes : tuple of str
        What a person should know: fallbacks, limits, choices made.
    """

    model: str
    origin: str
    device: str
    dtype: str
    kv_format: str
    process_bytes: int
    weights_bytes: int
    workspace_bytes: int
    kv_pool_bytes: int
    left_bytes: int
    num_blocks: int
    block_size: int
    kv_token_bytes: int
    max_model_len: int
    kv_allocation: str
    prefix_caching: bool
    kernels: tuple[tuple[str, str, str], ...]
    kernels_bytes: int = 0
    tiers: tuple[tuple[str, int, str], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def pool_tokens(self) -> int:
        """Tokens that fit into the pool."""
        return self.num_blocks * self.block_size

    @property
    def max_concurrency(self) -> float:
        """How many requests of `max_model_len` fit at once."""
        return self.num_blocks / -(-self.max_model_len // self.block_size)

    def rows(self) -> list[tuple[str, str, str]]:
        """Return (item, amount, remark) for a table."""
        prefix = "on" if self.prefix_caching else "off"
        return [
            ("weights", format_size(self.weights_bytes), f"{self.model}, {self.dtype}"),
            (
                "KV pool",
                format_size(self.kv_pool_bytes),
                (
                    f"{self.num_blocks:,} blocks of {self.block_size} = {self.pool_tokens:,} tokens"
                    f" of {format_size(self.kv_token_bytes)} ({self.kv_format})"
                ),
            ),
            (
                "",
                "",
                (
                    f"holds {self.max_concurrency:.1f} requests of max_model_len="
                    f"{self.max_model_len:,}; {self.kv_allocation}, prefix caching {prefix}"
                ),
            ),
            (
                "workspace",
                format_size(self.workspace_bytes),
                f"largest step, measured; kernels keep {format_size(self.kernels_bytes)} of it",
            ),
            ("process", format_size(self.process_bytes), "interpreter and libraries"),
            *((f"tier {name}", format_size(size), why) for name, size, why in self.tiers),
            ("left", format_size(self.left_bytes), f"on {self.device}"),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return everything for programs."""
        return {
            **asdict(self),
            "pool_tokens": self.pool_tokens,
            "max_concurrency": round(self.max_concurrency, 2),
        }

    def describe(self) -> str:
        """Return the bill as lines of text."""
        lines = [f"  {item:<10} {amount:>10}  {remark}" for item, amount, remark in self.rows()]
        lines += [f"  {'kernel':<10} {op:>11} {name} ({why})" for op, name, why in self.kernels]
        lines += [f"  {'note':<10} {note}" for note in self.notes]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """The bill as it stands now: what was set aside, and what of it is there.

    Attributes
    ----------
    weights_bytes, workspace_bytes, process_bytes : int
        As at start-up.
    kernels_bytes : int
        What compiled kernels hold now.
    kernels_reserved_bytes : int
        What they held after the largest step; part of `workspace_bytes`.
    kv_reserved_bytes, kv_resident_bytes : int
        The block pool; its pages arrive when blocks are first written.
    tiers_bytes : int
        Host memory that tiers below the device, and copies on their way to them, take now.
    tiers_reserved_bytes : int
        What of it they may take.
    total_bytes : int
        What the process holds: resident memory on a CPU, pages shared with other processes in
        part; the allocator's memory on a GPU.
    """

    weights_bytes: int
    workspace_bytes: int
    process_bytes: int
    kv_reserved_bytes: int
    kv_resident_bytes: int
    tiers_bytes: int
    total_bytes: int
    tiers_reserved_bytes: int = 0
    kernels_bytes: int = 0
    kernels_reserved_bytes: int = 0

    @property
    def known_bytes(self) -> int:
        """Resident bytes of all rows but the workspace."""
        fixed = self.weights_bytes + self.process_bytes + self.tiers_bytes + self.kernels_bytes
        return fixed + self.kv_resident_bytes

    @property
    def workspace_resident_bytes(self) -> int:
        """What the allocator keeps of the workspace between steps: the rest, but not more."""
        return max(0, min(self._torch_workspace_bytes, self.total_bytes - self.known_bytes))

    @property
    def _torch_workspace_bytes(self) -> int:
        return max(0, self.workspace_bytes - self.kernels_reserved_bytes)

    @property
    def unaccounted_bytes(self) -> int:
        """What the process holds beyond all rows; negative: what they name and it does not hold."""
        return self.total_bytes - self.known_bytes - self.workspace_resident_bytes

    def rows(self) -> list[tuple[str, int, int]]:
        """Return (item, reserved bytes, resident bytes); the resident ones add up to the total."""
        return [
            ("weights", self.weights_bytes, self.weights_bytes),
            ("kv_pool", self.kv_reserved_bytes, self.kv_resident_bytes),
            ("workspace", self._torch_workspace_bytes, self.workspace_resident_bytes),
            ("kernels", self.kernels_reserved_bytes, self.kernels_bytes),
            ("process", self.process_bytes, self.process_bytes),
            ("tiers", self.tiers_reserved_bytes, self.tiers_bytes),
            ("unaccounted", 0, self.unaccounted_bytes),
        ]
