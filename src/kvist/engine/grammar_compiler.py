"""Grammars by llguidance: which tokens may come next.

Owns the check of a grammar and the automaton that follows it. Knows no logits and no scheduler.
llguidance is imported at first use, and needs no torch.

What is wrong with a grammar shows without a vocabulary: the text side calls `check_grammar` and
refuses at once; what shows only with one ends the request with an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvist.engine.grammar import GrammarSpec, Matcher
from kvist.errors import RequestError

KINDS = ("json_object", "json_schema", "regex", "choice", "grammar")

MOST_BYTES: Mapping[str, int] = MappingProxyType(
    {"json_schema": 1 << 18, "choice": 1 << 18, "regex": 1 << 15, "grammar": 1 << 15}
)
"""Of one grammar. The automaton of an expression grows with the square of it, and more."""

_LEXER_FUEL = 20_000
"""Of a step: a tenth of llguidance's own limit, and of the seconds that it may hold a step up."""

_TOO_LARGE = "too many"
"""What llguidance says when a grammar exceeds its limits."""


class _Matcher:
    """llguidance's matcher, with the end of text told from what may follow."""

    __slots__ = ("_inner", "_spec")

    def __init__(self, inner: Any, spec: GrammarSpec) -> None:
        self._inner = inner
        self._spec = spec

    @property
    def is_done(self) -> bool:
        return bool(self._inner.is_stopped())

    def mask(self) -> bytes:
        return bytes(self._inner.compute_bitmask())

    def advance(self, token_id: int) -> bool:
        return bool(self._inner.consume_token(token_id))

    @property
    def failure(self) -> str | None:
        if not self._inner.is_error():
            return None
        # A token that is not allowed is an error too, but not the grammar's.
        why = str(self._inner.get_error())
        return str(_refusal(self._spec, why)) if _TOO_LARGE in why else None

    def fork(self) -> Matcher:
        return _Matcher(self._inner.deep_copy(), self._spec)


class GrammarCompiler:
    """Makes matchers for one vocabulary.

    Parameters
    ----------
    path : Path
        Model folder; its tokenizer is read at the first grammar.
    vocab_size : int
        Of the model.

    Notes
    -----
    Calls are made from one thread at a time.
    """

    def __init__(self, path: Path, vocab_size: int) -> None:
        self._path = path
        self._vocab_size = vocab_size
        self._vocabulary: Any = None

    def compile(self, spec: GrammarSpec) -> Matcher:
        """Return a matcher at the beginning of `spec`.

        Raises
        ------
        RequestError
            If the grammar is wrong, or llguidance cannot read this tokenizer.
        """
        text = _grammar_text(spec)
        if self._vocabulary is None:
            self._vocabulary = self._read_vocabulary(spec)
        llguidance = _llguidance()
        limits = llguidance.LLParserLimits(step_lexer_fuel=_LEXER_FUEL)
        inner = llguidance.LLMatcher(self._vocabulary, text, log_level=0, limits=limits)
        if inner.is_error():
            raise _refusal(spec, inner.get_error())
        return _Matcher(inner, spec)

    def _read_vocabulary(self, spec: GrammarSpec) -> Any:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        llguidance = _llguidance()
        from llguidance.hf import from_tokenizer

        from kvist.engine.tokenizer import eos_ids

        inner = AutoTokenizer.from_pretrained(
            self._path, local_files_only=True, trust_remote_code=False
        )
        if not isinstance(inner, PreTrainedTokenizerFast):
            raise RequestError(
                f"{spec.param}: llguidance {llguidance.get_version()} reads no"
                f" {type(inner).__name__}; a model with a tokenizer.json can be constrained",
                spec.param,
            )
        ends = list(eos_ids(self._path, inner.eos_token_id))
        # Either may be the larger: models are padded, tokenizers have tokens the model lacks.
        size = max(self._vocab_size, len(inner))
        return from_tokenizer(inner, n_vocab=size, eos_token=ends or None)


def check_grammar(spec: GrammarSpec) -> None:
    """Raise `RequestError`, naming the field that `spec` came in, if it is no grammar.

    Needs no vocabulary. Milliseconds, up to a second for a schema of many pages; any thread.
    """
    error = _llguidance().LLMatcher.validate_grammar(_grammar_text(spec))
    if error and not error.startswith("WARNING"):
        raise _refusal(spec, error)


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise RequestError(
            "structured output needs llguidance, which is not installed; pip install"
            " 'kvist[engine]'",
            "response_format",
        ) from error
    return llguidance


def _grammar_text(spec: GrammarSpec) -> str:
    """Return what llguidance compiles."""
    size, most = len(spec.text.encode()), MOST_BYTES.get(spec.kind)
    if most is not None and size > most:
        raise RequestError(
            f"{spec.param}: this {spec.kind} has {size} bytes, it may have {most}; ask for less",
            spec.param,
        )
    llguidance = _llguidance()
    matcher = llguidance.LLMatcher
    try:
        match spec.kind:
            case "json_object":
                return str(matcher.grammar_from_json_schema('{"type": "object"}'))
            case "json_schema":
                if not isinstance(json.loads(spec.text), dict | bool):
                    raise ValueError("a schema is a JSON object")
                return str(matcher.grammar_from_json_schema(spec.text))
            case "regex":
                return str(matcher.grammar_from_regex(spec.text))
            case "choice":
                return str(matcher.grammar_from_lark(_choice(spec.text)))
            case "grammar":
                return str(llguidance.grammar_from("grammar", spec.text))
    except (ValueError, TypeError) as error:
        raise _refusal(spec, str(error)) from error
    raise RequestError(f"{spec.param}: {spec.kind!r} is none of {', '.join(KINDS)}", spec.param)


def _choice(text: str) -> str:
    choices = json.loads(text)
    if not isinstance(choices, list) or not choices or not all(choices):
        raise ValueError("choices are a JSON list of texts that are not empty")
    if not all(isinstance(choice, str) for choice in choices):
        raise ValueError("choices are texts")
    return "start: " + " | ".join(json.dumps(choice) for choice in choices)


def _refusal(spec: GrammarSpec, why: str) -> RequestError:
    reason = why.strip().splitlines()[0] if why.strip() else "unknown reason"
    return RequestError(
        f"{spec.param}: this {spec.kind} cannot be followed: {reason[:300]}", spec.param
    )
