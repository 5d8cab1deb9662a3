"""Who goes first: eviction orders over block ids, pure Python, one idea a file."""
