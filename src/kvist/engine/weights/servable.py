"""What the engine runs today, and why it refuses the rest.

Owns the list of reasons. Reads the raw `config.json` only, so a refusal comes before any weight is
loaded. What is refused here would otherwise run and be wrong: the engine's attention is causal over
all tokens or over a sliding window, and a mask, bias or state that it does not know of is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvist.errors import ModelError
from kvist.spec import KVSpec, LayerKind

_CAUSAL_HEADS = ("ForCausalLM", "LMHeadModel")
_ALIBI_TYPES = frozenset({"bloom", "mpt"})
_MOVING_ROPES = frozenset({"longrope", "su", "dynamic"})
_MODALITIES = ("vision_config", "audio_config", "speech_config", "vision_tower", "mm_vision_tower")


def check_servable(config: Mapping[str, Any], max_model_len: int | None = None) -> None:
    """Refuse a model whose attention the engine does not compute.

    Parameters
    ----------
    config
        Raw `config.json`.
    max_model_len
        Longest sequence that will be served, in tokens. A chunk at least as long never cuts
        anything and counts as full attention. None: the model's own longest context.

    Raises
    ------
    ModelError
        Names every reason, and what can be done where something can.
    """
    reasons = list(_reasons(config, max_model_len))
    if reasons:
        name = config.get("model_type") or (config.get("architectures") or ["this model"])[0]
        raise ModelError(f"the engine cannot serve {name} yet: {'; '.join(reasons)}")


def _reasons(config: Mapping[str, Any], max_model_len: int | None) -> Iterator[str]:
    if config.get("is_encoder_decoder"):
        # Nothing below would add to it, and its sizes are not those of a decoder.
        yield "it is an encoder-decoder, and only decoders have the one KV cache that is managed"
        return
    architectures = [str(name) for name in config.get("architectures") or ()]
    modalities = [name for name in _MODALITIES if config.get(name)]
    if modalities:
        yield f"it is multimodal ({modalities[0]}), and only text models run"
    elif architectures and not any(name.endswith(_CAUSAL_HEADS) for name in architectures):
        yield f"its head is {architectures[0]}, which predicts no next token"
    text = config.get("text_config") if isinstance(config.get("text_config"), Mapping) else config
    yield from _layer_reasons(KVSpec.from_config(config), max_model_len)
    yield from _attention_reasons(text or config)


def _layer_reasons(spec: KVSpec, max_model_len: int | None) -> Iterator[str]:
    longest = max_model_len or spec.max_position
    for group in spec.groups:
        count = f"{group.num_layers} of {spec.num_layers} layers"
        if group.kind is LayerKind.LATENT:
            yield f"{count} cache a compressed latent (MLA), which no kernel reads yet"
        elif group.kind is LayerKind.STATE:
            yield f"{count} carry a recurrent state (linear attention, Mamba or convolution)"
        elif (
            group.kind is LayerKind.CHUNKED
            and group.window is not None
            and (longest is None or group.window < longest)
        ):
            context = "any length" if longest is None else f"{longest:,} tokens"
            yield (
                f"{count} attend in chunks of {group.window:,} tokens, shorter than the context of "
                f"{context}, and chunks do not run yet (--max-model-len {group.window} would "
                "make it full attention)"
            )
    if spec.shared_layers:
        yield f"{len(spec.shared_layers)} of {spec.num_layers} layers read another layer's K and V"


def _attention_reasons(config: Mapping[str, Any]) -> Iterator[str]:
    kind = str(config.get("model_type") or "")
    if kind in _ALIBI_TYPES or config.get("alibi") or _position_kind(config) == "alibi":
        yield "it places tokens by ALiBi, a bias that the kernels do not add"
    if config.get("use_bidirectional_attention") or config.get("is_causal") is False:
        yield "its tokens attend to later ones, so nothing of a prefix could be kept"
    moving = sorted(_rope_kinds(config) & _MOVING_ROPES)
    if moving:
        yield (
            f"its rope is {moving[0]!r}: the frequencies depend on the longest sequence in the "
            "batch, so one request would change another's K"
        )


def _position_kind(config: Mapping[str, Any]) -> str:
    return str(config.get("position_embedding_type") or "").lower()


def _rope_kinds(config: Mapping[str, Any]) -> set[str]:
    """Every rope type that a configuration names, flat or one a layer type."""
    kinds = set()
    for key in ("rope_parameters", "rope_scaling"):
        block = config.get(key)
        if not isinstance(block, Mapping):
            continue
        for part in (block, *(value for value in block.values() if isinstance(value, Mapping))):
            kinds.add(str(part.get("rope_type") or part.get("type") or "default"))
    return kinds
