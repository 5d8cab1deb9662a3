"""`kvist bench cache`: what keeping K and V saves, against computing the whole context every token.

The same engine, model and kernels in both modes: `KVAllocation.NONE` forgets K and V of all tokens
as soon as the next token is there. Tokens are timed one by one after the first, which costs both
modes the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvist.config import KVAllocation
from kvist.engine.sequence import TokenLogprobs
from kvist.lab.bench.host import Timeline
from kvist.lab.bench.hosted import HostedBench
from kvist.lab.bench.result import Chart, Column, Table, Tell

CONTEXTS = (128, 256, 512, 1024, 2048, 4096)

_COLUMNS = (
    Column("context_tokens", "context, tokens", 0),
    Column("cached_s", "KV cache, ms a token", 1, 1e3),
    Column("recomputed_s", "no cache, ms a token", 1, 1e3),
    Column("speedup", "no cache / cache, ×", 1),
    Column("kv_bytes", "KV held, MiB", 1, 1 / (1 << 20)),
    Column("same_tokens", "same tokens"),
    Column("lead_nats", "where they part: lead of the likelier token, nats", 3),
    Column("apart_nats", "log probabilities apart, nats", 3),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheWorkload:
    """What is measured.

    Attributes
    ----------
    contexts : tuple of int
        Lengths of the prompts.
    tokens : int
        Timed at each of them.
    """

    contexts: tuple[int, ...] = CONTEXTS
    tokens: int = 8


class CacheBench(HostedBench[CacheWorkload]):
    """One stream, with a KV cache and without.

    Parameters
    ----------
    host : Host
        Contexts that its window is too short for are left out.
    work : CacheWorkload
    """

    name = "cache"
    question = "What does keeping K and V save, against computing the whole context every token?"

    def measure(self, tell: Tell) -> None:
        """See `Bench`."""
        host, work = self._host, self._work
        contexts = [c for c in work.contexts if c + work.tokens + 1 <= host.max_model_len]
        modes = {
            "cached_s": host.open(max_num_batched_tokens=max(contexts) + work.tokens),
            "recomputed_s": host.open(
                max_num_batched_tokens=max(contexts) + work.tokens, allocation=KVAllocation.NONE
            ),
        }
        host.warm_up()
        done, total = 0, 2 * sum(contexts)
        for context in contexts:
            prompt = host.prompt(context)
            lines = []
            for column, session in modes.items():
                tell(done / total, f"{context} tokens, {column.removesuffix('_s')}")
                line = session.one(prompt, work.tokens + 1, logprobs=2)
                for gap in line.gaps_s:
                    self._samples.note(context, column, gap)
                lines.append(line)
                done += context
            self._compare(context, *lines)
            speedup = self._samples.ratio(context, "recomputed_s", "cached_s")
            self._samples.put(context, "speedup", speedup)
            self._samples.put(context, "kv_bytes", context * host.kv_token_bytes)

    def _compare(self, context: int, cached: Timeline, recomputed: Timeline) -> None:
        """Say how far both modes said the same, and how near a tie it was where they parted."""
        put, total = self._samples.put, len(cached.token_ids)
        pairs = zip(cached.token_ids, recomputed.token_ids, strict=True)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), total)
        put(context, "same_tokens", f"{same} of {total}")
        if not (cached.logprobs and recomputed.logprobs):
            return
        likely = zip(cached.logprobs[:same], recomputed.logprobs[:same], strict=True)
        apart = [abs(a.logprob - b.logprob) for a, b in likely]
        if apart:
            put(context, "apart_nats", max(apart))
        if same < total:
            put(context, "lead_nats", max(_lead(m.logprobs[same]) for m in (cached, recomputed)))

    def tables(self) -> tuple[Table, ...]:
        """See `Bench`."""
        charts = (
            Chart("A token's price by context", "context_tokens", ("cached_s", "recomputed_s"),
                  "ms a token", log=True),
        )  # fmt: skip
        rows = self._samples.rows("context_tokens")
        return (Table("tokens", "time of one more token", _COLUMNS, rows, charts),)

    def facts(self) -> tuple[str, ...]:
        """See `Bench`."""
        found = [
            f"At {row['context_tokens']:,} tokens one more token costs {row['speedup']:.0f} × as"
            " much without a KV cache."
            for row in self._samples.rows("context_tokens")[-1:]
            if row.get("speedup") is not None
        ]
        rows = self._samples.rows("context_tokens")
        leads = [lead for row in rows if isinstance(lead := row.get("lead_nats"), float)]
        if leads:
            found.append(
                "Both modes run their sums in another order. Where they part, the likeliest token"
                f" leads the next by {max(leads):.3f} nats at most: a tie, to the last bits of the"
                " number format."
            )
        return tuple(found)


def _lead(position: TokenLogprobs) -> float:
    """By how much the likeliest token leads the next."""
    (_, first), (_, second) = position.top[:2]
    return first - second
