"""What happened, in numbers: the listener that turns events into counters and histograms.

Owns the counts and nothing else; who shows them, and under which names, is the server's. Hears what
the event log says and looks at nobody's inside. No torch. Threads: step thread only.

Bounded: one small record for each unfinished sequence, the rest is of fixed size. A step costs a
few set operations over its sequences, since all that had a token in the last step too share one
gap.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvist.events import (
    BlockEvicted,
    BlockStored,
    Event,
    EventLog,
    PrefixLoaded,
    RequestAdded,
    RequestExpired,
    RequestFinished,
    RequestPreempted,
    RequestRejected,
    RequestScheduled,
    StepDone,
    StepFailed,
)

# Upper bounds as in vLLM, so that its dashboards fit.
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_GAP = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_TOKENS = tuple(float(n) for n in (1, *(2**e for e in range(3, 15))))


@dataclass(frozen=True, slots=True)
class HistogramCounts:
    """A histogram as it stands.

    Attributes
    ----------
    bounds : tuple of float
        Upper bounds, inclusive.
    counts : tuple of int
        Observations of each bucket alone, and one more: of those above all bounds.
    total : float
        Sum of the observations.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True)
class TelemetryCounts:
    """Everything since the engine was opened.

    Attributes
    ----------
    counters : mapping of name to int
        See `Telemetry.counts`.
    finished, rejected : mapping of reason to int
        Sequences that ended; requests that were turned away.
    histograms : mapping of name to HistogramCounts
    """

    counters: Mapping[str, int]
    finished: Mapping[str, int]
    rejected: Mapping[str, int]
    histograms: Mapping[str, HistogramCounts]


class _Histogram:
    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def counts(self) -> HistogramCounts:
        return HistogramCounts(self._bounds, tuple(self._counts), self._total)


class _Life:
    """When what happened to an unfinished sequence."""

    __slots__ = ("arrived_s", "first_s", "last_s", "scheduled_s")

    def __init__(self, arrived_s: float) -> None:
        self.arrived_s = arrived_s
        self.scheduled_s: float | None = None
        self.first_s: float | None = None
        self.last_s = arrived_s


