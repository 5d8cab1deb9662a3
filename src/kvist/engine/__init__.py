"""The engine: turns requests into tokens over the cache. Schedule, run, commit."""
