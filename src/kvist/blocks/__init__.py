"""The books: which block holds what and who uses it. Integers only, no bytes."""
