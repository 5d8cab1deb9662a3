"""Log probabilities as OpenAI spells them, for chats and for completions.

Owns the two forms, which differ in everything but the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvist.engine.outputs import Logprob, Logprobs
from kvist.engine.tokenizer import Tokenizer
from kvist.server.schema import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)


def chat_logprobs(
    token_ids: Sequence[int], found: Sequence[Logprobs], num_top: int, tokenizer: Tokenizer
) -> ChatLogprobs:
    """Return log probabilities of an answer: each token, and the `num_top` most likely there.

    `bytes` are the token's own, also where it is a part of a letter.
    """
    content = []
    for token_id, logprobs in zip(token_ids, found, strict=True):
        chosen = logprobs[token_id]
        top = sorted(logprobs.items(), key=lambda item: item[1].rank)[:num_top]
        content.append(
            TokenLogprob(
                chosen.decoded_token,
                chosen.logprob,
                list(tokenizer.token_bytes(token_id)),
                [
                    TopLogprob(entry.decoded_token, entry.logprob, list(tokenizer.token_bytes(i)))
                    for i, entry in top
                ],
            )
        )
    return ChatLogprobs(content)


def completion_logprobs(
    token_ids: Sequence[int],
    found: Sequence[Logprobs | None],
    num_top: int,
    first_offset: int,
    tokenizer: Tokenizer,
) -> CompletionLogprobs:
    """Return log probabilities of a completion, or of a prompt that is echoed.

    A prompt's first token has none. Offsets are where each token's own text would begin, if the
    texts were put one after the other from `first_offset` on.
    """
    answer = CompletionLogprobs([], [], [], [])
    offset = first_offset
    for token_id, logprobs in zip(token_ids, found, strict=True):
        if logprobs is None:
            token = tokenizer.decode([token_id], skip_special_tokens=False)
            answer.token_logprobs.append(None)
            answer.top_logprobs.append(None)
        else:
            token = logprobs[token_id].decoded_token
            answer.token_logprobs.append(logprobs[token_id].logprob)
            answer.top_logprobs.append(_top(logprobs, num_top))
        answer.tokens.append(token)
        answer.text_offset.append(offset)
        offset += len(token)
    return answer


def prompt_logprobs(found: Sequence[Logprobs | None]) -> PromptLogprobs:
    """Return log probabilities of a prompt as vLLM spells them: by token id."""
    return [
        None
        if logprobs is None
        else {
            str(token_id): PromptLogprob(entry.logprob, entry.rank, entry.decoded_token)
            for token_id, entry in logprobs.items()
        }
        for logprobs in found
    ]


def _top(logprobs: Logprobs, num_top: int) -> dict[str, float]:
    """The most likely tokens, and the one that stands there; of equal texts, the likelier one."""
    best: dict[str, float] = {}
    ranked: list[Logprob] = sorted(logprobs.values(), key=lambda entry: entry.rank)
    if num_top == 0:
        return best
    for entry in ranked:
        best.setdefault(entry.decoded_token, entry.logprob)
    return best
