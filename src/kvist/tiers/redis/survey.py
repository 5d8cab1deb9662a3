"""Looking around on the servers, for people: which blocks there are, how full memory is.

Owns nothing; asks and adds up. Slow, and not part of any request. Threads: any that may wait.
"""

from __future__ import annotations

from collections.abc import Iterator

from redis.exceptions import ResponseError

from kvist.keys import BlockKey
from kvist.tiers.redis.blocks import RedisBlocks
from kvist.tiers.redis.layout import Header, key_of
from kvist.tiers.redis.servers import RedisServers

_SCAN_COUNT = 500


def scan(
    servers: RedisServers, blocks: RedisBlocks, namespace: bytes
) -> Iterator[tuple[BlockKey, Header]]:
    """Iterate over the blocks of a namespace on every node that answers. Looks at every name."""
    space = blocks.space_name(namespace)
    for node in servers.nodes():
        cursor: bytes | int = 0
        while True:
            replies = node.exchange(
                [("SCAN", cursor, "MATCH", space + b":{*}", "COUNT", _SCAN_COUNT)]
            )
            if replies.down or isinstance(replies.values[0], ResponseError):
                break
            cursor, names = replies.values[0]
            keys = [key for name in names if (key := key_of(name, space)) is not None]
            for key, header in zip(keys, blocks.headers(namespace, keys), strict=True):
                if isinstance(header, Header):
                    yield key, header
            if int(cursor) == 0:
                break


def memory(servers: RedisServers) -> tuple[int, int] | None:
    """Return bytes there are and bytes used on all nodes; None if one of them does not say."""
    capacity = used = 0
    for node in servers.nodes():
        replies = node.exchange([("INFO", "memory")])
        if replies.down or not isinstance(replies.values[0], bytes):
            return None
        lines = (line.partition(b":") for line in replies.values[0].splitlines())
        said = {name: value for name, _, value in lines}
        try:
            limit = int(said.get(b"maxmemory", 0)) or int(said.get(b"total_system_memory", 0))
            used += int(said[b"used_memory"])
        except (KeyError, ValueError):
            return None
        capacity += limit
    return capacity, used
