"""Bad words as token ids.

Owns the spelling of a word by a tokenizer: at the beginning of a text and after a space, as vLLM
does it. What the ids do stands in `engine.planning`.
"""

from __future__ import annotations

from dataclasses import replace

from kvist.engine.sampling import SamplingParams
from kvist.engine.tokenizer import Tokenizer
from kvist.errors import RequestError


def spell_bad_words(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Return `params` with `bad_words_token_ids` added for its `bad_words`.

    Raises
    ------
    RequestError
        If a word has no tokens.
    """
    if not params.bad_words:
        return params
    spellings: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        bare = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        after_space = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        if not bare:
            raise RequestError(f"bad_words: {word!r} has no tokens", "bad_words")
        spellings[tuple(bare)] = None
        # Where the space is a token of its own, the bare spelling says it all.
        if len(after_space) == len(bare) and after_space[0] != bare[0]:
            spellings[tuple(after_space)] = None
    return replace(params, bad_words_token_ids=(*params.bad_words_token_ids, *spellings))
