"""When a request would be done, if it were taken now, and whom it would make late.

Owns the way from the pace of late (`engine.throughput`) and the work at hand (the scheduler) to
seconds. Decides nothing. No torch. Threads: step thread only.

::

    arrives          begins                 first token                  last token
       | wait          | reads its prompt     | decodes beside the others    |
       | ahead / rate  | tokens × their cost  | answer × length of a step    |
"""

from __future__ import annotations

from collections.abc import Iterable

from kvist.engine.scheduler import Scheduler
from kvist.engine.sequence import EngineRequest
from kvist.engine.throughput import Throughput


class Forecast:
    """Seconds that requests will need.

    Parameters
    ----------
    scheduler : Scheduler
        Looked at, never changed.
    throughput : Throughput

    Notes
    -----
    What is said is what is expected; half of the requests take longer. ``None``: nothing is known,
    since too little has run.
    """

    def __init__(self, scheduler: Scheduler, throughput: Throughput) -> None:
        self._scheduler = scheduler
        self._throughput = throughput

    def done_s(self, request: EngineRequest) -> float | None:
        """Return seconds until a request would be done that is put in the queue now.

        O(sequences) while nobody knows how the queue moves.
        """
        scheduler = self._scheduler
        ahead, running = scheduler.num_ahead(request.priority), scheduler.num_running
        rate = self._throughput.leave_rate
        if rate is not None:
            run_s = self.run_s(request)
            return None if run_s is None else ahead / rate + run_s
        # There was no queue: all that come in will run beside this one and be read before it, and
        # those beyond the places follow when others end.
        places = scheduler.config.max_num_seqs
        beside = running + ahead + request.params.num_samples
        unread = len(request.prompt_token_ids) + scheduler.num_unread_tokens
        run_s = self._throughput.run_s(unread, self._most(request), min(places, beside))
        return None if run_s is None else run_s * (1 + max(0, beside - places) / places)

    def run_s(self, request: EngineRequest) -> float | None:
        """Return seconds that a request takes from its first step, beside those that run now."""
        beside = max(self._scheduler.num_running, request.params.num_samples)
        length = len(request.prompt_token_ids)
        return self._throughput.run_s(length, self._most(request), beside)

    def longest_run_s(self) -> float | None:
        """Return seconds that no request takes longer than, by the same reckoning."""
        most = self._scheduler.config.max_model_len
        return self._throughput.run_s(most, most, max(1, self._scheduler.num_running))

    def makes_late(self, request: EngineRequest, promised: Iterable[tuple[float, str]]) -> bool:
        """Whether a sequence that runs now would be late because of a request, and only so.

        Parameters
        ----------
        promised : iterable of (seconds left, request id)
            Who has a deadline. Those that wait are not looked at: they stand in `done_s`.

        Notes
        -----
        O(promised). Where all places are taken, a request runs in place of one that ended.
        """
        scheduler, throughput = self._scheduler, self._throughput
        running = scheduler.num_running
        more = min(request.params.num_samples, scheduler.config.max_num_seqs - running)
        if more <= 0:
            return False
        length = len(request.prompt_token_ids)
        for left_s, request_id in promised:
            work = scheduler.work_left(request_id)
            if work is None:
                continue
            unread, most = work
            alone_s = throughput.run_s(unread, most, running)
            beside_s = throughput.run_s(unread + length, most, running + more)
            if alone_s is not None and beside_s is not None and alone_s <= left_s < beside_s:
                return True
        return False

    def _most(self, request: EngineRequest) -> int:
        """Tokens that an answer may have."""
        room = self._scheduler.config.max_model_len - len(request.prompt_token_ids)
        asked = request.params.max_tokens
        return room if asked is None else min(asked, room)