class Telemetry:
    """Counters and histograms of one engine.

    Parameters
    ----------
    events : EventLog
        Subscribed to.
    max_model_len : int
        Where the histograms of lengths end.
    clock : callable
        Seconds; the one that `RequestAdded.arrived_s` is of.
    """

    def __init__(
        self,
        events: EventLog,
        max_model_len: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._events = events
        self._clock = clock
        self._counters: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter()
        lengths = _one_two_five(max_model_len)
        self._histograms = {
            "time_to_first_token_seconds": _Histogram(_FIRST_TOKEN),
            "inter_token_latency_seconds": _Histogram(_GAP),
            "request_time_per_output_token_seconds": _Histogram(_GAP),
            "e2e_request_latency_seconds": _Histogram(_REQUEST),
            "request_queue_time_seconds": _Histogram(_REQUEST),
            "request_inference_time_seconds": _Histogram(_REQUEST),
            "request_prefill_time_seconds": _Histogram(_REQUEST),
            "request_decode_time_seconds": _Histogram(_REQUEST),
            "request_prompt_tokens": _Histogram(lengths),
            "request_generation_tokens": _Histogram(lengths),
            "iteration_tokens_total": _Histogram(_STEP_TOKENS),
        }
        self._lives: dict[str, _Life] = {}
        # Ended in the step that is not recorded yet: its last token is still to come.
        self._ended: list[tuple[_Life, RequestFinished]] = []
        # Who had a token in the last step, at `_step_s`; their `last_s` is that.
        self._sampled: frozenset[str] = frozenset()
        self._step_s = 0.0
        self._handlers: dict[type, Callable[[Event], None]] = {
            RequestAdded: self._on_added,
            RequestScheduled: self._on_scheduled,
            PrefixLoaded: self._on_loaded,
            RequestRejected: self._on_rejected,
            RequestFinished: self._on_finished,
            StepDone: self._on_step,
        }
        events.subscribe(self._hear)

    def counts(self) -> TelemetryCounts:
        """Return everything counted so far. O(its size), some tens of microseconds."""
        seen = self._events.counts
        counters = {
            "preemptions": seen[RequestPreempted],
            "expired": seen[RequestExpired],
            "steps": seen[StepDone],
            "failed_steps": seen[StepFailed],
            "stored_blocks": seen[BlockStored],
            "evicted_blocks": seen[BlockEvicted],
            "dropped_events": self._events.num_dropped,
        }
        for name in (
            "prefix_queries",
            "prefix_hits",
            "prompt_computed",
            "prompt_cached",
            "recomputed",
            "generated",
            "cached_host",
            "cached_disk",
            "cached_remote",
        ):
            counters[name] = self._counters[name]
        return TelemetryCounts(
            counters,
            dict(self._finished),
            dict(self._rejected),
            {name: histogram.counts() for name, histogram in self._histograms.items()},
        )

    # ------------------------------------------------------------------ hearing

    def _hear(self, event: Event) -> None:
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    def _on_added(self, event: Event) -> None:
        assert isinstance(event, RequestAdded)
        arrived_s = self._clock() if event.arrived_s is None else event.arrived_s
        self._lives[event.request_id] = _Life(arrived_s)

    def _on_rejected(self, event: Event) -> None:
        assert isinstance(event, RequestRejected)
        self._rejected[event.reason] += 1

    def _on_scheduled(self, event: Event) -> None:
        assert isinstance(event, RequestScheduled)
        self._counters["prompt_cached"] += event.num_reused_tokens
        if event.resumed:
            return
        self._counters["prefix_queries"] += event.num_queried_tokens
        self._counters["prefix_hits"] += event.num_cached_tokens
        life = self._lives[event.request_id]
        life.scheduled_s = self._clock()
        self._observe("request_queue_time_seconds", life.scheduled_s - life.arrived_s)

    def _on_loaded(self, event: Event) -> None:
        assert isinstance(event, PrefixLoaded)
        self._counters["prompt_cached"] += event.num_reused_tokens
        # What was had before, and given up, is no reuse: it stands at the front.
        skip = event.num_tokens - event.num_reused_tokens
        for medium, tokens in event.sources:
            self._counters[f"cached_{medium}"] += max(0, tokens - skip)
            skip = max(0, skip - tokens)
        if not event.resumed:
            self._counters["prefix_hits"] += event.num_tokens

    def _on_finished(self, event: Event) -> None:
        assert isinstance(event, RequestFinished)
        self._finished[event.reason] += 1
        life = self._lives.pop(event.request_id)
        if event.reason in ("stop", "length"):
            self._ended.append((life, event))

    def _on_step(self, event: Event) -> None:
        assert isinstance(event, StepDone)
        now = self._clock()
        sampled = frozenset(event.sampled)
        counters = self._counters
        counters["prompt_computed"] += event.num_prompt_tokens
        counters["recomputed"] += event.num_recomputed_tokens
        counters["generated"] += len(event.sampled)
        self._observe("iteration_tokens_total", event.num_tokens)
        ended = {finished.request_id: life for life, finished in self._ended}
        again = sampled & self._sampled
        if again:
            self._histograms["inter_token_latency_seconds"].observe(now - self._step_s, len(again))
        for request_id in sampled - again:
            life = self._lives.get(request_id) or ended.get(request_id)
            if life is not None:
                self._note_token(life, now)
        for request_id in self._sampled - again:
            rested = self._lives.get(request_id)
            if rested is not None:
                rested.last_s = self._step_s
        self._sampled, self._step_s = sampled, now
        for life, finished in self._ended:
            self._note_end(life, finished, now)
        self._ended.clear()

    def _note_token(self, life: _Life, now: float) -> None:
        if life.first_s is not None:
            self._observe("inter_token_latency_seconds", now - life.last_s)
            return
        life.first_s = now
        self._observe("time_to_first_token_seconds", now - life.arrived_s)
        if life.scheduled_s is not None:
            self._observe("request_prefill_time_seconds", now - life.scheduled_s)

    def _note_end(self, life: _Life, event: RequestFinished, now: float) -> None:
        self._observe("e2e_request_latency_seconds", now - life.arrived_s)
        self._observe("request_prompt_tokens", event.num_prompt_tokens)
        self._observe("request_generation_tokens", event.num_output_tokens)
        if life.scheduled_s is not None:
            self._observe("request_inference_time_seconds", now - life.scheduled_s)
        if life.first_s is not None:
            decode_s = now - life.first_s
            self._observe("request_decode_time_seconds", decode_s)
            if event.num_output_tokens > 1:
                each_s = decode_s / (event.num_output_tokens - 1)
                self._observe("request_time_per_output_token_seconds", each_s)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)


def _one_two_five(most: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50 … up to `most`."""
    bounds: list[float] = []
    unit = 1
    while unit <= most:
        bounds += [float(unit * n) for n in (1, 2, 5) if unit * n <= most]
        unit *= 10
    return tuple(bounds)
