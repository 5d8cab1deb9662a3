"""A recording of a run (``--record``), as the doctor sees it.

Owns what a recording tells of the server that wrote it. It holds neither texts nor hits: equal
blocks are known by their keys, and what was found, preempted and computed comes of running the
scheduler and the cache again. Knows no time; `kvist simulate` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvist.lab.doctor.finding import SYMPTOMS, Finding
from kvist.lab.doctor.reading import Reading
from kvist.lab.doctor.requests import ServerFacts, examine_reuse
from kvist.lab.doctor.reuse import Reuse, measure_reuse
from kvist.lab.doctor.server import examine_server
from kvist.lab.doctor.thresholds import DEFAULT_THRESHOLDS, Thresholds
from kvist.lab.simulate.books import Machine
from kvist.lab.simulate.locked import replay_locked
from kvist.lab.simulate.recording import Recording, read_recording


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """What a recording says.

    Attributes
    ----------
    num_requests : int
    reading : Reading
        Without hits where the run had tiers: when a load was done nobody knows.
    reuse : Reuse
    """

    num_requests: int
    reading: Reading
    reuse: Reuse


def read_run(path: Path) -> RecordedRun:
    """Read a recording and run it again. Some 20 µs a sequence and step.

    Raises
    ------
    ConfigError
        If it is damaged.
    """
    recording = read_recording(path)
    machine = Machine.from_header(recording.header)
    adds = [recording.given[op.request_id] for op in recording.operations if op.kind == "add"]
    reuse = measure_reuse((given.blocks for given in adds), machine.block_size)
    found = replay_locked(recording)
    reading = Reading(
        engine="kvist",
        preemptions=found.num_preemptions,
        finished=len(found.hit_tokens),
        is_caching=machine.cache.enable_prefix_caching,
        attainable_rate=reuse.attainable,
        max_model_len=machine.scheduler.max_model_len,
        block_size=machine.block_size,
        pool_tokens=machine.cache.num_blocks * machine.block_size,
        tiers=bool(machine.tiers),
    )
    if not machine.tiers:
        reading.queried_tokens = found.num_prompt_tokens
        reading.hit_tokens = found.num_hit_tokens
    lengths = sorted(_lengths(recording))
    if lengths:
        reading.need_tokens = lengths[int(0.99 * (len(lengths) - 1))]
        reading.num_sized = len(lengths)
    return RecordedRun(len(adds), reading, reuse)


def examine_run(run: RecordedRun, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> list[Finding]:
    """Return what is wrong with a recorded run."""
    found = examine_server(run.reading, thresholds)
    if run.reading.is_caching:
        found += _sharing(run, thresholds)
    return found


def _sharing(run: RecordedRun, thresholds: Thresholds) -> list[Finding]:
    reuse, reading = run.reuse, run.reading
    enough = reading.num_sized >= thresholds.min_requests and reuse.num_blocks
    if enough and reuse.attainable < thresholds.min_shared:
        return [
            Finding(
                SYMPTOMS["prompts-share-nothing"],
                f"{reuse.attainable:.1%} of the {reuse.num_blocks:,} blocks of {run.num_requests:,}"
                " prompts came before",
                "each prompt is new from its first block on, or differs early; a recording has no"
                " texts to tell which",
                "give the doctor a request log (JSONL): it finds where prompts differ",
            )
        ]
    # What was found is left out: a key is a block's name, so that names cannot differ here.
    return examine_reuse(
        reuse, ServerFacts(block_size=reading.block_size or 16, pool_tokens=reading.pool_tokens)
    )


def _lengths(recording: Recording) -> list[int]:
    """Prompt and answer of every sequence that ended."""
    return [
        recording.given[name.rpartition("#")[0] or name].num_prompt + end.num_output
        for name, end in recording.ends.items()
        if name in recording.given or name.rpartition("#")[0] in recording.given
    ]
