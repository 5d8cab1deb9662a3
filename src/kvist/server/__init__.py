"""HTTP in front of an engine that runs in a process of its own. Touches text, never tensors."""
