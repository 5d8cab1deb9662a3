"""Write cases for the doctor that were thought up without knowing its rules.

``python tests/doctor/plant.py`` writes ``cases/planted-*``, always the same. What must be found
first was decided from the symptom and from how engines talk, before the doctor was run on any.
"""

from __future__ import annotations

import json
from pathlib import Path

import plant_events
import plant_logs
import plant_metrics
import plant_other_logs
import plant_requests
from plant_case import Case

SOURCE = "planted by someone who had not read the rules; written"


def all_cases() -> list[Case]:
    """Return the planted cases; names are unique."""
    return [
        *plant_metrics.cases(),
        *plant_logs.cases(),
        *plant_other_logs.cases(),
        *plant_requests.cases(),
        *plant_events.cases(),
    ]


def main() -> None:
    """Write them below ``cases/``, over what was there."""
    home = Path(__file__).parent / "cases"
    for case in all_cases():
        folder = home / f"planted-{case.name}"
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in case.files.items():
            (folder / name).write_text(text, encoding="utf-8")
        expected: dict[str, object] = {"first": case.first, "source": SOURCE, "how": case.how}
        if case.options:
            expected["options"] = list(case.options)
        (folder / "expected.json").write_text(
            json.dumps(expected, indent=2) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
