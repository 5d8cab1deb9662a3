"""`kvist doctor`: targets in, a diagnosis out.

Owns which reader a target gets, and that several targets are looked at together: metrics say what a
server found, a request log beside them says what there was to find. Prints nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvist.errors import ConfigError
from kvist.lab.doctor.events import read_events
from kvist.lab.doctor.exposition import read_exposition
from kvist.lab.doctor.finding import SCHEMA, SYMPTOMS, Finding, by_gain
from kvist.lab.doctor.kpis import Kpi, key_figures
from kvist.lab.doctor.logs import read_log
from kvist.lab.doctor.prompts import Sharing, compare_prompts
from kvist.lab.doctor.reading import Reading, read_metrics
from kvist.lab.doctor.recordings import examine_run, read_run
from kvist.lab.doctor.records import Record, read_records
from kvist.lab.doctor.requests import (
    TOKENS_A_WORD,
    ServerFacts,
    chains_of,
    examine_requests,
    examine_reuse,
    measured_hit_rate,
)
from kvist.lab.doctor.reuse import Reuse, measure_reuse
from kvist.lab.doctor.server import examine_server
from kvist.lab.doctor.target import Target, TargetKind, read_target
from kvist.lab.doctor.thresholds import DEFAULT_THRESHOLDS, Thresholds
from kvist.lab.traces import MOONCAKE_BLOCK_TOKENS, read_mooncake


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked, beside the targets.

    Attributes
    ----------
    thresholds : Thresholds
    block_size, pool_tokens, max_model_len : int or None
        Of the server, where metrics do not tell.
    interval_s : float
        Above 0, a server is read twice, so far apart.
    ignored : tuple of str
        Symptoms that are left out.
    """

    thresholds: Thresholds = DEFAULT_THRESHOLDS
    block_size: int | None = None
    pool_tokens: int | None = None
    max_model_len: int | None = None
    interval_s: float = 0.0
    ignored: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.ignored:
            if name not in SYMPTOMS:
                raise ConfigError(f"--ignore {name}: no such symptom; see kvist doctor --list")
        if self.interval_s < 0:
            raise ConfigError(f"--interval {self.interval_s:g} must be 0 or more seconds")


