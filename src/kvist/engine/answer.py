"""The text side of a request: updates in, text and log probabilities out.

Owns, for each continuation, its detokenizer and its stop strings, and the choice of the best of
several. Knows no engine: who feeds it aborts what it says has stopped.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvist.engine.outputs import CompletionOutput, Logprob, Logprobs, RequestOutput
from kvist.engine.sampling import SamplingParams
from kvist.engine.sequence import TokenLogprobs
from kvist.engine.step import Update
from kvist.engine.stop import StopChecker
from kvist.engine.tokenizer import Tokenizer


class Continuation:
    """One continuation as it grows.

    Parameters
    ----------
    output : CompletionOutput
        Filled here.
    params : SamplingParams
    tokenizer : Tokenizer

    Notes
    -----
    A token that stops the text is no part of it, unless ``include_stop_str_in_output``.
    """

    def __init__(
        self, output: CompletionOutput, params: SamplingParams, tokenizer: Tokenizer
    ) -> None:
        self.output = output
        self._params = params
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.stream(params.skip_special_tokens)
        self._stop = StopChecker(params.stop, params.include_stop_str_in_output)
        if params.num_logprobs is not None:
            output.cumulative_logprob = 0.0
        if params.logprobs is not None:
            output.logprobs = []

    def take(self, update: Update) -> bool:
        """Add news; return whether a stop string ended the text although the engine goes on."""
        output = self.output
        if output.finish_reason is not None:
            return False
        logprobs = update.logprobs or (None,) * len(update.token_ids)
        last = len(update.token_ids) - 1
        for i, (token_id, found) in enumerate(zip(update.token_ids, logprobs, strict=True)):
            output.token_ids.append(token_id)
            if found is not None:
                self._add_logprobs(found)
            stops = i == last and update.stop_reason == token_id
            # vLLM's rule: where a stop string stays in the text, so does the token that stops it.
            if not stops or self._params.include_stop_str_in_output:
                self._add(self._detokenizer.push(token_id))
            if self._stop.matched is not None:
                break
        if update.finish_reason is not None and self._stop.matched is None:
            self._add(self._detokenizer.flush())
        if self._stop.matched is not None:
            output.finish_reason, output.stop_reason = "stop", self._stop.matched
            return update.finish_reason is None
        if update.finish_reason is not None:
            output.text += self._stop.flush()
            output.finish_reason, output.stop_reason = update.finish_reason, update.stop_reason
        return False

    def _add_logprobs(self, found: TokenLogprobs) -> None:
        output = self.output
        output.cumulative_logprob = (output.cumulative_logprob or 0.0) + found.logprob
        if output.logprobs is not None:
            output.logprobs.append(spell_logprobs(found, self._tokenizer))

    def _add(self, text: str) -> None:
        early = len(self.output.token_ids) <= self._params.min_tokens
        self.output.text += self._stop.skip(text) if early else self._stop.push(text)


class Answer:
    """A request under way: all its continuations.

    Parameters
    ----------
    output : RequestOutput
        Filled here.
    params : SamplingParams
    tokenizer : Tokenizer
    """

    def __init__(self, output: RequestOutput, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self.output = output
        self._params = params
        self._tokenizer = tokenizer
        output.outputs = [CompletionOutput(index) for index in range(params.num_samples)]
        self._continuations = [Continuation(o, params, tokenizer) for o in output.outputs]

    def take(self, update: Update) -> bool:
        """Add news; return whether its continuation is to be aborted, since its text has ended."""
        output = self.output
        if update.num_cached_tokens:
            output.num_cached_tokens = update.num_cached_tokens
        if update.prompt_logprobs is not None:
            spelled = (spell_logprobs(found, self._tokenizer) for found in update.prompt_logprobs)
            output.prompt_logprobs = [None, *spelled]
        output.exact = output.exact and update.exact
        output.error = output.error or update.error
        stopped = self._continuations[update.index].take(update)
        if update.is_last:
            self._end(update.finish_reason)
        return stopped

    def _end(self, finish_reason: str | None) -> None:
        output = self.output
        for completion in output.outputs:
            # Ended without a word of its own: with the request.
            completion.finish_reason = completion.finish_reason or finish_reason
        output.outputs = best(output.outputs, self._params)
        output.finished = True


def best(outputs: Iterable[CompletionOutput], params: SamplingParams) -> list[CompletionOutput]:
    """Return the ``n`` continuations with the highest log probability a token, renumbered."""
    kept = list(outputs)
    if params.num_samples > params.n:
        kept.sort(key=_mean_logprob, reverse=True)
        del kept[params.n :]
    for index, output in enumerate(kept):
        output.index = index
        if params.logprobs is None and params.num_samples > params.n:
            output.cumulative_logprob = None
    return kept


def _mean_logprob(output: CompletionOutput) -> float:
    if output.cumulative_logprob is None or not output.token_ids:
        return float("-inf")
    return output.cumulative_logprob / len(output.token_ids)


def spell_logprobs(found: TokenLogprobs, tokenizer: Tokenizer) -> Logprobs:
    """Return log probabilities of one position with the text of each token."""

    def spell(token_id: int) -> str:
        return tokenizer.decode([token_id], skip_special_tokens=False)

    logprobs = {found.token_id: Logprob(found.logprob, found.rank, spell(found.token_id))}
    for rank, (token_id, logprob) in enumerate(found.top, 1):
        logprobs.setdefault(token_id, Logprob(logprob, rank, spell(token_id)))
    return logprobs
