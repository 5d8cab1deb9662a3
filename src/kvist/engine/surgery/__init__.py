"""Replacing what a model computes with modules by fewer and faster calls."""
