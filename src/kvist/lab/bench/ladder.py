"""`kvist bench ladder`: one workload, one rung more each time: what each idea adds.

::

    no cache       every token computes its whole context again
    KV cache       K and V are kept; each request reserves room for the longest there may be
    paged          blocks as they are needed, so more requests run side by side
    prefix         equal beginnings are computed once, while the pool still has them
    tiers          what the pool has no room for waits in host memory

All rungs run the same requests in the same order over the same pool, with the same model and
kernels. The first rung is slow by nature: it runs only the first requests, and its rates are those.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass
from typing import Any

from kvist.config import KVAllocation
from kvist.lab.bench.host import Host, Session, Timeline
from kvist.lab.bench.hosted import HostedBench
from kvist.lab.bench.result import Chart, Column, Table, Tell, quotient

_COLUMNS = (
    Column("rung", "rung"),
    Column("tokens_per_s", "generated tokens/s", 1),
    Column("step_up", "over the rung before, ×", 1),
    Column("ttft_s", "first token, median, s", 3),
    Column("side_by_side", "side by side", 1),
    Column("cached_share", "prompt tokens reused, %", 1, 100),
    Column("requests", "requests", 0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderWorkload:
    """What is measured.

    Attributes
    ----------
    documents, document : int
        Beginnings that requests share, popular as 1 / rank, and their tokens.
    question, answer : int
        Tokens of each request's own, and of what it gets.
    requests : int
    clients : int
        Ask one after the other; nobody before they were answered.
    slots : int
        Tokens that the pool holds.
    max_model_len : int
        What the second rung reserves for each request.
    no_cache_requests : int
        Of the first rung.
    repeats : int
    """

    documents: int = 16
    document: int = 512
    question: int = 48
    answer: int = 32
    requests: int = 32
    clients: int = 8
    slots: int = 6144
    max_model_len: int = 2048
    no_cache_requests: int = 2
    repeats: int = 2
    seed: int = 0


class LadderBench(HostedBench[LadderWorkload]):
    """The rungs in turn.

    Parameters
    ----------
    host : Host
        Its pool holds at least `work.slots` tokens.
    tiered : Session or None
        An engine over the same kind of pool of `work.slots` tokens, with a tier below it. ``None``
        leaves the last rung out.
    work : LadderWorkload
    """

    name = "ladder"
    question = "What does each idea add to the one before?"

    def __init__(self, host: Host, tiered: Session | None, work: LadderWorkload) -> None:
        super().__init__(host, work)
        self._tiered = tiered
        self._rungs: list[str] = []

    def measure(self, tell: Tell) -> None:
        """See `Bench`."""
        work = self._work
        self._host.warm_up()
        rungs: dict[str, dict[str, Any]] = {
            "no cache": {"allocation": KVAllocation.NONE},
            "KV cache": {"allocation": KVAllocation.RESERVE},
            "paged": {},
            "prefix": {"prefix_caching": True},
        }
        self._rungs = [*rungs, *(["tiers"] if self._tiered is not None else [])]
        total = work.repeats * len(self._rungs)
        for repeat in range(work.repeats):
            requests = self._requests(repeat)
            for number, rung in enumerate(self._rungs):
                tell((repeat * len(self._rungs) + number) / total, f"{rung}, round {repeat + 1}")
                if rung == "no cache" and repeat:
                    continue
                if rung in rungs:
                    session = self._host.open(
                        num_blocks=work.slots // self._host.block_size,
                        max_model_len=work.max_model_len,
                        max_num_seqs=work.clients,
                        **rungs[rung],
                    )
                else:
                    assert self._tiered is not None
                    session = self._tiered
                most = work.no_cache_requests if rung == "no cache" else work.requests
                self._climb(rung, session, requests[:most])

    def _requests(self, repeat: int) -> list[tuple[int, ...]]:
        """Draw the requests of a round; other documents each time, the same for all rungs."""
        host, work = self._host, self._work
        draw = random.Random(work.seed + repeat)
        documents = [host.prompt(work.document) for _ in range(work.documents)]
        popularity = [1 / (rank + 1) for rank in range(work.documents)]
        return [
            draw.choices(documents, popularity)[0] + host.prompt(work.question)
            for _ in range(work.requests)
        ]

    def _climb(self, rung: str, session: Session, requests: list[tuple[int, ...]]) -> None:
        host, work = self._host, self._work
        waiting = list(reversed(requests))
        lines: list[Timeline] = []
        open_: list[Timeline] = []
        running: list[int] = []
        start_s = host.clock()
        while waiting or open_:
            while waiting and len(open_) < work.clients:
                open_.append(session.add(waiting.pop(), work.answer))
                lines.append(open_[-1])
            session.step()
            running.append(session.engine.scheduler.num_running)
            open_ = [line for line in open_ if not line.is_finished]
        wall_s = host.clock() - start_s
        note = self._samples.note
        note(rung, "tokens_per_s", len(lines) * work.answer / wall_s)
        note(rung, "ttft_s", statistics.median(line.ttft_s for line in lines))
        note(rung, "side_by_side", statistics.fmean(running))
        cached = sum(line.num_cached for line in lines)
        note(rung, "cached_share", cached / sum(map(len, requests)))
        self._samples.put(rung, "requests", len(requests))

    def tables(self) -> tuple[Table, ...]:
        """See `Bench`."""
        rows = self._samples.rows("rung")
        before: float | None = None
        for row in rows:
            speed = self._samples.median(str(row["rung"]), "tokens_per_s")
            row["step_up"] = quotient(speed, before)
            before = speed
        charts = (
            Chart("Generated tokens a second", "rung", ("tokens_per_s",), "tokens/s", bars=True),
            Chart("First token", "rung", ("ttft_s",), "s", bars=True),
        )
        work = self._work
        title = (
            f"{work.requests} questions about {work.documents} documents of {work.document} tokens,"
            f" {work.clients} clients, a pool of {work.slots:,} tokens"
        )
        return (Table("rungs", title, _COLUMNS, rows, charts),)

    def facts(self) -> tuple[str, ...]:
        """See `Bench`."""
        ends = [self._samples.median(rung, "tokens_per_s") for rung in self._rungs]
        reached = [speed for speed in ends if speed is not None]
        found = []
        if len(reached) > 1:
            found.append(f"From the first rung to the last: {reached[-1] / reached[0]:.0f} ×.")
        most = self._work.documents * self._work.document
        return (
            *found,
            f"The documents are {most:,} tokens in all, the pool holds {self._work.slots:,}.",
            (
                f"The first rung ran {self._work.no_cache_requests} of the requests, once, side by"
                " side."
            ),
        )
