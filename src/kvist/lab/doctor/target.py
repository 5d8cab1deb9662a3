"""What a person points the doctor at, and what kind of thing it is.

Owns the guess (URL, Prometheus text, request log, trace, event log, recording, server
log) and the reading.
Knows no symptoms.
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from kvist.errors import ConfigError
from kvist.lab.simulate.recording import is_recording

TIMEOUT_S = 10.0
MAX_BYTES = 512 << 20
_SAMPLE = re.compile(r"^[a-zA-Z_:][\w:]*(\{.*\})? [-+\d.eEinfNa]+( \d+)?$")
_STARTED = re.compile(r"^process_start_time_seconds(?:\{.*\})? ([\d.eE+]+)", re.MULTILINE)


class TargetKind(StrEnum):
    """What a target holds."""

    METRICS = "metrics"
    REQUESTS = "requests"
    TRACE = "trace"
    EVENTS = "events"
    RECORDING = "recording"
    LOG = "log"


@dataclass(frozen=True, slots=True)
class Target:
    """Text of a target and what it is.

    Attributes
    ----------
    kind : TargetKind
    text : str
    earlier : str
        Of metrics that were read twice: the first time, ``elapsed_s`` before.
    elapsed_s : float or None
        Over which counters counted, where it is known.
    """

    kind: TargetKind
    text: str
    earlier: str = ""
    elapsed_s: float | None = None


def read_target(name: str, interval_s: float = 0.0) -> Target:
    """Read a URL or a file.

    Parameters
    ----------
    interval_s : float
        Above 0, a URL is read twice, so far apart: what counters count is then of now.

    Raises
    ------
    ConfigError
        If it cannot be reached or read, is empty, or is no text.
    """
    if name.startswith(("http://", "https://")):
        return _watch(name, interval_s)
    path = Path(name).expanduser()
    try:
        if path.is_dir():
            raise ConfigError(f"{name} is a folder; name a file or a URL")
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{name} is larger than {MAX_BYTES >> 20} MiB; give a part of it")
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror or error}") from error
    if not text.strip():
        raise ConfigError(f"{name} is empty")
    if text.count("\0") or text.count("\ufffd") > len(text) // 20:
        raise ConfigError(f"{name} is no text")
    return Target(_guess(text), text)


def _watch(url: str, interval_s: float) -> Target:
    text = _fetch(url)
    if interval_s > 0:
        start_s = time.monotonic()
        time.sleep(interval_s)
        now = _fetch(url)
        return Target(TargetKind.METRICS, now, text, time.monotonic() - start_s)
    started = _STARTED.search(text)
    elapsed_s = time.time() - float(started[1]) if started else None
    return Target(TargetKind.METRICS, text, "", elapsed_s)


def _fetch(url: str) -> str:
    if not url.rstrip("/").endswith("/metrics"):
        url = url.rstrip("/").removesuffix("/v1") + "/metrics"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            text: str = answer.read(MAX_BYTES).decode("utf-8", errors="replace")
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(f"cannot read {url}: {reason}; is the server there?") from error
    if not any(_SAMPLE.match(line) for line in text.splitlines()):
        raise ConfigError(f"{url} answered, but with no metrics (llama.cpp needs --metrics)")
    return text


def _guess(text: str) -> TargetKind:
    if is_recording(text):
        return TargetKind.RECORDING
    lines = [line for line in text.splitlines() if line.strip()][:200]
    samples = sum(_SAMPLE.match(line) is not None or line.startswith("# ") for line in lines)
    if samples > 0.8 * len(lines):
        return TargetKind.METRICS
    objects = [fields for line in lines if (fields := _object(line)) is not None]
    if len(objects) < 0.5 * len(lines):
        return TargetKind.LOG
    if 2 * sum("hash_ids" in fields for fields in objects) > len(objects):
        return TargetKind.TRACE
    if 2 * sum("event" in fields and "t" in fields for fields in objects) > len(objects):
        return TargetKind.EVENTS
    # Some servers log in JSON: what has a message or a level and no prompt is a log.
    if all(_is_log_line(fields) for fields in objects):
        return TargetKind.LOG
    return TargetKind.REQUESTS


def _object(line: str) -> dict[str, Any] | None:
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None


def _is_log_line(fields: dict[str, Any]) -> bool:
    return bool({"msg", "message", "level"} & fields.keys()) and not (
        {"messages", "prompt", "body", "request", "input"} & fields.keys()
    )
