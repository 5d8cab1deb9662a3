"""`kvist bench prefix`: time to the first token by how much of a prompt is shared, and the price.

Every prompt has the same length; its beginning is that of a prompt that ran before, and the rest
is new. Beside it the price where nothing is ever shared: the same prompts with prefix caching off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvist.lab.bench.host import Host, Session
from kvist.lab.bench.hosted import HostedBench
from kvist.lab.bench.result import Chart, Column, Samples, Table, Tell, quotient

_SHARES = (
    Column("shared", "shared with an earlier prompt"),
    Column("ttft_s", "first token, ms", 1, 1e3),
    Column("faster", "against nothing shared, ×", 1),
    Column("cached_tokens", "tokens from the cache", 0),
)
_PRICE = (
    Column("prefix_caching", "prefix caching"),
    Column("ttft_s", "first token, ms", 1, 1e3),
    Column("batch_s", "batch of new prompts, s", 3),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixWorkload:
    """What is measured.

    Attributes
    ----------
    tokens : int
        Of every prompt.
    shares : tuple of int
        Per cent of it that ran before.
    batch, batch_prompt, batch_output : int
        Requests side by side that share nothing, for the price.
    repeats : int
    """

    tokens: int = 2048
    shares: tuple[int, ...] = (0, 25, 50, 75, 100)
    batch: int = 8
    batch_prompt: int = 256
    batch_output: int = 32
    repeats: int = 5


class PrefixBench(HostedBench[PrefixWorkload]):
    """Prompts that share a beginning, and prompts that do not.

    Parameters
    ----------
    host : Host
    work : PrefixWorkload
    """

    name = "prefix"
    question = "How much sooner comes the first token of a prompt whose beginning was seen before?"

    def __init__(self, host: Host, work: PrefixWorkload) -> None:
        super().__init__(host, work)
        self._price = Samples()

    def measure(self, tell: Tell) -> None:
        """See `Bench`."""
        host, work = self._host, self._work
        host.warm_up()
        sessions = {"on": host.open(prefix_caching=True), "off": host.open()}
        for repeat in range(work.repeats):
            tell(repeat / work.repeats, f"round {repeat + 1} of {work.repeats}")
            seen = host.prompt(work.tokens)
            sessions["on"].one(seen, 1)
            for share in work.shares:
                kept = work.tokens * share // 100
                prompt = seen[:kept] + host.prompt(work.tokens - kept)
                self._one_share(sessions["on"], f"{share} %", prompt)
            # Who goes first in a round pays for what happens only once in it.
            self._pay(dict(reversed(sessions.items())) if repeat % 2 else sessions)

    def _one_share(self, session: Session, row: str, prompt: tuple[int, ...]) -> None:
        line = session.one(prompt, 1)
        self._samples.note(row, "ttft_s", line.ttft_s)
        self._samples.put(row, "cached_tokens", line.num_cached)

    def _pay(self, sessions: Mapping[str, Session]) -> None:
        """Run new prompts in both modes, in turn."""
        host, work = self._host, self._work
        prompt = host.prompt(work.tokens)
        batch = [host.prompt(work.batch_prompt) for _ in range(work.batch)]
        for mode, session in sessions.items():
            self._price.note(mode, "ttft_s", session.one(prompt, 1).ttft_s)
            start_s = host.clock()
            for each in batch:
                session.add(each, work.batch_output)
            session.finish()
            self._price.note(mode, "batch_s", host.clock() - start_s)

    def tables(self) -> tuple[Table, ...]:
        """See `Bench`."""
        rows = self._samples.rows("shared")
        names = [str(row["shared"]) for row in rows]
        none = self._samples.median(names[0], "ttft_s") if names else None
        for name, row in zip(names, rows, strict=True):
            row["faster"] = quotient(none, self._samples.median(name, "ttft_s"))
        chart = Chart("First token by shared prefix", "shared", ("ttft_s",), "ms", bars=True)
        return (
            Table("shared", f"prompts of {self._work.tokens} tokens", _SHARES, rows, (chart,)),
            Table("price", "when nothing is shared", _PRICE, self._price.rows("prefix_caching")),
        )

    def facts(self) -> tuple[str, ...]:
        """See `Bench`."""
        found = []
        for column, what in (("ttft_s", "the first token"), ("batch_s", "a batch")):
            ratio = quotient(self._price.least("on", column), self._price.least("off", column))
            if ratio is not None:
                found.append(
                    f"When nothing is shared, {what} takes {ratio - 1:+.1%} with prefix caching on"
                    " (least times of both)."
                )
        return (*found, "The last token of a prompt is always computed: it says what comes next.")