@dataclass(slots=True)
class Diagnosis:
    """The answer.

    Attributes
    ----------
    kinds : list of str
        Of the targets.
    facts : list of str
        What was looked at, and numbers that are no symptom.
    figures : list of Kpi
        Empty where no server was looked at.
    findings : list of Finding
        By expected gain.
    prefix_lengths : list of (int, int)
        Upper bound in tokens, and how many prompts share less than that (and at least the bound
        before it) with any other.
    """

    kinds: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    figures: list[Kpi] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    prefix_lengths: list[tuple[int, int]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return it for programs: schema `kvist.doctor.v1`."""
        return {
            "schema": SCHEMA,
            "targets": self.kinds,
            "facts": self.facts,
            "key_figures": [figure.to_dict() for figure in self.figures],
            "shared_prefix_tokens": [
                {"below": below, "prompts": count} for below, count in self.prefix_lengths
            ],
            "findings": [finding.to_dict() for finding in self.findings],
        }


DEFAULT_QUESTION = Question()


def diagnose(names: Sequence[str], question: Question = DEFAULT_QUESTION) -> Diagnosis:
    """Read targets and say what is wrong.

    Raises
    ------
    ConfigError
        If one cannot be read, or holds nothing that is known here.
    """
    targets = [(name, read_target(name, question.interval_s)) for name in names]
    # What a server says is needed to judge its requests.
    targets.sort(key=lambda pair: pair[1].kind in (TargetKind.REQUESTS, TargetKind.TRACE))
    case = _Case(question)
    for name, target in targets:
        case.add(name, target)
    return case.close()


class _Case:
    """What is known so far."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._answer = Diagnosis()
        self._found: list[Finding] = []
        self._reading: Reading | None = None
        self._examined = False

    def add(self, name: str, target: Target) -> None:
        self._answer.kinds.append(target.kind.value)
        readers = {
            TargetKind.METRICS: self._metrics,
            TargetKind.LOG: self._log,
            TargetKind.EVENTS: self._events,
            TargetKind.REQUESTS: self._requests,
            TargetKind.TRACE: self._trace,
            TargetKind.RECORDING: self._recording,
        }
        readers[target.kind](name, target)

    def close(self) -> Diagnosis:
        answer, t = self._answer, self._question.thresholds
        reading = self._reading
        if reading is not None:
            if not self._examined:
                self._found += examine_server(reading, t)
            figures = key_figures(reading, t)
            answer.figures = figures if any(f.value is not None for f in figures) else []
        ignored = self._question.ignored
        answer.findings = by_gain(f for f in self._found if f.symptom.name not in ignored)
        return answer

    def _metrics(self, name: str, target: Target) -> None:
        metrics = read_exposition(target.text)
        if not metrics.engine:
            raise ConfigError(f"{name} has metrics, but none of kvist, vLLM, llama.cpp or SGLang")
        over = "since its start"
        if target.earlier:
            metrics = metrics.since(read_exposition(target.earlier))
            over = f"of {target.elapsed_s:.0f} s"
        self._answer.facts.append(f"metrics of {metrics.engine}, {over}")
        reading = read_metrics(metrics, target.elapsed_s)
        # vLLM, for one, does not export its context length.
        reading.max_model_len = reading.max_model_len or self._question.max_model_len
        reading.pool_tokens = reading.pool_tokens or self._question.pool_tokens
        self._reading = reading

    def _log(self, name: str, target: Target) -> None:
        found, reading, engine = read_log(target.text.splitlines(), self._question.thresholds)
        if not engine and not found:
            raise ConfigError(
                f"{name} is neither metrics, requests nor a log of kvist, vLLM, SGLang, llama.cpp"
                " or Ollama"
            )
        self._answer.facts.append(f"a log of {engine or 'a server'}")
        self._found += found
        if self._reading is None and reading is not None:
            self._reading, self._examined = reading, True

    def _events(self, name: str, target: Target) -> None:
        found, reading, bad = read_events(target.text.splitlines(), self._question.thresholds)
        self._answer.facts.append(
            f"events of kvist: {reading.finished:,.0f} requests finished,"
            f" {reading.stored_blocks:,.0f} blocks stored, {reading.evicted_blocks:,.0f} evicted"
        )
        self._pass_over(bad, "no event")
        self._found += found
        if self._reading is None:
            self._reading, self._examined = reading, True

    def _requests(self, name: str, target: Target) -> None:
        records, bad = read_records(target.text.splitlines())
        if not records:
            raise ConfigError(f"{name}: {bad} lines, none with messages or a prompt")
        sharing = compare_prompts([record.prompt for record in records])
        server = self._server(measured_hit_rate(records))
        reuse = measure_reuse(chains_of(records, server.block_size), server.block_size)
        self._describe(sharing, reuse)
        self._pass_over(bad, "no prompt")
        self._complete(records, reuse, sharing)
        thresholds = self._question.thresholds
        self._found += examine_requests(records, sharing, reuse, server, thresholds)

    def _trace(self, name: str, target: Target) -> None:
        requests = read_mooncake(Path(name))
        reuse = measure_reuse((r.blocks for r in requests), MOONCAKE_BLOCK_TOKENS)
        self._answer.facts.append(
            f"a trace of {len(requests):,} requests; {reuse.attainable:.0%} of their blocks came"
            f" before, and a cache of {reuse.enough_tokens():,} tokens finds 90 % of those"
        )
        self._found += examine_reuse(reuse, self._server(None))

    def _recording(self, name: str, target: Target) -> None:
        run = read_run(Path(name).expanduser())
        reading = run.reading
        hits = "" if reading.hit_rate is None else f"; {reading.hit_rate:.0%} of tokens were hits"
        self._answer.facts.append(
            f"a recording of {run.num_requests:,} requests{hits}; {run.reuse.attainable:.0%} of"
            " their full blocks stood in prompts before; kvist simulate runs it on other machines"
        )
        self._found += examine_run(run, self._question.thresholds)
        if self._reading is None:
            self._reading, self._examined = reading, True

    def _server(self, measured: tuple[float, int] | None) -> ServerFacts:
        q, r = self._question, self._reading
        hit_rate = measured[0] if measured else None
        enough = q.thresholds.min_queried_tokens
        if r is not None and r.hit_rate is not None and r.queried_tokens >= enough:
            hit_rate = r.hit_rate
        # Words are a guess; where the server has counted tokens, its own rule has looked already.
        length = r.max_model_len if r is not None and r.need_tokens is None else None
        return ServerFacts(
            block_size=q.block_size or (r.block_size if r is not None else None) or 16,
            pool_tokens=q.pool_tokens or (r.pool_tokens if r is not None else None),
            max_model_len=q.max_model_len or (int(length) if length else None),
            hit_rate=hit_rate,
        )

    def _describe(self, sharing: Sharing, reuse: Reuse) -> None:
        low, half, high = (round(words * TOKENS_A_WORD) for words in sharing.quartiles)
        self._answer.facts.append(
            f"{sharing.num_prompts} prompts, {sharing.rate:.0%} of their words shared; longest"
            f" prefix shared with another: about {low} / {half} / {high} tokens (quartiles)"
        )
        if reuse.distances:
            self._answer.facts.append(
                f"an endless cache finds {reuse.attainable:.0%} of all blocks; one of about"
                f" {reuse.enough_tokens():,} tokens finds 90 % of that"
            )
        self._answer.prefix_lengths = [
            (round(below * TOKENS_A_WORD), count) for below, count in sharing.distribution()
        ]

    def _pass_over(self, bad: int, what: str) -> None:
        if bad:
            self._answer.facts.append(f"{bad} lines held {what} and were passed over")

    def _complete(self, records: Sequence[Record], reuse: Reuse, sharing: Sharing) -> None:
        """Fill in what only requests tell."""
        if self._reading is None:
            self._reading = _reading_of(records)
            self._examined = self._reading is None
        if self._reading is not None:
            self._reading.attainable_rate = max(reuse.attainable, 0.0)


def _reading_of(records: Sequence[Record]) -> Reading | None:
    """What a request log says of the server that answered it, if it says anything."""
    durations = [r.duration_s for r in records if r.duration_s is not None]
    measured = measured_hit_rate(records)
    span = _span([r.time_s for r in records if r.time_s is not None])
    if not durations and measured is None and span is None:
        return None
    rate, tokens = measured or (0.0, 0)
    return Reading(
        finished=len(records),
        latency_s=sum(durations) / len(durations) if durations else None,
        num_latencies=len(durations),
        requests_per_s=len(records) / span if span else None,
        queried_tokens=tokens,
        hit_tokens=rate * tokens,
    )


def _span(times: Iterable[float]) -> float | None:
    ordered = sorted(times)
    return ordered[-1] - ordered[0] or None if ordered else None
