"""One claim a module, measured in one way: a workload, samples as they come, one form of result."""
