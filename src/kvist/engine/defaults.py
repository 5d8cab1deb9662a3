"""What a model itself recommends for sampling. Reads one small file; knows no tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def generation_defaults(path: Path) -> dict[str, Any]:
    """Read the sampling options that a model's ``generation_config.json`` recommends.

    Only those that `SamplingParams` has; an empty mapping where there is no such file.
    """
    try:
        config = json.loads((path / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if config.get("do_sample") is False:
        return {"temperature": 0.0}
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return {name: config[name] for name in names if config.get(name) is not None}
