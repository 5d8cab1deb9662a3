"""Arithmetic over the paged pool: write by slot, copy blocks, attend through block tables.

Owns what the bytes of a block mean to attention. Knows no sequences, no scheduler, no tiers and no
formats by name: a ``BlockLayout`` and a batch of integers are all it is given. ``reference`` is the
meaning; every other backend must agree with it; ``dispatch`` says which one runs, and why.
"""
