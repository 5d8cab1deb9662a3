"""KV formats: how K and V of a block are packed, one format a file, numbers only."""
