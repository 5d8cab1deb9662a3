"""Requests of a trace or a recording through the real books, without a model and without bytes."""
