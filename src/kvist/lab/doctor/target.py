"""What a person points the doctor at, and what kind of thing it is.

Owns the guess (URL, Prometheus text, request log, server log) and the reading. Knows no symptoms.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kvist.errors import ConfigError

TIMEOUT_S = 10.0
MAX_BYTES = 512 << 20
_SAMPLE = re.compile(r"^[a-zA-Z_:][\w:]*(\{.*\})? [-+\d.eEinfNa]+( \d+)?$")


class TargetKind(StrEnum):
    """What a target holds."""

    METRICS = "metrics"
    REQUESTS = "requests"
    LOG = "log"


@dataclass(frozen=True, slots=True)
class Target:
    """Text of a target and what it is."""

    kind: TargetKind
    text: str


def read_target(name: str) -> Target:
    """Read a URL or a file.

    Raises
    ------
    ConfigError
        If it cannot be reached or read, is empty, or is no text.
    """
    if name.startswith(("http://", "https://")):
        return Target(TargetKind.METRICS, _fetch(name))
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
    lines = [line for line in text.splitlines() if line.strip()][:200]
    samples = sum(_SAMPLE.match(line) is not None or line.startswith("# ") for line in lines)
    if samples > 0.8 * len(lines):
        return TargetKind.METRICS
    if sum(map(_is_object, lines)) > 0.5 * len(lines):
        return TargetKind.REQUESTS
    return TargetKind.LOG


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
