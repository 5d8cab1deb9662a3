"""Overload: who is turned away because too many wait already, and who has no time left.

Owns the bounds of the queue, what is said to those beyond them, and the deadlines. Looks at the
scheduler and changes nothing there. No torch. Threads: step thread only.

A queue that takes everyone serves nobody in time: once it is longer than the deadlines allow, every
request that comes out of it has waited most of its time away and is cut off while it runs. And
where many run side by side, each is slow, so that without any queue all may be late. So a request
that by the recent pace would not be done in time, or would make one late that is running, is turned
away at once; and one that has become hopeless in the queue ends there, before it costs anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvist.engine.deadlines import Deadlines
from kvist.engine.forecast import Forecast
from kvist.engine.scheduler import Scheduler
from kvist.engine.sequence import EngineRequest
from kvist.engine.throughput import Throughput
from kvist.events import EventLog

_RETRY_UNKNOWN_S = 5
_RETRY_MOST_S = 120


@dataclass(frozen=True, slots=True)
class Overload:
    """Why a request is not taken now.

    Attributes
    ----------
    reason : {"queued_reqs", "queued_tokens", "deadline"}
        For metrics.
    message : str
        For people.
    retry_after_s : int
        When it may look better, by the recent pace.
    """

    reason: str
    message: str
    retry_after_s: int


class Margin:
    """How many times what a request is expected to need must be left for it to be taken.

    Half need more than is expected; how much more depends on the load and on the machine. So it is
    learned: each that was begun and cut off raises the margin, each that ended in time lowers it a
    little, and it rests where `_LATE_SHARE` are cut off. Starts, and stays at least, at `LEAST`.
    """

    LEAST = 1.1
    MOST = 1.6
    _UP = 0.02
    _LATE_SHARE = 0.02

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = self.LEAST

    def cut_off(self) -> None:
        """One that had begun had no time left."""
        self.value = min(self.MOST, self.value + self._UP)

    def in_time(self) -> None:
        """One with a deadline ended before it."""
        share = self._LATE_SHARE
        self.value = max(self.LEAST, self.value - self._UP * share / (1 - share))


class OverloadGuard:
    """Says whom the queue has no place for, and whose time is over.

    Parameters
    ----------
    scheduler : Scheduler
        Looked at, never changed.
    events : EventLog
    clock : callable
        Seconds; monotonic.
    request_timeout_s : float or None
        That requests get at most; one may ask for less.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        events: EventLog,
        clock: Callable[[], float],
        request_timeout_s: float | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._most_s = request_timeout_s
        self._throughput = Throughput(clock)
        events.subscribe(self._throughput)
        self._forecast = Forecast(scheduler, self._throughput)
        self._deadlines = Deadlines()
        self._margin = Margin()
        self._requests: dict[str, EngineRequest] = {}

    # ------------------------------------------------------------------ coming

    def stamp(self, request: EngineRequest) -> EngineRequest:
        """Return a request with its arrival, and with a timeout if the engine has one."""
        now = self._clock()
        arrived_s = now if request.arrived_s is None else min(now, request.arrived_s)
        asked = (request.timeout_s, self._most_s)
        timeout_s = min((t for t in asked if t is not None), default=None)
        return replace(request, arrived_s=arrived_s, timeout_s=timeout_s)

    def overload(self, request: EngineRequest, num_elsewhere: int = 0) -> Overload | None:
        """Say why a stamped request is not taken now, or ``None``: it is.

        An idle engine takes anything, and an empty queue as many tokens as come: there the bounds
        would refuse what can be served.

        Parameters
        ----------
        num_elsewhere : int
            Requests that wait and that the scheduler does not know yet.
        """
        num_waiting = self._scheduler.num_waiting + num_elsewhere
        config = self._scheduler.config
        most = config.max_num_queued_reqs
        if most is not None and num_waiting >= most:
            return Overload(
                "queued_reqs",
                f"{num_waiting} requests wait, and --max-num-queued-reqs={most}",
                self._until_half(num_waiting),
            )
        most = config.max_num_queued_tokens
        if most is not None and num_waiting:
            held, length = self._scheduler.num_queued_tokens, len(request.prompt_token_ids)
            if held + length > most:
                return Overload(
                    "queued_tokens",
                    f"requests with {held} tokens wait, this one has {length}, and"
                    f" --max-num-queued-tokens={most}",
                    self._until_half(num_waiting),
                )
        return self._too_late(request)

    def _too_late(self, request: EngineRequest) -> Overload | None:
        if request.timeout_s is None:
            return None
        ahead, running = self._scheduler.num_ahead(request.priority), self._scheduler.num_running
        needed_s = self._forecast.done_s(request)
        # Idle, it may be quicker than it was: only what runs shows that.
        if needed_s is None or not ahead + running:
            return None
        now = self._clock()
        assert request.arrived_s is not None
        left_s = request.arrived_s + request.timeout_s - now
        crowd = f"{running} requests run and {ahead} wait before it"
        if needed_s * self._margin.value > left_s:
            return Overload(
                "deadline",
                f"{crowd}; at the recent pace it would be done in {needed_s:.1f} s, and"
                f" {max(0.0, left_s):.1f} s of its {request.timeout_s:g} s are left",
                _clamp(needed_s * self._margin.value - left_s),
            )
        promised = ((when_s - now, name) for when_s, name in self._deadlines.until(math.inf))
        if self._forecast.makes_late(request, promised):
            return Overload(
                "deadline",
                f"{crowd}; beside it one of those that run would not be done by its deadline",
                _clamp(needed_s / running if running else needed_s),
            )
        return None

    def _until_half(self, num_waiting: int) -> int:
        """When half of those that wait now will have begun."""
        rate = self._throughput.leave_rate
        return _RETRY_UNKNOWN_S if rate is None else _clamp(num_waiting / 2 / rate)

    # ------------------------------------------------------------------ time

    def watch(self, request: EngineRequest) -> None:
        """Note the deadline of a stamped request that was taken, if it has one."""
        if request.timeout_s is not None:
            assert request.arrived_s is not None
            self._deadlines.add(request.request_id, request.arrived_s + request.timeout_s)
            self._requests[request.request_id] = request

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._deadlines.forget(request_id)
        assert request.arrived_s is not None
        assert request.timeout_s is not None
        if self._clock() < request.arrived_s + request.timeout_s:
            self._margin.in_time()

    def over(self) -> list[tuple[str, str]]:
        """Return (request id, why) of those that are to end now: too late, or hopeless.

        Hopeless is who has not begun and has less time left than it would run, beside those that
        do; where nobody runs, all may begin.
        """
        if not self._requests:
            return []
        now = self._clock()
        longest_s = self._forecast.longest_run_s() if self._scheduler.num_running else None
        over: list[tuple[str, str]] = []
        for when_s, request_id in self._deadlines.until(now + (longest_s or 0.0)):
            request = self._requests[request_id]
            if when_s <= now:
                if self._scheduler.has_begun(request_id):
                    self._margin.cut_off()
                over.append((request_id, f"deadline: {request.timeout_s:g} s are over"))
            elif self._is_hopeless(request, when_s - now):
                why = f"deadline: {when_s - now:.1f} s of {request.timeout_s:g} s are left, too few"
                over.append((request_id, f"{why} at the recent pace; it was not begun"))
        return over

    def _is_hopeless(self, request: EngineRequest, left_s: float) -> bool:
        if self._scheduler.has_begun(request.request_id):
            return False
        run_s = self._forecast.run_s(request)
        return run_s is not None and left_s < run_s


def _clamp(seconds: float) -> int:
    return max(1, min(_RETRY_MOST_S, math.ceil(seconds)))
