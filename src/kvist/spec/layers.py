"""From configuration fields to what each decoder layer stores, and from layers to groups.

Owns the rules; the data they work on stands in `kvist.spec.families`. Pure integers and strings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kvist.errors import ModelError
from kvist.spec.families import Mixer, Pattern
from kvist.spec.group import LayerGroup, LayerKind
from kvist.spec.reading import ConfigReader

_KINDS: Mapping[str, tuple[LayerKind, ...]] = MappingProxyType(
    {
        "full_attention": (LayerKind.FULL,),
        "attention": (LayerKind.FULL,),
        "global": (LayerKind.FULL,),
        "indexed_attention": (LayerKind.FULL,),
        "deepseek_sparse_attention": (LayerKind.FULL,),
        "qwen_sparse_attention": (LayerKind.FULL,),
        "sliding_attention": (LayerKind.SLIDING,),
        "local": (LayerKind.SLIDING,),
        "chunked_attention": (LayerKind.CHUNKED,),
        "linear_attention": (LayerKind.STATE,),
        "mamba": (LayerKind.STATE,),
        "conv": (LayerKind.STATE,),
        "hybrid": (LayerKind.FULL, LayerKind.STATE),
        "hybrid_sliding": (LayerKind.SLIDING, LayerKind.STATE),
        "cross_attention": (),
        "mlp": (),
        "moe": (),
    }
)
"""What the layer types of configurations store of the text; the last three store nothing of it."""

MAX_LAYERS = 10_000
"""Each is looked at by itself, and a number in a file is quickly written."""

_NEMOTRON_LETTERS: Mapping[str, str] = MappingProxyType(
    {
        "M": "linear_attention",
        "*": "full_attention",
        "-": "mlp",
        "E": "moe",
    }
)


@dataclass(frozen=True, slots=True)
class LayerUse:
    """What one layer stores in one group; equal uses share a group. Fields as in `LayerGroup`."""

    kind: LayerKind
    num_kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int | None = None
    state_elements: int = 0
    state_fp32_elements: int = 0


def layer_uses(reader: ConfigReader) -> tuple[tuple[LayerUse, ...], ...]:
    """What every decoder layer would store, in layer order, KV sharing not yet regarded."""
    if reader.get("is_encoder_decoder"):
        raise ModelError(
            f"{reader.model_type or 'the model'} is an encoder-decoder model: it keeps K and V of "
            "the encoded input too, which this version neither sizes nor runs; take a decoder-only "
            "model"
        )
    uses = []
    for layer, name in enumerate(_layer_types(reader)):
        if name not in _KINDS:
            raise ModelError(
                f"{reader.where}: layer {layer} is of type "
                f"{name!r}, and how much it stores is unknown; known types are "
                f"{', '.join(_KINDS)}"
            )
        uses.append(tuple(_use(reader, kind, layer) for kind in _KINDS[name]))
    return tuple(uses)


def source_layers(
    reader: ConfigReader, uses: Sequence[tuple[LayerUse, ...]]
) -> tuple[tuple[int, int], ...]:
    """(layer, source) pairs of layers that read the K and V of an earlier one.

    The last `num_kv_shared_layers` each read the last layer before them that is of their own kind.
    """
    count = reader.optional_integer("num_kv_shared_layers") or 0
    first = len(uses) - count
    if count and first < 1:
        raise ModelError(
            f"{reader.where}: num_kv_shared_layers={count} leaves no layer of "
            f"{len(uses)} to share from"
        )
    pairs = []
    for layer in range(first, len(uses)):
        if not uses[layer]:
            continue
        sources = [earlier for earlier in range(first) if uses[earlier] == uses[layer]]
        if not sources:
            raise ModelError(
                f"{reader.where}: layer {layer} shares K and V, but none of "
                f"the first {first} layers is of its kind ({uses[layer][0].kind})"
            )
        pairs.append((layer, sources[-1]))
    return tuple(pairs)


def cut_groups(
    uses: Sequence[tuple[LayerUse, ...]], shared: Sequence[tuple[int, int]]
) -> tuple[LayerGroup, ...]:
    """Layers with equal use, together; groups in the order of their first layer."""
    readers = {layer for layer, _ in shared}
    groups: dict[LayerUse, list[int]] = {}
    for layer, layer_uses_ in enumerate(uses):
        if layer not in readers:
            for use in layer_uses_:
                groups.setdefault(use, []).append(layer)
    return tuple(
        LayerGroup(
            kind=use.kind,
            layers=tuple(layers),
            num_kv_heads=use.num_kv_heads,
            key_dim=use.key_dim,
            value_dim=use.value_dim,
            window=use.window,
            state_elements=use.state_elements,
            state_fp32_elements=use.state_fp32_elements,
        )
        for use, layers in groups.items()
    )


def _window(reader: ConfigReader) -> int | None:
    if reader.get("use_sliding_window") is False:
        return None
    return reader.optional_integer("sliding_window")


def _num_layers(reader: ConfigReader) -> int:
    # LongCat-Flash counts decoder layers of two attentions each as num_layers.
    pairs = reader.optional_integer("num_layers") if reader.get("layers_are_pairs") else None
    layers = 2 * pairs if pairs else reader.integer("num_hidden_layers")
    if layers > MAX_LAYERS:
        raise ModelError(
            f"{reader.where}: {layers} layers are more than any model has (at most {MAX_LAYERS} are"
            " read); the file is damaged, fetch the model again"
        )
    return layers


def _layer_types(reader: ConfigReader) -> list[str]:
    """The type of every layer, as the configuration says or its family implies."""
    named = reader.optional_list("layer_types")
    letters = reader.get("hybrid_override_pattern")
    if named is None and isinstance(letters, str):
        named = [_NEMOTRON_LETTERS.get(letter, letter) for letter in letters]
    if named is None:
        types = _implied_types(reader, _num_layers(reader))
        cross = reader.optional_list("cross_attention_layers") or ()
        if cross:
            reader.note(f"{len(cross)} cross-attention layers store the image only")
        return ["cross_attention" if i in cross else name for i, name in enumerate(types)]
    # Nemotron-H counts its layers by the list alone; everywhere else the two must agree.
    if reader.family.pattern is not Pattern.NAMED:
        layers = _num_layers(reader)
        if len(named) != layers:
            raise ModelError(
                f"{reader.where}: layer_types has {len(named)} entries for "
                f"num_hidden_layers={layers}"
            )
    types = [str(name) for name in named]
    if reader.get("use_sliding_window") is False:
        types = ["full_attention" if name == "sliding_attention" else name for name in types]
    return _last_full(reader, types)


def _last_full(reader: ConfigReader, types: list[str]) -> list[str]:
    # Gemma 4 makes the last layer full whatever its list says.
    return [*types[:-1], "full_attention"] if reader.get("last_full") and types else types


def _implied_types(reader: ConfigReader, layers: int) -> list[str]:
    pattern = reader.family.pattern
    window = _window(reader)
    other = "linear_attention" if reader.family.mixer else "sliding_attention"
    indices = range(layers)
    if pattern is Pattern.STATE:
        return ["linear_attention"] * layers
    if pattern is Pattern.HYBRID:
        return ["hybrid"] * layers
    if pattern is Pattern.LISTED:
        # Bamba lists its attention layers and has none by default, LFM2 is all attention then.
        listed = reader.optional_list("attn_layer_indices") or reader.optional_list(
            "full_attn_idxs"
        )
        if not listed and reader.family.mixer is Mixer.CONV:
            return ["full_attention"] * layers
        return ["full_attention" if i in (listed or ()) else other for i in indices]
    if pattern is Pattern.OFFSET:
        period = reader.integer("attn_layer_period")
        offset = reader.optional_integer("attn_layer_offset") or 0
        return ["full_attention" if i % period == offset else other for i in indices]
    if pattern is Pattern.NO_ROPE:
        return _no_rope_types(reader, layers, window)
    if pattern in (Pattern.LAST_FULL, Pattern.FIRST_FULL):
        period = _period(reader)
        full_at = period - 1 if pattern is Pattern.LAST_FULL else 0
        if period and (window or reader.family.mixer):
            types = ["full_attention" if i % period == full_at else other for i in indices]
            return _last_full(reader, types)
        return ["full_attention"] * layers
    if pattern in (Pattern.TAIL, Pattern.EVEN_HEAD) and window:
        bound = reader.optional_integer("max_window_layers") or 0
        return [
            other
            if (i >= bound if pattern is Pattern.TAIL else i < bound and i % 2 == 0)
            else "full_attention"
            for i in indices
        ]
    if pattern is Pattern.UNIFORM and window:
        return [other] * layers
    if pattern is Pattern.UNIFORM and reader.optional_integer("attention_chunk_size"):
        return ["chunked_attention"] * layers
    return ["full_attention"] * layers


def _period(reader: ConfigReader) -> int:
    """Layers a repetition; a string such as "LLLG" (EXAONE 4) counts by its length."""
    for field in ("sliding_window_pattern", "full_attention_interval"):
        value = reader.get(field)
        if isinstance(value, str):
            return len(value)
        if value is not None:
            return reader.optional_integer(field) or 0
    return reader.family.period or 0


def _no_rope_types(reader: ConfigReader, layers: int, window: int | None) -> list[str]:
    """Llama 4 chunks the layers with RoPE, SmolLM3 may window those without."""
    interval = reader.optional_integer("no_rope_layer_interval") or reader.family.period or layers
    rope = reader.optional_list("no_rope_layers") or [
        (i + 1) % interval != 0 for i in range(layers)
    ]
    if len(rope) != layers:
        raise ModelError(
            f"{reader.where}: no_rope_layers has {len(rope)} entries for num_hidden_layers={layers}"
        )
    if reader.optional_integer("attention_chunk_size"):
        return ["chunked_attention" if on else "full_attention" for on in rope]
    return ["sliding_attention" if window and not on else "full_attention" for on in rope]


def _use(reader: ConfigReader, kind: LayerKind, layer: int) -> LayerUse:
    if kind is LayerKind.STATE:
        elements, fp32_elements = _state_size(reader)
        return LayerUse(kind, state_elements=elements, state_fp32_elements=fp32_elements)
    rank = reader.optional_integer("kv_lora_rank")
    if rank is not None:
        # Sparse-attention models (DeepSeek V3.2) keep one indexer key a token beside the latent.
        # Layers that reuse another layer's choice (GLM) need none, and are counted all the same.
        index = reader.optional_integer("index_head_dim") or 0
        if index:
            reader.note(f"{index} indexer elements a token and layer are counted in key_dim")
        return LayerUse(LayerKind.LATENT, 1, rank + reader.integer("qk_rope_head_dim") + index)
    window = None
    if kind is LayerKind.SLIDING:
        window = reader.integer("sliding_window")
    elif kind is LayerKind.CHUNKED:
        window = reader.integer("attention_chunk_size")
    heads, key_dim = _heads_and_dim(reader, kind, layer)
    value_dim = reader.optional_integer("v_head_dim") or key_dim
    return LayerUse(kind, heads, key_dim, value_dim, window)


def _heads_and_dim(reader: ConfigReader, kind: LayerKind, layer: int) -> tuple[int, int]:
    """H and D of one attention layer."""
    queries = reader.integer("num_attention_heads")
    heads = _kv_heads(reader, queries)
    dim = reader.optional_integer("head_dim") or reader.integer("hidden_size") // queries
    overrides = reader.get("per_layer_config")
    if isinstance(overrides, Mapping):
        for index, fields in overrides.items():
            if str(index).lstrip("0") == str(layer).lstrip("0") and isinstance(fields, Mapping):
                dim = reader.whole("head_dim", fields.get("head_dim", dim))
                heads = reader.whole(
                    "num_key_value_heads", fields.get("num_key_value_heads", heads)
                )
    elif kind is LayerKind.FULL and reader.get("global_head_dim"):
        # Gemma 4: full layers have wider heads, and may have fewer of them.
        dim = reader.integer("global_head_dim")
        if reader.get("attention_k_eq_v"):
            heads = reader.optional_integer("num_global_key_value_heads") or heads
    if not 1 <= heads <= queries or dim < 1:
        raise ModelError(
            f"{reader.where}: {heads} KV heads of {dim} elements do not fit {queries} query heads "
            f"and hidden_size={reader.integer('hidden_size')}"
        )
    return heads, dim


def _kv_heads(reader: ConfigReader, queries: int) -> int:
    # Falcon writes num_kv_heads even where its old architecture goes by multi_query alone.
    multi_query = reader.get("multi_query")
    if multi_query is not None and not reader.get("new_decoder_architecture"):
        return 1 if multi_query else queries
    nested = reader.get("attn_config")
    if isinstance(nested, Mapping) and nested.get("kv_n_heads"):
        return reader.whole("kv_n_heads", nested["kv_n_heads"])
    return reader.optional_integer("num_key_value_heads") or queries


def _state_size(reader: ConfigReader) -> tuple[int, int]:
    """Elements a layer and sequence: convolution inputs, recurrent state (fp32)."""
    mixer = reader.family.mixer
    if mixer is None:
        reader.note("the size of its linear-attention state is unknown: counted as nothing")
        return 0, 0
    hidden = reader.integer("hidden_size")
    if mixer is Mixer.LIGHTNING:
        queries = reader.integer("num_attention_heads")
        dim = reader.optional_integer("head_dim") or hidden // queries
        return 0, queries * dim * dim
    kernel = reader.integer("conv_kernel")
    if mixer is Mixer.CONV:
        return hidden * kernel, 0
    if mixer is Mixer.DELTA:
        key_dim, value_dim = (
            reader.integer(f"linear_{part}_head_dim") for part in ("key", "value")
        )
        key_heads = reader.integer("linear_num_key_heads")
        value_heads = reader.integer("linear_num_value_heads")
        channels = 2 * key_heads * key_dim + value_heads * value_dim
        return channels * kernel, value_heads * key_dim * value_dim
    inner = reader.integer("expand") * hidden
    state = reader.integer("state_size")
    if mixer is Mixer.MAMBA:
        return inner * kernel, inner * state
    heads = reader.optional_integer("mamba_num_heads")
    auto = reader.get("mamba_head_dim") == "auto"
    head_dim = None if auto else reader.optional_integer("mamba_head_dim")
    if heads and head_dim:
        inner = heads * head_dim
    inner = reader.optional_integer("mamba_d_ssm") or inner
    channels = inner + 2 * reader.integer("n_groups") * state
    return channels * kernel, inner * state
