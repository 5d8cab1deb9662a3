"""Bytes of a block on their way to and from a tier: one transport codec a file."""
