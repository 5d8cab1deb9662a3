"""The disk tier: one slab of extents, its index, and the threads that move bytes."""
