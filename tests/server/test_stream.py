"""Updates between the engine's pace and the client's.

Guards: a slow reader of several continuations loses tokens, log probabilities or an end, or gets
them mixed up; what is not read grows by more than the output itself.
"""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("msgspec")

from kvist.engine.sequence import TokenLogprobs
from kvist.engine.step import Update
from kvist.server.stream import RequestStream


def read(stream):
    async def main():
        return [update async for update in stream]

    return asyncio.run(main())


def logprobs(*token_ids):
    return tuple(TokenLogprobs(token_id, -1.0, 1) for token_id in token_ids)


def test_unread_news_are_merged_by_continuation_and_the_last_is_read_last():
    stream = RequestStream("a", lambda *what: None)
    stream.push(Update("a", (1,), index=0, logprobs=logprobs(1), prompt_logprobs=logprobs(9)))
    stream.push(Update("a", (2,), index=1, logprobs=logprobs(2)))
    stream.push(Update("a", (3, 4), index=0, logprobs=logprobs(3, 4)))
    stream.push(Update("a", (5,), "stop", 5, index=1, logprobs=logprobs(5)))
    stream.push(Update("a", (6,), "length", index=0, is_last=True, logprobs=logprobs(6)))
    stream.push(Update("a", (7,), index=0))
    one, zero = read(stream)
    assert (one.index, one.token_ids, one.finish_reason, one.stop_reason) == (1, (2, 5), "stop", 5)
    assert (zero.index, zero.token_ids, zero.is_last) == (0, (1, 3, 4, 6), True)
    assert zero.logprobs == logprobs(1, 3, 4, 6)
    assert zero.prompt_logprobs == logprobs(9)


def test_a_continuation_that_ends_does_not_end_the_stream():
    aborted = []
    stream = RequestStream("a", lambda *what: aborted.append(what))
    stream.push(Update("a", (1,), "stop", 1, index=0))
    assert not stream.is_over
    stream.abort(1)
    assert aborted == [("a", 1)]
    assert not stream.is_over
    stream.push(Update("a", (), "abort", index=1, is_last=True))
    assert [(u.index, u.finish_reason) for u in read(stream)] == [(0, "stop"), (1, "abort")]
