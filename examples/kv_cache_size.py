"""How big a KV cache is: the one formula, and the mistakes that are made with it.

python examples/kv_cache_size.py
"""

from __future__ import annotations

GIB = 1024**3


def kv_cache_bytes(
    n_layers: int, num_kv_heads: int, head_dim: int, seq_len: int, dtype_bytes: int
) -> int:
    """Bytes of K and V of one sequence.

    Parameters
    ----------
    n_layers : int
        Decoder layers that attend.
    num_kv_heads : int
        KV heads, **not** query heads: a model with grouped queries has fewer.
    head_dim : int
        Elements a head; not always ``hidden_size / num_attention_heads``.
    seq_len : int
        Tokens of prompt and answer.
    dtype_bytes : int
        2 for fp16 and bf16, 1 for fp8.

    Examples
    --------
    >>> kv_cache_bytes(32, 32, 128, 1, 2) // 1024  # Llama-2-7B in fp16: KiB a token
    512
    >>> kv_cache_bytes(32, 8, 128, 131_072, 2) / GIB  # Llama-3.1-8B at 128K
    16.0
    """
    numbers = {
        "n_layers": n_layers,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "dtype_bytes": dtype_bytes,
    }
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} is {number}; it is at least 1")
    if seq_len < 0:
        raise ValueError(f"seq_len is {seq_len}; there are no negative tokens")
    both = 2  # K and V
    return both * n_layers * num_kv_heads * head_dim * seq_len * dtype_bytes


def main() -> None:
    right = kv_cache_bytes(32, 8, 128, 131_072, 2)
    wrong = kv_cache_bytes(32, 32, 128, 131_072, 2)
    print(f"Llama-3.1-8B, one context of 131,072 tokens: {right / GIB:g} GiB")
    print(f"  with its 32 query heads for its 8 KV heads: {wrong / GIB:g} GiB, 4 x too much")
    print(f"  in GB (10^9 bytes): {right / 1e9:.1f}: the same bytes, another unit")


if __name__ == "__main__":
    main()
