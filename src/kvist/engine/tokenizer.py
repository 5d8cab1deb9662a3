"""Text to token ids and back, by the model's own tokenizer and chat template.

Owns the one wrapper around a transformers tokenizer. Text that comes back token by token stands in
`kvist.engine.detokenizer`. Importing this module imports neither transformers nor torch.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvist.engine.detokenizer import DecoderKind, IncrementalDetokenizer, TokenBytes
from kvist.errors import ModelError, RequestError

_SURROGATE = re.compile("[\ud800-\udfff]")


class Tokenizer:
    """A model's tokenizer.

    Parameters
    ----------
    path
        Model folder, with the tokenizer's files and, if it has one, `generation_config.json`.

    Raises
    ------
    ModelError
        If the folder has no tokenizer that transformers can build.

    Notes
    -----
    One thread at a time: the library below caches.
    """

    __slots__ = ("_inner", "_tokens", "eos_token_ids", "path")

    def __init__(self, path: Path) -> None:
        from transformers import AutoTokenizer

        self.path = path
        try:
            self._inner: Any = AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # broken files make the libraries raise all there is
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelError(
                f"cannot build the tokenizer of {path}: {reason}; the folder needs tokenizer.json "
                "(or tokenizer.model) and tokenizer_config.json"
            ) from error
        # How long a prompt may be is the engine's to say; transformers would only warn.
        self._inner.model_max_length = sys.maxsize
        self._tokens = TokenBytes(self._inner)
        self.eos_token_ids = eos_ids(path, self._inner.eos_token_id)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; ids are below it."""
        return len(self._inner)

    @property
    def bos_token_id(self) -> int | None:
        """Id that begins a text, or None."""
        bos = self._inner.bos_token_id
        return None if bos is None else int(bos)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model came with a chat template; a base model does not."""
        return bool(self._inner.chat_template)

    @property
    def chat_template(self) -> str | None:
        """The model's own chat template, in Jinja; of several, the one for tools or the default."""
        own = self._inner.chat_template
        if isinstance(own, dict):
            own = own.get("tool_use") or own.get("default")
        return own or None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; with BOS and the like if the model wants them and it is asked for.

        A special token spelled out in the text becomes that token, as everywhere in transformers.

        Raises
        ------
        RequestError
            If `text` holds half of a surrogate pair, which JSON can spell and UTF-8 cannot.
        """
        try:
            ids = self._inner.encode(text, add_special_tokens=add_special_tokens)
        except TypeError as error:
            if (half := _SURROGATE.search(text)) is None:
                raise
            raise RequestError(
                f"the text is not Unicode: half of a surrogate pair (U+{ord(half[0]):04X}) stands"
                f" at letter {half.start()}; send whole characters",
                "prompt",
            ) from error
        return [int(index) for index in ids]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Text of a conversation, as the model was trained to read it.

        Parameters
        ----------
        messages
            `{"role": ..., "content": ...}` in order.
        tools
            Function descriptions, for templates that know tools.
        add_generation_prompt
            End with the opening of the assistant's turn.
        chat_template
            A Jinja template instead of the model's own.
        template_kwargs
            More variables for the template (`enable_thinking` and the like).

        Raises
        ------
        RequestError
            If there is no template, or the template refuses the messages; with its words.
        """
        if not messages:
            raise RequestError("messages is empty; a chat needs at least one message", "messages")
        if chat_template is None and not self.has_chat_template:
            raise RequestError(
                f"{self.path.name} has no chat template (a base model?); send the text as a plain "
                "prompt, or give a chat_template",
                "messages",
            )
        from jinja2 import TemplateError

        try:
            text = self._inner.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                add_generation_prompt=add_generation_prompt,
                chat_template=chat_template,
                tokenize=False,
                **(template_kwargs or {}),
            )
        except (TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise RequestError(
                f"the chat template cannot render these messages: {error}; check the roles, their "
                "order and the type of each content",
                "messages",
            ) from error
        return str(text)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a conversation; parameters and errors of `render_chat`.

        Templates write BOS themselves, so none is added here: two in a row put a model off. (The
        rule of vLLM and transformers. One more safeguard: a template that writes BOS twice, as some
        repacked ones do, loses the second.)
        """
        text = self.render_chat(
            messages, tools, add_generation_prompt, chat_template, template_kwargs
        )
        ids = self.encode(text, add_special_tokens=False)
        bos = self.bos_token_id
        # Where BOS also opens every turn (SmolLM2's <|im_start|>), two in a row are still one too
        # many: no turn is empty of its role.
        if bos is not None and ids[:2] == [bos, bos]:
            return ids[1:]
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids. Ids out of the vocabulary are left out."""
        skip = self._tokens.special_ids if skip_special_tokens else frozenset[int]()
        return self._tokens.decode([index for index in token_ids if index not in skip])

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that a token stands for, by itself; of an id that does not exist, none."""
        if self._tokens.kind is DecoderKind.BYTE_LEVEL:
            return self._tokens.bytes_of(token_id)
        token = self._tokens.token(token_id)
        if token is not None and self._tokens.is_byte(token_id):
            return bytes.fromhex(token[3:5])
        return self._tokens.decode([token_id]).encode()

    def stream(self, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """A detokenizer for one sequence; see there."""
        return IncrementalDetokenizer(self._tokens, skip_special_tokens)


def eos_ids(path: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    """Ids that end a generation, without repeats.

    Those of `generation_config.json`, else of `config.json`, and the tokenizer's own. The union, as
    in vLLM; transformers' generate takes the first file alone.

    Raises
    ------
    ModelError
        If a file names something that is no id.
    """
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        try:
            value = json.loads((path / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            continue  # an absent file says nothing; a broken config.json is resolve's to report
        if value is not None:
            named = value if isinstance(value, list) else [value]
            if not all(type(index) is int for index in named):
                raise ModelError(
                    f"{path / name}: eos_token_id={value!r} is no token id or list of them; correct"
                    " it, or fetch the model again"
                )
            ids += named
            break
    if tokenizer_eos is not None:
        ids.append(tokenizer_eos)
    return tuple(dict.fromkeys(int(index) for index in ids))
