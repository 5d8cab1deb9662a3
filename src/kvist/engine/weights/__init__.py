"""Where weights come from: names to folders, downloads, conversions, digests, loading."""
