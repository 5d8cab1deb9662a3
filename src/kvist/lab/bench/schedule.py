"""`kvist bench schedule`: what those who are being answered notice of a long prompt.

Streams decode; a long prompt arrives. Five ways to go on, which differ in when a request is handed
in and in how many tokens a step may have, and in nothing else:

- ``static``: a batch runs to its end before the next request is looked at (from outside: the
  prompt is handed in when the streams are done);
- ``continuous``: it comes in at once, and is read in one step;
- ``chunked``: it comes in at once, in pieces beside the tokens of the others;
- the presets ``latency`` and ``throughput``.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from kvist.config import PRESETS
from kvist.lab.bench.host import Timeline
from kvist.lab.bench.hosted import HostedBench
from kvist.lab.bench.result import Chart, Column, Table, Tell

_COLUMNS = (
    Column("mode", "mode"),
    Column("gap_median_s", "gap between tokens, median, ms", 1, 1e3),
    Column("gap_longest_s", "longest gap, ms", 0, 1e3),
    Column("long_ttft_s", "long prompt, first token, s", 2),
    Column("wall_s", "all done, s", 2),
    Column("tokens_per_s", "tokens/s, long prompt's too", 0),
    Column("step_tokens", "tokens a step at most", 0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleWorkload:
    """What is measured.

    Attributes
    ----------
    streams, stream_prompt, stream_output : int
        Those who are being answered.
    long_prompt, long_output : int
        What comes in between, after `tokens_before` tokens of each stream.
    chunk : int
        Tokens a step of the mode ``chunked``.
    repeats : int
    """

    streams: int = 8
    stream_prompt: int = 64
    stream_output: int = 64
    long_prompt: int = 4096
    long_output: int = 8
    tokens_before: int = 16
    chunk: int = 256
    repeats: int = 3


class ScheduleBench(HostedBench[ScheduleWorkload]):
    """The same arrivals under every way to schedule them.

    Parameters
    ----------
    host : Host
    work : ScheduleWorkload
    """

    name = "schedule"
    question = "What do running streams notice when a long prompt arrives?"

    def measure(self, tell: Tell) -> None:
        """See `Bench`."""
        work = self._work
        whole = work.long_prompt + work.streams
        modes = {
            "static": {"max_num_batched_tokens": whole},
            "continuous": {"max_num_batched_tokens": whole},
            "chunked": {"max_num_batched_tokens": work.chunk},
            **{f"preset {name}": dict(options) for name, options in PRESETS.items()},
        }
        self._host.warm_up()
        total = work.repeats * len(modes)
        for repeat in range(work.repeats):
            for number, (mode, options) in enumerate(modes.items()):
                tell((repeat * len(modes) + number) / total, f"{mode}, round {repeat + 1}")
                self._one(mode, options)

    def _one(self, mode: str, options: Mapping[str, int]) -> None:
        host, work = self._host, self._work
        session = host.open(
            max_num_batched_tokens=options["max_num_batched_tokens"],
            max_num_seqs=options.get("max_num_seqs", 64),
        )
        start_s = host.clock()
        streams = [
            session.add(host.prompt(work.stream_prompt), work.stream_output)
            for _ in range(work.streams)
        ]
        text = host.prompt(work.long_prompt)
        late: Timeline | None = None
        arrived_s = 0.0
        while late is None or not late.is_finished:
            session.step()
            if not arrived_s and min(len(line.token_s) for line in streams) >= work.tokens_before:
                arrived_s = host.clock()
            is_free = mode != "static" or all(line.is_finished for line in streams)
            if late is None and arrived_s and is_free:
                late = session.add(text, work.long_output)
        session.finish()
        wall_s = host.clock() - start_s
        gaps = [gap for line in streams for gap in line.gaps_s[work.tokens_before - 1 :]]
        note = self._samples.note
        note(mode, "gap_median_s", statistics.median(gaps))
        note(mode, "gap_longest_s", max(gaps))
        note(mode, "long_ttft_s", late.token_s[0] - arrived_s)
        note(mode, "wall_s", wall_s)
        read = work.streams * work.stream_prompt + work.long_prompt
        said = work.streams * work.stream_output + work.long_output
        note(mode, "tokens_per_s", (read + said) / wall_s)
        self._samples.put(mode, "step_tokens", options["max_num_batched_tokens"])

    def tables(self) -> tuple[Table, ...]:
        """See `Bench`."""
        charts = (
            Chart("Longest gap of a running stream", "mode", ("gap_longest_s",), "ms", bars=True),
            Chart("First token of the long prompt", "mode", ("long_ttft_s",), "s", bars=True),
        )
        work = self._work
        title = f"a prompt of {work.long_prompt:,} tokens beside {work.streams} streams"
        return (Table("modes", title, _COLUMNS, self._samples.rows("mode"), charts),)

    def facts(self) -> tuple[str, ...]:
        """See `Bench`."""
        gaps = [self._samples.median(m, "gap_longest_s") for m in ("continuous", "chunked")]
        if None in gaps:
            return ()
        whole, chunked = (1e3 * gap for gap in gaps if gap is not None)
        return (
            (
                f"Chunks of {self._work.chunk} tokens cut the longest gap from {whole:.0f} to"
                f" {chunked:.0f} ms."
            ),
            (
                "Gaps are those between tokens of the streams from when the prompt arrived; in a"
                " static batch nobody comes between, and the prompt waits."
            ),
        )
