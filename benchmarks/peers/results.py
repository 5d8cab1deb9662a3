"""What was measured so far: kept as JSON after every turn, read again to go on.

Owns the file and medians. Runs nothing.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.measures import Lengths

_FORMAT = 1


@dataclass
class Record:
    """What is known of one contender.

    Attributes
    ----------
    versions : dict of str to str
    settings : dict
        What was set or found out.
    kv_token_bytes : float or None
    turns : int
        How often it was its turn.
    taken : dict of str to int
        In how many of these turns each measure was tried.
    samples : dict of str to list of float
        By number, in the order in which they came.
    cost_s : dict of str to float
        What each measure took last, ``start`` among them.
    reasons : dict of str to str
        Why a measure has no number.
    first_tokens : list of int
        What it said to a plain sentence.
    """

    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    kv_token_bytes: float | None = None
    turns: int = 0
    taken: dict[str, int] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)
    cost_s: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    first_tokens: list[int] = field(default_factory=list)

    @property
    def is_out(self) -> bool:
        """Whether its last start failed, so that another would be in vain."""
        return "start" in self.reasons

    def add(self, samples: Mapping[str, float]) -> None:
        """Add one turn's numbers."""
        for name, value in samples.items():
            self.samples.setdefault(name, []).append(value)

    def median(self, name: str) -> float | None:
        """Return the median of a number, None where there is none."""
        values = self.samples.get(name)
        return statistics.median(values) if values else None


@dataclass
class Results:
    """All of it.

    Attributes
    ----------
    lengths : Lengths
    runs : list of dict
        Of each invocation that added to it: machine, command, cores, bandwidth by loop.
    records : dict of str to Record
        By the contender's label.
    """

    lengths: Lengths
    runs: list[dict[str, Any]] = field(default_factory=list)
    records: dict[str, Record] = field(default_factory=dict)

    def record(self, label: str) -> Record:
        """Return the record of a contender, an empty one at first."""
        return self.records.setdefault(label, Record())

    def save(self, path: Path) -> None:
        """Write everything, whole or not at all."""
        text = json.dumps({"format": _FORMAT, **asdict(self)}, indent=1)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(path)

    @classmethod
    def load(cls, path: Path, lengths: Lengths) -> Results:
        """Read what `save` wrote.

        Raises
        ------
        ValueError
            If it is something else, or was measured at other lengths.
        """
        saved = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(saved, dict) or saved.get("format") != _FORMAT:
            raise ValueError(f"{path} holds no results of this benchmark")
        theirs = saved["lengths"]
        if Lengths(**{**theirs, "streams": tuple(theirs["streams"])}) != lengths:
            raise ValueError(
                f"{path} was measured at {theirs}, this run is to use {asdict(lengths)}; they "
                "cannot be merged"
            )
        records = {label: Record(**record) for label, record in saved["records"].items()}
        for record in records.values():
            # Who could not start may be able to by now.
            record.reasons.pop("start", None)
        for label, record in records.items():
            if "taken" not in saved["records"][label]:
                # Of a time when every turn took everything.
                tried = (record.cost_s.keys() | record.reasons.keys()) - {"start"}
                record.taken = dict.fromkeys(tried, record.turns)
        return cls(lengths, saved["runs"], records)
