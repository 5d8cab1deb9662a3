"""`kvist bench block-size`: what a block's size costs and brings, from 8 to 128 tokens.

Small blocks waste fewer slots at the ends of sequences and let prefixes meet in finer steps; large
ones mean shorter tables and longer runs of memory. Utilization and hits come from the books and are
exact; tokens/s come from an engine that is opened anew with each size. The fast kernels take
multiples of 16; a size that is none runs on the reference kernels, and its row says so.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvist.lab.bench.host import Host, null_host
from kvist.lab.bench.result import Chart, Column, Samples, Table, Tell

FAST_MULTIPLE = 16

_COLUMNS = (
    Column("block_tokens", "block size", 0),
    Column("utilization", "slots filled, %", 1, 100),
    Column("hit", "of what is shared, found, %", 1, 100),
    Column("tokens_per_s", "decode, tokens/s", 1),
    Column("ttft_s", "first token, ms", 1, 1e3),
    Column("kernels", "kernels"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSizeWorkload:
    """What is measured.

    Attributes
    ----------
    sizes : tuple of int
    requests : int
        Drawn for the books, of which at most `side_by_side` run.
    prefix : tuple of int
        Least and most tokens that two prompts share.
    streams, prompt, output : int
        For tokens/s and the first token.
    repeats : int
    """

    sizes: tuple[int, ...] = (8, 16, 32, 64, 128)
    requests: int = 64
    side_by_side: int = 16
    prefix: tuple[int, int] = (50, 600)
    streams: int = 8
    prompt: int = 512
    output: int = 24
    repeats: int = 3


class BlockSizeBench:
    """The same requests over blocks of every size.

    Parameters
    ----------
    open_host : callable or None
        Opens the model with a block size and returns host, name of the kernels and a function that
        closes it. ``None``: books only.
    work : BlockSizeWorkload
    """

    name = "block-size"
    question = "What does the size of a block cost, and what does it bring?"

    def __init__(
        self,
        open_host: Callable[[int], tuple[Host, str, Callable[[], None]]] | None,
        work: BlockSizeWorkload,
    ) -> None:
        self._open = open_host
        self._work = work
        self._samples = Samples()
        self._model = "none"

    @property
    def workload(self) -> Mapping[str, Any]:
        """See `Bench`."""
        return {"model": self._model, **asdict(self._work)}

    def measure(self, tell: Tell) -> None:
        """See `Bench`."""
        sizes = self._work.sizes
        for number, size in enumerate(sizes):
            tell(number / len(sizes), f"blocks of {size}")
            self._samples.put(size, "utilization", self._utilization(size))
            self._samples.put(size, "hit", self._hit(size))
            if self._open is not None:
                host, kernels, close = self._open(size)
                self._model = host.model
                self._samples.put(size, "kernels", kernels)
                try:
                    self._time(host, size)
                finally:
                    close()

    def _utilization(self, size: int) -> float:
        """Filled / allocated slots, averaged over the steps of a mixed workload."""
        host = null_host(32_768 // size, size, 2048)
        session = host.open(max_num_seqs=self._work.side_by_side)
        draw = random.Random(0)
        for _ in range(self._work.requests):
            session.add(host.prompt(draw.randint(16, 512)), draw.randint(16, 128))
        shares = []
        while session.engine.has_work:
            session.step()
            stats = session.cache.stats()
            if stats.allocated_slots:
                shares.append(stats.filled_slots / stats.allocated_slots)
        return statistics.fmean(shares)

    def _hit(self, size: int) -> float:
        """Tokens found / tokens shared, over pairs of prompts with prefixes of any length."""
        host = null_host(65_536 // size, size, 2048)
        session = host.open(prefix_caching=True)
        draw = random.Random(1)
        shared = found = 0
        for _ in range(self._work.requests // 2):
            prefix = host.prompt(draw.randint(*self._work.prefix))
            session.one(prefix + host.prompt(32), 1)
            found += session.one(prefix + host.prompt(32), 1).num_cached
            shared += len(prefix)
        return found / shared

    def _time(self, host: Host, size: int) -> None:
        work = self._work
        host.warm_up()
        for _ in range(work.repeats):
            session = host.open()
            self._samples.note(size, "ttft_s", session.one(host.prompt(work.prompt), 1).ttft_s)
            lines = [
                session.add(host.prompt(work.prompt), work.output) for _ in range(work.streams)
            ]
            session.finish()
            start_s = max(line.token_s[0] for line in lines)
            end_s = max(line.token_s[-1] for line in lines)
            after = sum(sum(at > start_s for at in line.token_s) for line in lines)
            self._samples.note(size, "tokens_per_s", after / (end_s - start_s))

    def tables(self) -> tuple[Table, ...]:
        """See `Bench`."""
        charts = [
            Chart("Filled, and found", "block_tokens", ("utilization", "hit"), "%", bars=True)
        ]
        columns: tuple[Column, ...] = _COLUMNS[:3]
        if self._open is not None:
            columns = _COLUMNS
            charts.append(
                Chart("Decoding", "block_tokens", ("tokens_per_s",), "tokens/s", bars=True)
            )
        rows = self._samples.rows("block_tokens")
        return (Table("sizes", "by block size", columns, rows, tuple(charts)),)

    def facts(self) -> tuple[str, ...]:
        """See `Bench`."""
        return (
            (
                f"The fast kernels take multiples of {FAST_MULTIPLE}; other sizes run on the"
                " reference kernels, so their speed says nothing about the size."
            ),
            (
                f"Prefixes of {self._work.prefix[0]} to {self._work.prefix[1]} tokens; a block that"
                " is only partly shared is computed again."
            ),
        )
