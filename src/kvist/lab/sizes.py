"""How big the KV cache of a model is, in a few numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvist.engine.weights.servable import check_servable
from kvist.errors import ModelError
from kvist.spec import KVSpec


def describe_kv(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return KV bytes a token and for one full context, in the checkpoint's dtype.

    ``refused`` lists why the engine would not serve the model today; empty when it would.
    """
    spec = KVSpec.from_config(config)
    context = spec.max_position or 0
    refused: list[str] = []
    try:
        check_servable(config)
    except ModelError as error:
        refused.append(str(error))
    return {
        "kv_bytes_per_token": spec.token_bytes(),
        "kv_bytes_full_context": spec.kv_bytes(context),
        "context_tokens": context,
        "refused": refused,
    }
