"""The same model, prompts and lengths on Kvist and its peers: ``python -m benchmarks.peers``."""
