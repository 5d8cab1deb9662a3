"""What our own OpenAPI says can be sent, and what it says cannot, against a real server.

Guards: some combination of fields nobody thought of is answered with a 5xx, or with an error of
another shape.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")
schemathesis = pytest.importorskip(
    "schemathesis", reason="schemathesis is not installed; pip install 'kvist[fuzz]'"
)

from hypothesis import HealthCheck, Phase, given, settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def server(serving, tiny):
    # A short context, so that an answer without a limit ends soon.
    flags = ("--max-model-len", "64", "--kv-cache-memory-bytes", "8MiB", "--max-num-seqs", "32")
    with serving(tiny, *flags) as running:
        yield running.ready()


MODES = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]


def statuses_of(operation, mode):
    """Send many cases of one route; return the statuses that came."""
    statuses = set()

    @settings(
        max_examples=100,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        # What hypothesis does besides takes minutes on bodies of this size.
        phases=[Phase.generate],
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case):
        answer = case.call(timeout=60)
        statuses.add(answer.status_code)
        if answer.status_code >= 500:
            assert answer.status_code == 503, answer.text
            assert "retry-after" in answer.headers
        if answer.status_code >= 400 and answer.headers.get("content-type") == ["application/json"]:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    check()
    return statuses


@pytest.mark.parametrize("mode", MODES, ids=[mode.value for mode in MODES])
def test_nothing_that_can_be_sent_makes_the_server_fail(server, mode):
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    seen = {}
    for found in schema.get_all_operations():
        operation = found.ok()
        # A route without options has no wrong ones.
        if mode is MODES[0] or operation.body:
            seen[f"{operation.method.upper()} {operation.path}"] = statuses_of(operation, mode)
    assert server.process.poll() is None
    assert len(seen) >= 4
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert (200 if mode is MODES[0] else 400) in seen[f"POST {path}"], seen
