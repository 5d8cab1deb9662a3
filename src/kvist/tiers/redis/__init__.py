"""Blocks on a Redis server or cluster, or on another that speaks its protocol."""
