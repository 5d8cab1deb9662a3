"""What a run was given, as JSON lines: ``--record FILE``, for `kvist simulate`.

Owns the form of a recording and what is left out of it. Written so that the scheduler and the cache
can be run again without the model: everything their decisions depend on, and no decision.

::

    header   model's numbers, pool, every option of the scheduler and the cache
    add      step, arrival, lengths, priority, keys of the prompt's full blocks
    abort    step, when                  fail  step, when      fork  step, of whom
    end      step, why, generated tokens, keys of the blocks behind the prompt's
    steps    from which step on: decoded, read, context of each, pairs attended, seconds
    only     step, who alone may run: while it is searched for whom a step fails with

*step* is how many plans had been made by then. No text, no token ids, no hits. A key is a digest of
the block's name under a secret that is drawn for the recording and thrown away: two equal keys are
one block, and nobody can find out of which text, not even who guesses it.

Bounded: at `MAX_BYTES` nothing more is written, and what is there can be replayed. Costs about 2 µs
a block of a prompt and 3 µs a step, and one `write` a second. Threads: step thread only.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvist.engine.line_file import LineFile, WhenFull
from kvist.engine.sequence import Sequence as KVSequence
from kvist.engine.step import StepPlan
from kvist.keys import BlockKey

SCHEMA = "kvist.recording.v1"
MAX_BYTES = 1 << 30
FLUSH_S = 1.0
_ROWS = 64
"""Steps in a line at most."""
_NAME_BYTES = 8
"""Of a key: a million blocks meet by chance once in 40 million recordings."""


class Recorder:
    """Writes a recording while a scheduler works.

    Parameters
    ----------
    path : Path
        Written anew; made 0600.
    facts : mapping
        Of the header, `block_size` among them: see `docs/simulate.md`.
    max_bytes : int
    clock : callable
        Seconds, monotonic; the one that `EngineRequest.arrived_s` is of.

    Raises
    ------
    ConfigError
        If the file cannot be opened. What fails later ends the recording and nothing else.
    """

    def __init__(
        self,
        path: Path,
        facts: Mapping[str, Any],
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = LineFile(path, "--record", max_bytes, WhenFull.STOP, append=False)
        self._clock = clock
        self._block_size: int = facts["block_size"]
        self._secret = os.urandom(32)
        self._start_s = self._flushed_s = clock()
        self._step = 0
        self._rows: list[tuple[float, ...]] = []
        self._first_row = 0
        # When the step under way began: with its plan, or right after the one before it.
        self._began_s = self._start_s
        self._busy = False
        self._write("header", schema=SCHEMA, **facts)

    # ------------------------------------------------------------------ what is given

    def added(self, seq: KVSequence) -> None:
        """A request comes. O(blocks of its prompt)."""
        request, params = seq.request, seq.params
        arrived_s = self._clock() if request.arrived_s is None else request.arrived_s
        keys: list[str] = []
        if seq.chain is not None:
            seq.chain.extend(seq.token_ids)
            keys = self._names(seq.chain.keys)
        extra: dict[str, Any] = {}
        if params.num_samples > 1:
            extra["n"] = params.num_samples
        if seq.priority:
            extra["priority"] = seq.priority
        if params.prompt_logprobs is not None:
            extra["prompt_logprobs"] = True
        self._write(
            "add",
            step=self._step,
            id=seq.request_id,
            t=round(arrived_s - self._start_s, 6),
            prompt=seq.num_prompt_tokens,
            max_tokens=params.max_tokens,
            **extra,
            keys=keys,
        )

    def forked(self, parent: KVSequence, child: KVSequence) -> None:
        """A request is continued twice."""
        self._write("fork", step=self._step, id=child.request_id, of=parent.request_id)

    def aborted(self, request_id: str, index: int | None) -> None:
        """A request, or one of its continuations, is to end."""
        self._write("abort", step=self._step, id=request_id, t=self._now(), index=index)

    def failed(self, request_id: str) -> None:
        """A request made a step fail and ends."""
        self._write("fail", step=self._step, id=request_id, t=self._now())

    def ended(self, seq: KVSequence, reason: str) -> None:
        """A sequence is over: how long it became, and the keys behind its prompt's."""
        keys: list[str] = []
        if seq.chain is not None:
            keys = self._names(seq.chain.keys[seq.num_prompt_tokens // self._block_size :])
        self._write(
            "end",
            step=self._step,
            id=seq.request_id,
            why=reason,
            out=seq.num_output_tokens,
            keys=keys,
        )

    # ------------------------------------------------------------------ steps

    def planning(self, only: Collection[str] | None) -> None:
        """A plan is about to be made."""
        self._step += 1
        if only is not None:
            self._write("only", step=self._step, ids=sorted(only))
        if not self._busy:
            self._began_s = self._clock()

    def recorded(self, plan: StepPlan, num_unfinished: int) -> None:
        """A plan was carried out and recorded; so many sequences are unfinished now."""
        now = self._clock()
        decoded = read = context = pairs = 0
        for item in plan.scheduled:
            n = len(item.token_ids)
            if n == 1:
                decoded += 1
                context += item.position + 1
            else:
                read += n
                pairs += n * item.position + n * (n + 1) // 2
        if self._rows and self._first_row + len(self._rows) != self._step:
            self._end_rows()
        if not self._rows:
            self._first_row = self._step
        self._rows.append((decoded, read, context, pairs, round(now - self._began_s, 6)))
        self._began_s, self._busy = now, num_unfinished > 0
        if len(self._rows) >= _ROWS:
            self._end_rows()
        if not self._busy or now - self._flushed_s >= FLUSH_S:
            self.flush()

    def rolled_back(self, plan: StepPlan) -> None:
        """A plan was not carried out, though there was something in it."""
        self._busy = False
        if plan.scheduled:
            self._write("rollback", step=self._step)

    def flush(self) -> None:
        """Write what is not written yet."""
        self._end_rows()
        self._flushed_s = self._clock()
        self._file.flush()

    def close(self) -> None:
        """Write the rest and let go of the file."""
        self._end_rows()
        self._file.close()

    # ------------------------------------------------------------------ inside

    def _end_rows(self) -> None:
        if self._rows:
            rows, self._rows = self._rows, []
            self._write("steps", first=self._first_row, rows=rows)

    def _now(self) -> float:
        return round(self._clock() - self._start_s, 6)

    def _names(self, keys: Sequence[BlockKey]) -> list[str]:
        secret = self._secret
        return [blake2b(key, digest_size=_NAME_BYTES, key=secret).hexdigest() for key in keys]

    def _write(self, kind: str, **fields: Any) -> None:
        self._file.add(json.dumps({"k": kind, **fields}, separators=(",", ":")))
