"""The smallest useful KV cache: one tensor a layer, allocated once, filled from the left.

::

    tokens   | t0 | t1 | t2 |    |    |    |        max_seq_len slots, whether used or not
                          ^ length

`update` writes the new tokens of one layer and returns all that this layer may attend to; `advance`
moves the end once *all* layers have written. Doing both in one call is the classic mistake: the
second layer would then write one token further than the first.

What it cannot do is why paged memory exists: it takes room for `max_seq_len` tokens from the
start, and two sequences cannot share a prefix.

    python examples/simple_kv_cache.py
"""

from __future__ import annotations

import torch
from torch import Tensor


class SimpleKVCache:
    """K and V of one sequence, one row a token.

    Parameters
    ----------
    num_layers, max_seq_len : int
    hidden_size : int
        Elements of K a token and layer, and of V: ``num_kv_heads * head_dim``.
    dtype : torch.dtype
    """

    def __init__(
        self, num_layers: int, max_seq_len: int, hidden_size: int, dtype: torch.dtype
    ) -> None:
        self.max_seq_len = max_seq_len
        self.length = 0
        self.keys = torch.zeros(num_layers, max_seq_len, hidden_size, dtype=dtype)
        self.values = torch.zeros_like(self.keys)

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write K and V [tokens, hidden_size] of one layer behind what is there.

        Returns
        -------
        tuple of Tensor
            All K and V of the layer so far, new tokens included: views, valid until the next call.

        Raises
        ------
        ValueError
            If the tokens do not fit, or K and V differ in shape.
        """
        if key.shape != value.shape:
            raise ValueError(f"K is {tuple(key.shape)} and V is {tuple(value.shape)}")
        end = self.length + key.shape[0]
        if end > self.max_seq_len:
            raise ValueError(
                f"{key.shape[0]} tokens after {self.length} do not fit {self.max_seq_len} slots"
            )
        self.keys[layer, self.length : end] = key
        self.values[layer, self.length : end] = value
        return self.keys[layer, :end], self.values[layer, :end]

    def advance(self, num_tokens: int) -> None:
        """Count `num_tokens` as written, after every layer wrote them."""
        if not 0 <= num_tokens <= self.max_seq_len - self.length:
            raise ValueError(
                f"cannot advance by {num_tokens} from {self.length} of {self.max_seq_len} slots"
            )
        self.length += num_tokens

    @property
    def nbytes(self) -> int:
        """Bytes it holds, whatever is in it."""
        return self.keys.nbytes + self.values.nbytes


def main() -> None:
    torch.manual_seed(0)
    cache = SimpleKVCache(num_layers=2, max_seq_len=8, hidden_size=4, dtype=torch.float32)
    for num_tokens in (3, 1, 1):  # a prompt, then two tokens
        for layer in range(2):
            new = torch.randn(num_tokens, 4)
            keys, _ = cache.update(layer, new, new)
        cache.advance(num_tokens)
        print(
            f"after {num_tokens} more: attention reads {keys.shape[0]} tokens of {cache.nbytes} B"
        )


if __name__ == "__main__":
    main()
