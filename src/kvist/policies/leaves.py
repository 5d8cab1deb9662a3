"""Queues over a forest: of every queue the first *leaf*.

Owns which blocks are resident, who continues whom, and a place for each in one of a few queues.
Knows nothing of why a block stands where it stands: that is a policy's one idea.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from kvist.errors import IntegrityError
from kvist.policies.base import Candidate

# Entries of a heap that may be out of date before it is worth building anew.
_SLACK = 64


class Resident:
    """A block and its place.

    Attributes
    ----------
    block : Candidate
    queue : int
    priority : float
        Rank in its queue; what was placed later stands behind what has the same.
    tick : int
        When it was placed. Given once, so that it tells an entry of a heap that is still true.
    offered : bool
    """

    __slots__ = ("block", "offered", "priority", "queue", "tick")

    def __init__(self, block: Candidate, queue: int, priority: float, tick: int) -> None:
        self.block = block
        self.queue = queue
        self.priority = priority
        self.tick = tick
        self.offered = True


class Leaves:
    """Resident blocks in `num_queues` queues; the lowest rank leaves first, leaves only.

    Only leaves lie in a heap; a parent enters it when its last child is gone. Entries that are no
    longer true stay until they come up or are more than half: O(log n) amortised for everything.
    Scanning a plain list past the blocks that others continue would be O(n).
    """

    def __init__(self, num_queues: int = 1) -> None:
        self._nodes: dict[bytes, Resident] = {}
        # The dict's own, as everything here that is done for every block.
        self.has: Callable[[object], bool] = self._nodes.__contains__
        """Whether a block is resident."""
        # Residents by the block they continue, which need not be resident itself.
        self._children: dict[bytes, int] = {}
        self._heaps: list[list[tuple[float, int, bytes]]] = [[] for _ in range(num_queues)]
        self._sizes = [0] * num_queues
        self._tick = 0
        self._num_offered = 0

    # ------------------------------------------------------------------ queries

    @property
    def num_offered(self) -> int:
        """Residents that are not withheld."""
        return self._num_offered

    def size(self, queue: int = 0) -> int:
        """Sizes of a queue's residents, withheld ones too."""
        return self._sizes[queue]

    def block(self, key: bytes) -> Candidate:
        """Return what was told of a resident."""
        return self._nodes[key].block

    def is_leaf(self, key: bytes) -> bool:
        """Whether no resident continues `key`."""
        return key not in self._children

    def lowest(self, queue: int = 0) -> bytes | None:
        """Return the offered leaf of the lowest rank, or ``None``."""
        heap, find, children = self._heaps[queue], self._nodes.get, self._children
        while heap:
            _, tick, key = heap[0]
            node = find(key)
            if (
                node is not None
                and node.tick == tick
                and node.offered
                and node.queue == queue
                and key not in children
            ):
                return key
            heapq.heappop(heap)
        return None

    def __len__(self) -> int:
        return len(self._nodes)

    def offered(self) -> Iterator[bytes]:
        """Iterate over the residents that are not withheld."""
        return (key for key, node in self._nodes.items() if node.offered)

    # ------------------------------------------------------------------ changes

    def insert(self, block: Candidate, queue: int = 0, priority: float = 0) -> None:
        """Make a block resident and offered. REQUIRES it is not resident."""
        key, parent, _, size, _ = block
        nodes, children = self._nodes, self._children
        if key in nodes:
            raise IntegrityError(f"block {key.hex()[:8]} is in the eviction order already")
        self._tick = tick = self._tick + 1
        node = nodes[key] = Resident(block, queue, priority, tick)
        children[parent] = children.get(parent, 0) + 1
        self._sizes[queue] += size
        self._num_offered += 1
        if key not in children:
            self._push(key, node)

    def place(self, key: bytes, queue: int = 0, priority: float = 0) -> None:
        """Give a resident a new place: behind all of the same priority."""
        node = self._nodes[key]
        if node.queue != queue:
            self._sizes[node.queue] -= node.block.size
            self._sizes[queue] += node.block.size
            node.queue = queue
        self._tick += 1
        node.priority, node.tick = priority, self._tick
        if node.offered and key not in self._children:
            self._push(key, node)

    def move(self, key: bytes, queue: int) -> None:
        """Put a resident into another queue, at the place that its rank gives it there."""
        node = self._nodes[key]
        self._sizes[node.queue] -= node.block.size
        self._sizes[queue] += node.block.size
        node.queue = queue
        if node.offered and key not in self._children:
            self._push(key, node)

    def withhold(self, key: bytes) -> None:
        """Take a resident out of the running. Twice is once."""
        node = self._nodes[key]
        self._num_offered -= node.offered
        node.offered = False

    def offer(self, key: bytes) -> None:
        """Put a resident back where it stood."""
        node = self._nodes[key]
        if not node.offered:
            node.offered = True
            self._num_offered += 1
            if key not in self._children:
                self._push(key, node)

    def remove(self, key: bytes) -> Resident:
        """Forget a resident, offered or not; what it continues may become a leaf."""
        nodes, children = self._nodes, self._children
        node = nodes.pop(key)
        _, parent, _, size, _ = node.block
        self._num_offered -= node.offered
        self._sizes[node.queue] -= size
        siblings = children[parent] - 1
        if siblings:
            children[parent] = siblings
        else:
            del children[parent]
            above = nodes.get(parent)
            if above is not None and above.offered:
                self._push(parent, above)
        return node

    # ------------------------------------------------------------------ check

    def check(self) -> None:
        """Raise `IntegrityError` unless counts are true and every leaf can be found."""
        children: dict[bytes, int] = {}
        sizes = [0] * len(self._sizes)
        for node in self._nodes.values():
            children[node.block.parent] = children.get(node.block.parent, 0) + 1
            sizes[node.queue] += node.block.size
        if children != self._children or sizes != self._sizes:
            raise IntegrityError(f"eviction order: sizes {self._sizes} should be {sizes}")
        if sum(node.offered for node in self._nodes.values()) != self._num_offered:
            raise IntegrityError(f"eviction order counts {self._num_offered} blocks as offered")
        findable = [
            {key for _, tick, key in heap if self._is_true(tick, key, queue)}
            for queue, heap in enumerate(self._heaps)
        ]
        for key, node in self._nodes.items():
            if node.offered and key not in children and key not in findable[node.queue]:
                raise IntegrityError(f"block {key.hex()[:8]} is a leaf that could never leave")

    # ------------------------------------------------------------------ inside

    def _is_true(self, tick: int, key: bytes, queue: int) -> bool:
        node = self._nodes.get(key)
        return (
            node is not None
            and node.tick == tick
            and node.queue == queue
            and node.offered
            and key not in self._children
        )

    def _push(self, key: bytes, node: Resident) -> None:
        """Enter an offered leaf into the heap of its queue."""
        heap = self._heaps[node.queue]
        heapq.heappush(heap, (node.priority, node.tick, key))
        if len(heap) > 2 * len(self._nodes) + _SLACK:
            # A set: a block that was withheld and offered again may be in there twice.
            heap[:] = {entry for entry in heap if self._is_true(*entry[1:], node.queue)}
            heapq.heapify(heap)
