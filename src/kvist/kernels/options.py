"""What a layer asks of attention beside softmax over its scaled scores.

Owns the few numbers; knows neither tensors' places nor who computes with them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """Immutable, the same in every step; all at rest by default.

    Attributes
    ----------
    window : int or None
        Positions that a query sees, its own included.
    softcap : float or None
        Scaled scores s become ``softcap * tanh(s / softcap)``.
    sinks : Tensor or None
        fp32 [Q] on the pool's device: a logit a query head that takes part in the softmax and has
        no value (`s_aux`, GPT-OSS).

    Raises
    ------
    ValueError
        If `window` or `softcap` is not above zero.
    """

    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.window is not None and self.window < 1) or (
            self.softcap is not None and not self.softcap > 0
        ):
            raise ValueError(
                f"window={self.window} and softcap={self.softcap}: a window holds at least the "
                "query's own position, a cap is above zero; leave them out for none"
            )

    @property
    def is_plain(self) -> bool:
        """Whether nothing is asked."""
        return self.window is None and self.softcap is None and self.sinks is None


PLAIN = AttentionOptions()
"""Softmax over the scaled scores and nothing else."""
