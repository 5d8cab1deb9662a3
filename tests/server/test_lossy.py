"""What the answer says where K and V were read that a lossy codec brought back.

Guards: the wish does not reach the engine; nobody is told; those who read nothing lossy are.
"""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("msgspec")

CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
TEXT = ("/v1/completions", {"prompt": "hi"})


@pytest.mark.parametrize(("path", "body"), [CHAT, TEXT])
def test_an_answer_says_that_it_is_not_exact(wire, path, body):
    client = wire.ScriptedClient(wire.news("a", exact=False), wire.news("b", "length"))
    answer, _ = wire.talk(client, {**body, "allow_lossy": True}, path)
    assert answer.json()["kvist"] == {"exact": False}
    assert client.requests[0].allow_lossy


@pytest.mark.parametrize(("path", "body"), [CHAT, TEXT])
def test_an_exact_answer_says_nothing(wire, path, body):
    client = wire.ScriptedClient(wire.news("a", "length"))
    answer, _ = wire.talk(client, body, path)
    assert "kvist" not in answer.json()
    assert not client.requests[0].allow_lossy


@pytest.mark.parametrize(("path", "body"), [CHAT, TEXT])
def test_a_stream_says_it_first_and_last_even_if_it_became_so_on_the_way(wire, path, body):
    client = wire.ScriptedClient(wire.news("a"), wire.news("b", "length", exact=False))
    events = wire.events_of(wire.talk(client, {**body, "stream": True}, path)[0])
    assert events[-1]["kvist"] == {"exact": False}
    client = wire.ScriptedClient(wire.news("a", exact=False), wire.news("b", "length"))
    events = wire.events_of(wire.talk(client, {**body, "stream": True}, path)[0])
    assert events[0]["kvist"] == events[-1]["kvist"] == {"exact": False}
