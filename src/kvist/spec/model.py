"""`KVSpec`: the KV memory that one model asks for, as groups of layers, and its bytes.

Owns the sizing rules (tokens and windows to bytes). How a `config.json` is understood stands in
`kvist.spec.reading` and `kvist.spec.layers`; how many bytes a format packs a token into is told by
the caller.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvist.errors import ConfigError, ModelError
from kvist.spec.group import LayerGroup, LayerKind
from kvist.spec.layers import cut_groups, layer_uses, source_layers
from kvist.spec.reading import DTYPE_BYTES, ConfigReader

GroupBytes = Callable[[LayerGroup], int]
"""Bytes a token and group, as a KV format packs them (`KVFormat.token_bytes`)."""


def read_config(path: str | Path) -> dict[str, Any]:
    """Return the `config.json` at `path`, or inside it if that is a directory.

    Raises
    ------
    ModelError
        If there is no such file, or it is no JSON object.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(
            f"cannot read {file}: {error.strerror or error}; give a model directory that has a "
            "config.json, or the file itself"
        ) from error
    except ValueError as error:
        raise ModelError(f"{file} is not JSON ({error}); fetch the model again") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file} holds a JSON {type(config).__name__}, not an object")
    return config


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What a model keeps of the past.

    Parameters
    ----------
    groups
        Layers by geometry, in the order of their first layer. A layer that attends *and* carries a
        state (Falcon-H1) is in two groups; one that does neither, or reads another layer's K and V,
        in none.
    num_layers
        Decoder layers of the model; attention layers where a decoder layer has two (LongCat).
    dtype
        Of the checkpoint: "bfloat16", "float16" or "float32".
    num_query_heads, hidden_size, vocab_size
        Q, width of the residual stream, size of the vocabulary.
    max_position
        Longest context the model was made for, in tokens, or None where nothing limits it (ALiBi).
    shared_layers
        (layer, source layer) pairs: the layer attends over what the source layer stored.
    model_type, architecture
        As the configuration names them; "" where it does not.
    notes
        What was assumed in reading the configuration, for the start-up log and `kvist plan`.
    """

    groups: tuple[LayerGroup, ...]
    num_layers: int
    dtype: str
    num_query_heads: int
    hidden_size: int
    vocab_size: int
    max_position: int | None
    shared_layers: tuple[tuple[int, int], ...] = ()
    model_type: str = ""
    architecture: str = ""
    notes: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> KVSpec:
        """Read a raw `config.json`; no transformers needed.

        A multimodal configuration is read at its language model. Fields that the file leaves out
        take the defaults of its family, as transformers would fill them in.

        Raises
        ------
        ModelError
            If a field that decides the size is missing, malformed or contradicts another, or a
            layer type is unknown. The message names the field.
        """
        reader = ConfigReader(config)
        uses = layer_uses(reader)
        shared = source_layers(reader, uses)
        return cls(
            groups=cut_groups(uses, shared),
            num_layers=len(uses),
            dtype=reader.dtype(),
            num_query_heads=reader.optional_integer("num_attention_heads") or 0,
            hidden_size=reader.integer("hidden_size"),
            vocab_size=reader.integer("vocab_size"),
            max_position=reader.optional_integer("max_position_embeddings"),
            shared_layers=shared,
            model_type=reader.model_type,
            architecture=reader.architecture,
            notes=tuple(reader.notes),
        )

    @classmethod
    def from_path(cls, path: str | Path) -> KVSpec:
        """Read the `config.json` at `path`, or inside it if that is a directory.

        Raises
        ------
        ModelError
            If there is no such file, or it is no JSON object, or `from_config` refuses it.
        """
        return cls.from_config(read_config(path))

    @property
    def itemsize(self) -> int:
        """Bytes an element in the checkpoint's dtype."""
        return DTYPE_BYTES[self.dtype]

    @property
    def kv_groups(self) -> tuple[LayerGroup, ...]:
        """The groups that grow with the context: all but `STATE`."""
        return tuple(group for group in self.groups if group.kind is not LayerKind.STATE)

    @property
    def token_elements(self) -> int:
        """Elements one token adds while the context is shorter than every window."""
        return sum(group.token_elements for group in self.groups)

    def token_bytes(self, itemsize: int | None = None, *, packed: GroupBytes | None = None) -> int:
        """Bytes one token adds while the context is shorter than every window.

        Parameters
        ----------
        itemsize
            Bytes an element; the checkpoint's dtype if None.
        packed
            A format's bytes a token and group; instead of `itemsize`.
        """
        return sum(map(self._packed(itemsize, packed), self.groups))

    def kv_bytes(
        self,
        context_tokens: int,
        concurrency: int = 1,
        itemsize: int | None = None,
        *,
        packed: GroupBytes | None = None,
        block_size: int | None = None,
    ) -> int:
        """Bytes that `concurrency` sequences of `context_tokens` hold, nothing shared.

        Windows are honoured: a windowed group holds no more than its window. State that does not
        grow with the context is not in here; see `state_bytes`.

        Parameters
        ----------
        context_tokens
            Tokens a sequence.
        concurrency
            Sequences.
        itemsize, packed
            As for `token_bytes`.
        block_size
            Slots a block: counts whole blocks, the worst case over alignments of a window. None
            counts tokens.
        """
        if context_tokens < 0 or concurrency < 0:
            raise ConfigError(
                f"tokens and sequences cannot be negative, got context_tokens={context_tokens}, "
                f"concurrency={concurrency}"
            )
        bytes_of = self._packed(itemsize, packed)
        total = 0
        for group in self.kv_groups:
            tokens = group.live_tokens(context_tokens)
            if block_size is not None:
                tokens = group.live_blocks(context_tokens, block_size) * block_size
            total += tokens * bytes_of(group)
        return concurrency * total

    def state_bytes(self, concurrency: int = 1, itemsize: int | None = None) -> int:
        """Bytes of constant state that `concurrency` sequences hold, whatever their length."""
        size = self.itemsize if itemsize is None else itemsize
        return concurrency * sum(group.state_bytes(size) for group in self.groups)

    def _packed(self, itemsize: int | None, packed: GroupBytes | None) -> GroupBytes:
        if packed is not None:
            if itemsize is not None:
                raise ConfigError(f"give itemsize or packed, not both (itemsize={itemsize})")
            return packed
        size = self.itemsize if itemsize is None else itemsize
        if size < 1:
            raise ConfigError(f"itemsize must be at least 1 byte, got {size}")
        return lambda group: group.token_elements * size
