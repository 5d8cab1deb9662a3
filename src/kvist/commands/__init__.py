"""Commands of `kvist` that answer questions: parse, call, print. One file a group."""
