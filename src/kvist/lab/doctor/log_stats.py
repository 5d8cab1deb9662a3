"""The numbers that engines write into their logs, line by line.

Owns the form of those lines: vLLM's and SGLang's of the last seconds, llama.cpp's of a request.
Knows no symptoms: what it gathers is a `Reading` and points of decoding speed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from statistics import median

from kvist.lab.doctor.reading import Reading

_VLLM_LINE_S = 10.0
"""How often vLLM writes a line of statistics."""

_MIN_CROWDED = 3
"""Lines that tell of waiting requests before it is more than a moment."""

_VLLM = re.compile(r"Running: (?P<running>\d+) reqs?.*KV cache usage: (?P<use>[\d.]+) ?%")
_VLLM_WAITING = re.compile(r"(?:Waiting|Pending): (\d+) reqs?")
_VLLM_PROMPT = re.compile(r"prompt throughput: ([\d.]+)")
_VLLM_HITS = re.compile(r"(?<!External )[Pp]refix cache hit rate: (?:GPU: )?([\d.]+)%")
_VLLM_PREEMPTIONS = re.compile(r"Preemptions: (\d+)")
_SGLANG_DECODE = re.compile(
    r"Decode batch.*#running-req: (?P<running>\d+).*#(?:full )?token: (?P<tokens>\d+).*"
    r"token usage: (?P<use>[\d.]+).*gen throughput \(token/s\): (?P<speed>[\d.]+)"
)
_SGLANG_PREFILL = re.compile(
    r"Prefill batch.*#new-token: (?P<new>\d+).*#cached-token: (?P<cached>\d+)"
)
_SGLANG_QUEUE = re.compile(r"#queue-req: (\d+)")
_LLAMA_EVAL = re.compile(
    r"(?<!prompt )\beval time = *[\d.]+ ms / *(?P<count>\d+) (?:tokens|runs) *\( *(?P<ms>[\d.]+) ms"
)
_LLAMA_END = re.compile(r"stop processing: n_(?:tokens|past) = (?P<tokens>\d+)")
_POST = re.compile(r'"POST [^"]*" 200|POST \S+ .*\b200\b')
_ENGINES = (
    ("ollama", re.compile(r"OLLAMA_|source=[\w./]+\.go")),
    ("sglang", re.compile(r"sglang|#running-req|#new-token|Fired up and ready", re.IGNORECASE)),
    (
        "vllm",
        re.compile(
            r"vllm|EngineCore|V1 LLM engine|KV cache size: [\d,]+ tokens|Engine \d{3}:",
            re.IGNORECASE,
        ),
    ),
    ("llama.cpp", re.compile(r"llama_|ggml_|\b(?:srv|slot) +[\w()]+:")),
    ("kvist", re.compile(r"kvist")),
)


@dataclass(slots=True)
class LogStats:
    """What has been gathered so far.

    Attributes
    ----------
    engine : str
        ``""`` until a line tells.
    points : list of (float, float)
        Tokens of context, milliseconds a token.
    """

    engine: str = ""
    points: list[tuple[float, float]] = field(default_factory=list)
    _lines: list[tuple[float, float, float]] = field(default_factory=list)
    _prompt_tokens: float = 0.0
    _cached_tokens: float = 0.0
    _hit_rate: float | None = None
    _preemptions: float = 0.0
    _posts: int = 0
    _eval: tuple[int, float] | None = None

    def read(self, line: str) -> None:
        """Take what a line tells."""
        if not self.engine:
            self.engine = next((name for name, p in _ENGINES if p.search(line)), "")
        if _POST.search(line):
            self._posts += 1
        elif "KV cache usage" in line:
            self._read_vllm(line)
        elif " batch" in line and "#" in line:
            self._read_sglang(line)
        elif "eval time" in line or "stop processing" in line:
            self._read_llama(line)

    def reading(self) -> Reading | None:
        """Return what the lines tell together; ``None`` if none told anything."""
        if not self._lines:
            return None
        crowded = [line for line in self._lines if line[1] >= 1]
        if len(crowded) >= max(_MIN_CROWDED, len(self._lines) // 4):
            running, waiting, use = (median(values) for values in zip(*crowded, strict=True))
        else:
            running, _, use = self._lines[-1]
            waiting = 0.0
        hits = self._cached_tokens
        if self._hit_rate is not None:
            hits = self._hit_rate * self._prompt_tokens
        return Reading(
            engine=self.engine,
            running=running,
            waiting=waiting,
            pool_use=use,
            preemptions=self._preemptions,
            finished=self._posts,
            queried_tokens=self._prompt_tokens,
            hit_tokens=hits,
        )

    def _read_vllm(self, line: str) -> None:
        match = _VLLM.search(line)
        if match is None:
            return
        waiting = sum(map(float, _VLLM_WAITING.findall(line)))
        self._lines.append((float(match["running"]), waiting, float(match["use"]) / 100))
        if prompt := _VLLM_PROMPT.search(line):
            self._prompt_tokens += _VLLM_LINE_S * float(prompt[1])
        if hits := _VLLM_HITS.search(line):
            self._hit_rate = float(hits[1]) / 100
        if preemptions := _VLLM_PREEMPTIONS.search(line):
            self._preemptions = max(self._preemptions, float(preemptions[1]))

    def _read_sglang(self, line: str) -> None:
        queue = _SGLANG_QUEUE.search(line)
        if decode := _SGLANG_DECODE.search(line):
            running, speed = float(decode["running"]), float(decode["speed"])
            waiting = float(queue[1]) if queue else 0.0
            self._lines.append((running, waiting, float(decode["use"])))
            if running and speed:
                self.points.append((float(decode["tokens"]) / running, 1e3 * running / speed))
        elif prefill := _SGLANG_PREFILL.search(line):
            self._prompt_tokens += float(prefill["new"]) + float(prefill["cached"])
            self._cached_tokens += float(prefill["cached"])

    def _read_llama(self, line: str) -> None:
        if found := _LLAMA_EVAL.search(line):
            self._eval = int(found["count"]), float(found["ms"])
        elif (end := _LLAMA_END.search(line)) and self._eval is not None:
            count, ms = self._eval
            if count >= 8:
                self.points.append((float(end["tokens"]) - count / 2, ms))
            self._eval = None
