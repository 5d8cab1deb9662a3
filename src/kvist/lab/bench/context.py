"""`kvist bench context`: how decoding slows with context, and where memory ends.

The second part loads the engine for real: a number of streams, all of one length, which grows until
not all of them are let in side by side. Each length begins with what the one before computed, so
the whole climb costs one pool of tokens. The critical length is compared with the arithmetic: the
scheduler keeps some room free, and blocks are not all full.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvist.lab.bench.host import Host, Session
from kvist.lab.bench.hosted import HostedBench
from kvist.lab.bench.result import Chart, Column, Samples, Table, Tell

_SPEED = (
    Column("context_tokens", "context, tokens", 0),
    Column("token_s", "a token, ms", 2, 1e3),
    Column("tokens_per_s", "tokens/s", 1),
    Column("kv_bytes", "KV read a token, MiB", 1, 1 / (1 << 20)),
)
_LOAD = (
    Column("context_tokens", "context of each, tokens", 0),
    Column("side_by_side", "side by side", 0),
    Column("filled", "pool filled, %", 1, 100),
    Column("preemptions", "preemptions", 0),
    Column("round_s", "all answered, s", 2),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextWorkload:
    """What is measured.

    Attributes
    ----------
    contexts : tuple of int
    tokens : int
        Timed at each context, of one stream.
    streams : int
        That share the pool of `slots` tokens in the second part.
    slots : int
    step : int
        Tokens by which their contexts grow.
    answer : int
        Tokens that each of them says at each length.
    """

    contexts: tuple[int, ...] = (128, 512, 1024, 2048, 4096, 8000)
    tokens: int = 32
    streams: int = 8
    slots: int = 16_384
    step: int = 128
    answer: int = 4


class ContextBench(HostedBench[ContextWorkload]):
    """Decode speed by context, and the context at which a number of streams fills the pool.

    Parameters
    ----------
    host : Host
        Its pool holds at least `work.slots` tokens.
    work : ContextWorkload
    """

    name = "context"
    question = "How does decoding slow with context, and at which length does memory end?"

    def __init__(self, host: Host, work: ContextWorkload) -> None:
        super().__init__(host, work)
        self._load = Samples()
        self._critical: int | None = None

    def measure(self, tell: Tell) -> None:
        """See `Bench`."""
        host, work = self._host, self._work
        host.warm_up()
        session = host.open()
        contexts = [c for c in work.contexts if c + work.tokens + 1 <= host.max_model_len]
        for number, context in enumerate(contexts):
            tell(0.5 * number / len(contexts), f"decoding at {context} tokens")
            line = session.one(host.prompt(context), work.tokens + 1)
            for gap in line.gaps_s:
                self._samples.note(context, "token_s", gap)
                self._samples.note(context, "tokens_per_s", 1 / gap)
            self._samples.put(context, "kv_bytes", context * host.kv_token_bytes)
        self._climb(tell)

    def _climb(self, tell: Tell) -> None:
        """Let contexts grow until the pool no longer holds all of them."""
        host, work = self._host, self._work
        most = work.slots // work.streams
        session = host.open(
            prefix_caching=True,
            num_blocks=work.slots // host.block_size,
            max_model_len=min(host.max_model_len, work.slots),
            max_num_seqs=work.streams,
        )
        texts: list[tuple[int, ...]] = [()] * work.streams
        context = max(work.step, most // 2 // work.step * work.step)
        # The beginnings are read once before: else the first are answered, and gone, while the
        # last are still being read, and what was short of time looks short of room.
        texts = [host.prompt(min(context, host.max_model_len - 2)) for _ in texts]
        for text in texts:
            session.one(text, 1)
        while context <= most + 2 * work.step and context + work.answer < host.max_model_len:
            tell(0.5 + 0.5 * context / (most + 2 * work.step), f"{work.streams} × {context}")
            texts = [text + host.prompt(context - len(text)) for text in texts]
            fits = self._load_once(session, texts, context)
            if not fits and self._critical is None:
                # The longest that all of them reach, between this length and the one before.
                self._critical = context - work.step
            context += work.step

    def _load_once(self, session: Session, texts: list[tuple[int, ...]], context: int) -> bool:
        host, work = self._host, self._work
        before, start_s = session.num_preemptions, host.clock()
        for text in texts:
            session.add(text, work.answer)
        most, filled = 0, 0.0
        while session.engine.has_work:
            session.step()
            scheduler = session.engine.scheduler
            most = max(most, scheduler.num_running)
            filled = max(filled, session.cache.num_used_blocks / session.cache.num_blocks)
        self._load.put(context, "side_by_side", most)
        self._load.put(context, "filled", filled)
        self._load.put(context, "preemptions", session.num_preemptions - before)
        self._load.put(context, "round_s", host.clock() - start_s)
        return most == work.streams and session.num_preemptions == before

    def tables(self) -> tuple[Table, ...]:
        """See `Bench`."""
        work = self._work
        speed = Chart("Decoding, one stream", "context_tokens", ("token_s",), "ms a token")
        load = Chart(
            f"{work.streams} streams in {work.slots:,} tokens of pool", "context_tokens",
            ("side_by_side",), "run side by side",
        )  # fmt: skip
        rows = self._samples.rows("context_tokens"), self._load.rows("context_tokens")
        title = f"{work.streams} streams in a pool of {work.slots:,} tokens"
        return (
            Table("speed", "one stream", _SPEED, rows[0], (speed,)),
            Table("load", title, _LOAD, rows[1], (load,)),
        )

    def facts(self) -> tuple[str, ...]:
        """See `Bench`."""
        work = self._work
        if self._critical is None:
            return ()
        return (
            (
                f"{work.streams} streams fit side by side up to {self._critical:,} tokens each (in"
                f" steps of {work.step}); the pool divided by their number is"
                f" {work.slots // work.streams:,}. The scheduler keeps a watermark of 5 % free."
            ),
        )
