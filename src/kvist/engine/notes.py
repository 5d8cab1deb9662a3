"""What a person should know of the options: what a preset set, and what looks unwise.

Owns the sentences and the limits behind them. Knows no model. No torch.
"""

from __future__ import annotations

from kvist.config import PRESETS, EngineConfig

UTILIZATION_LOW, UTILIZATION_HIGH = 0.85, 0.92


def preset_remarks(config: EngineConfig) -> tuple[str, ...]:
    """Say what the preset set, and what it did not because something else was asked for."""
    remarks: list[str] = []
    for name, value in PRESETS.get(config.preset or "", {}).items():
        given = getattr(config, name)
        setting = f"--preset {config.preset}: --{name.replace('_', '-')}={given}"
        remarks.append(setting if given == value else f"{setting}, as asked for, not {value}")
    return tuple(remarks)


def utilization_remark(utilization: float) -> str | None:
    """Say why a ``--gpu-memory-utilization`` is unwise; ``None`` if it is not."""
    given, usual = (
        f"--gpu-memory-utilization={utilization:g}",
        f"{UTILIZATION_LOW}–{UTILIZATION_HIGH}",
    )
    if utilization < UTILIZATION_LOW:
        return (
            f"{given} leaves {1 - utilization:.0%} of the GPU unused, and each block that is not"
            f" there is a prefix computed again; {usual} is usual where nothing shares the GPU"
        )
    if utilization > UTILIZATION_HIGH:
        return (
            f"{given} leaves {1 - utilization:.0%} for what stands on no bill (CUDA context,"
            f" libraries, fragmentation); a long prompt may end in out of memory. {usual} is usual"
        )
    return None
