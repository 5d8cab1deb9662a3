"""`kvist bench serve URL`: how a server holds up under load that does not wait for it.

An open loop: requests are sent at their times whether the server keeps up or not, and times count
from when a request was to be sent, so that a slow server cannot make its own load lighter. Goodput
is what counts for users: requests whose first token and whose pace both kept what was promised (as
in DistServe). The server may be anybody's; of its usage counts only what it says is used.

What cached tokens saved is an estimate: their number times the price of a prompt token, which two
probes of an idle server, a short and a long one, tell.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvist.errors import ConfigError
from kvist.lab.bench.http_stream import Answer, StreamClient
from kvist.lab.bench.load import Arrival, Words, from_trace, open_loop
from kvist.lab.bench.result import Chart, Column, Samples, Table, Tell
from kvist.lab.traces import TraceRequest

_COLUMNS = (
    Column("load", "load"),
    Column("finished", "finished", 0),
    Column("failed", "failed", 0),
    Column("ttft_p50_s", "first token p50, s", 3),
    Column("ttft_p95_s", "p95, s", 3),
    Column("tpot_p50_s", "a token p50, ms", 1, 1e3),
    Column("itl_p50_s", "gap p50, ms", 1, 1e3),
    Column("itl_p99_s", "gap p99, ms", 1, 1e3),
    Column("tokens_per_s", "tokens/s", 1),
    Column("goodput_per_s", "good requests/s", 2),
    Column("good_share", "good, %", 1, 100),
    Column("cached_share", "prompt tokens cached, %", 1, 100),
    Column("saved_s", "saved, s", 2),
)
_PROBES = 3
_SHORT_WORDS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeWorkload:
    """What the server is asked.

    Attributes
    ----------
    rates : tuple of float
        Requests a second of the open loops, one after the other.
    seconds : float
        Of each.
    prompt_tokens, shared_tokens, prefixes, max_tokens : int
        Each prompt begins with one of so many shared texts.
    slo_ttft_s, slo_tpot_s : float
        What is promised: the first token, and each one after it.
    timeout_s : float
    chat : bool
        Chat completions, else completions.
    trace_requests : int
    trace_speed, trace_shrink : float
        Of a trace, if one is given: then there are no open loops.
    """

    rates: tuple[float, ...] = (0.5, 1.0, 2.0)
    seconds: float = 20.0
    prompt_tokens: int = 512
    shared_tokens: int = 384
    prefixes: int = 4
    max_tokens: int = 32
    slo_ttft_s: float = 2.0
    slo_tpot_s: float = 0.1
    timeout_s: float = 120.0
    chat: bool = True
    trace_requests: int = 100
    trace_speed: float = 1.0
    trace_shrink: float = 32.0
    seed: int = 0


class ServeBench:
    """Load on a server.

    Parameters
    ----------
    client : StreamClient
    model : str or None
        The first that the server names, if ``None``.
    work : ServeWorkload
    trace : sequence of TraceRequest or None
    """

    name = "serve"
    question = "What do users of a server get under load, and how much of it in time?"

    def __init__(
        self,
        client: StreamClient,
        model: str | None,
        work: ServeWorkload,
        trace: Sequence[TraceRequest] | None = None,
    ) -> None:
        self._client = client
        self._model = model
        self._work = work
        self._trace = trace
        self._samples = Samples()
        self._failures: Counter[str] = Counter()
        self._late_s: list[float] = []
        self._prompt_token_s: float | None = None
        self._extras: dict[str, Any] = {"ignore_eos": True}
        self._counts_usage = True

    @property
    def workload(self) -> Mapping[str, Any]:
        """See `Bench`."""
        return {"url": self._client.url, "model": self._model, **asdict(self._work)}

    def measure(self, tell: Tell) -> None:
        """See `Bench`.

        Raises
        ------
        ConfigError
            If the server cannot be reached, or does not answer a first request.
        """
        tell(0.0, "probing the server")
        if self._model is None:
            self._model = asyncio.run(self._client.first_model())
        words = asyncio.run(self._probe())
        work = self._work
        if self._trace is not None:
            arrivals = from_trace(
                words,
                self._trace,
                count=work.trace_requests,
                speed=work.trace_speed,
                shrink=work.trace_shrink,
            )
            self._load("trace", arrivals, lambda share: tell(share, "trace"))
            return
        for number, rate in enumerate(work.rates):
            arrivals = open_loop(
                words,
                rate=rate,
                seconds=work.seconds,
                prompt_tokens=work.prompt_tokens,
                shared_tokens=work.shared_tokens,
                prefixes=work.prefixes,
                max_tokens=work.max_tokens,
                seed=work.seed,
            )

            def told(share: float, number: int = number, rate: float = rate) -> None:
                tell((number + share) / len(work.rates), f"{rate:g} requests/s")

            self._load(f"{rate:g}/s", arrivals, told)

    # ------------------------------------------------------------------ probing

    async def _probe(self) -> Words:
        """Learn what a word and a prompt token cost, and what the server understands."""
        words = Words(1.0, self._work.seed + 1)
        answer = await self._ask(words.fresh(_SHORT_WORDS), 2)
        if answer.status in (400, 422):  # not everybody knows how to ignore the end
            self._extras = {}
            answer = await self._ask(words.fresh(_SHORT_WORDS), 2)
        if answer.failure is not None:
            raise ConfigError(f"{self._client.url} does not serve {self._model}: {answer.failure}")
        long_words = max(4 * _SHORT_WORDS, self._work.prompt_tokens // 2)
        short: list[Answer] = []
        long: list[Answer] = []
        for _ in range(_PROBES):
            for found, count in ((short, _SHORT_WORDS), (long, long_words)):
                found.append(await self._ask(words.fresh(count), 2))
        bad = next((each.failure for each in (*short, *long) if each.failure), None)
        if bad is not None:
            raise ConfigError(f"{self._client.url} failed an idle probe: {bad}")
        counts = [(each.prompt_tokens, each.cached_tokens) for each in (*short, *long)]
        if any(prompt is None for prompt, _ in counts):
            self._counts_usage = False
            return Words(1.0, self._work.seed)
        more_tokens = statistics.median(e.prompt_tokens or 0 for e in long) - statistics.median(
            e.prompt_tokens or 0 for e in short
        )
        more_s = statistics.median(e.ttft_s for e in long) - statistics.median(
            e.ttft_s for e in short
        )
        if more_tokens <= 0:
            raise ConfigError(f"{self._client.url} counts no more tokens for longer prompts")
        if more_s > 0:
            self._prompt_token_s = more_s / more_tokens
        return Words(more_tokens / (long_words - _SHORT_WORDS), self._work.seed)

    async def _ask(self, text: str, max_tokens: int, due_s: float | None = None) -> Answer:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extras,
        }
        if self._work.chat:
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
        path = "/chat/completions" if self._work.chat else "/completions"
        due_s = time.perf_counter() if due_s is None else due_s
        return await self._client.ask(path, body, due_s, self._work.timeout_s)

    # ------------------------------------------------------------------ load

    def _load(self, row: str, arrivals: Sequence[Arrival], told: Callable[[float], None]) -> None:
        """Send all arrivals; what has ended when Ctrl-C comes is kept."""
        answers: list[Answer] = []
        start_s = time.perf_counter()

        async def one(arrival: Arrival) -> None:
            answer = await self._ask(arrival.text, arrival.max_tokens, start_s + arrival.due_s)
            answers.append(answer)
            told(len(answers) / len(arrivals))

        async def everyone() -> None:
            async with asyncio.TaskGroup() as group:
                for arrival in arrivals:
                    # Also when late: those who are answered must be heard.
                    await asyncio.sleep(max(0.0, start_s + arrival.due_s - time.perf_counter()))
                    group.create_task(one(arrival))

        try:
            asyncio.run(everyone())
        finally:
            if answers:
                self._record(row, answers, time.perf_counter() - start_s)

    def _record(self, row: str, answers: Sequence[Answer], wall_s: float) -> None:
        work = self._work
        whole = [answer for answer in answers if answer.is_whole]
        self._failures.update(a.failure or "?" for a in answers if not a.is_whole)
        self._late_s += [answer.sent_s - answer.due_s for answer in answers]
        good = [
            answer
            for answer in whole
            if answer.ttft_s <= work.slo_ttft_s and (answer.tpot_s or 0.0) <= work.slo_tpot_s
        ]
        gaps = [gap for answer in whole for gap in answer.gaps_s]
        cells: dict[str, str | int | float | None] = {
            "finished": len(whole),
            "failed": len(answers) - len(whole),
            "ttft_p50_s": percentile([a.ttft_s for a in whole], 50),
            "ttft_p95_s": percentile([a.ttft_s for a in whole], 95),
            "tpot_p50_s": percentile([a.tpot_s for a in whole if a.tpot_s is not None], 50),
            "itl_p50_s": percentile(gaps, 50),
            "itl_p99_s": percentile(gaps, 99),
            "tokens_per_s": sum(a.num_tokens for a in whole) / wall_s,
            "goodput_per_s": len(good) / wall_s,
            "good_share": len(good) / len(answers),
        }
        counted = [a for a in whole if a.cached_tokens is not None and a.prompt_tokens]
        if counted:
            cached = sum(a.cached_tokens or 0 for a in counted)
            cells["cached_share"] = cached / sum(a.prompt_tokens or 0 for a in counted)
            if self._prompt_token_s is not None:
                cells["saved_s"] = cached * self._prompt_token_s
        for column, value in cells.items():
            self._samples.put(row, column, value)

    def tables(self) -> tuple[Table, ...]:
        """See `Bench`."""
        work = self._work
        charts = (
            Chart("First token", "load", ("ttft_p50_s", "ttft_p95_s"), "s", bars=True),
            Chart("Requests that kept the promise", "load", ("good_share",), "%", bars=True),
        )
        title = (
            f"good: first token within {work.slo_ttft_s:g} s, then one every"
            f" {1e3 * work.slo_tpot_s:g} ms"
        )
        return (Table("load", title, _COLUMNS, self._samples.rows("load"), charts),)

    def facts(self) -> tuple[str, ...]:
        """See `Bench`."""
        found = []
        if self._late_s:
            late = percentile(self._late_s, 99) or 0.0
            found.append(f"The client was {1e3 * late:.0f} ms late at most for 99 % of requests.")
        if self._prompt_token_s is not None:
            found.append(
                f"A prompt token costs this server {1e3 * self._prompt_token_s:.2f} ms when idle;"
                " cached ones are taken to have saved that each (an estimate)."
            )
        if not self._counts_usage:
            found.append("The server counts no tokens; a word is taken for a token.")
        found += [f"{count} × {why}" for why, count in self._failures.most_common(5)]
        return tuple(found)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the smallest value that `percent` of them do not exceed; ``None`` of nothing."""
    if not values:
        return None
    rank = -(-len(values) * percent // 100)
    return sorted(values)[max(0, int(rank) - 1)]
