"""Whether a model's layers may be fused and its weights packed at all.

Owns the reasons against it that are known before there is a model, and what the choice adds to the
root of all block keys.
"""

from __future__ import annotations

import torch

from kvist.engine.invariant import ARITHMETIC
from kvist.errors import ConfigError
from kvist.kernels import linear


def why_modules(kernels: str, weights: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why everything runs module by module with weights as they are, or None if it need not.

    Parameters
    ----------
    kernels, weights : str
        As in `kvist.config.EngineConfig`.
    device : torch.device
    dtype : torch.dtype
        Of activations.

    Raises
    ------
    ConfigError
        If weights are asked for that only packed matrices have.
    """
    reason = linear.obstacle(device, dtype)
    if reason is None and kernels not in ("auto", "cpp"):
        reason = f"--kernels={kernels} was asked for"
    if reason is not None and weights != "auto":
        raise ConfigError(
            f"--weights={weights} needs the C++ kernels on a CPU, in bfloat16 or float32, and"
            f" cannot have them here: {reason}; use --weights=auto"
        )
    return reason


def arithmetic_of(batch_invariant: bool, weights: str) -> str:
    """What changes the bits of K and V beyond the order of sums, for the root of all block keys.

    Parameters
    ----------
    batch_invariant, weights
        As in `kvist.config.EngineConfig`.
    """
    invariant = ARITHMETIC if batch_invariant else ""
    rounded = "" if weights == "auto" else f"weights:{weights}"
    return ";".join(part for part in (invariant, rounded) if part)
