"""Output that follows a grammar: whatever a random model would like to say, it parses.

Guards against a mask that is applied too late or to the wrong row, a matcher that moves in a step
that is taken back, or is shared by continuations, and a schema that fails somebody else.
"""

from __future__ import annotations

import json
import re
import time

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("llguidance")

from kvist.engine.grammar import GrammarSpec
from kvist.engine.grammar_compiler import GrammarCompiler, check_grammar
from kvist.engine.grammar_queue import GrammarQueue
from kvist.engine.sampling import SamplingParams
from kvist.engine.sequence import EngineRequest
from kvist.errors import RequestError
from kvist.testing.parity import WatchedEngine

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEMA = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["age", "kind", "tags"],
    "additionalProperties": False,
    # No free white space: a random model would write nothing else.
    "x-guidance": {"whitespace_flexible": False},
}


def fits_schema(text):
    value = json.loads(text)
    assert set(value) == {"age", "kind", "tags"}
    assert isinstance(value["age"], int)
    assert 0 <= value["age"] <= 150
    assert value["kind"] in ("cat", "dog")
    assert len(value["tags"]) <= 3
    assert all(isinstance(tag, bool) for tag in value["tags"])


@pytest.fixture(scope="module")
def watched(tiny_folder):
    return WatchedEngine(
        tiny_folder("qwen2"), 30, max_model_len=256, max_num_seqs=5, max_num_batched_tokens=40
    )


def ask(watched, spec, n=1, **params):
    (output,) = watched.llm.generate(
        ["say something"],
        SamplingParams(**{"max_tokens": 200, "n": n, **params}),
        grammar=spec,
        use_tqdm=False,
    )
    assert watched.num_used_blocks == 0
    return output.outputs


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_a_schema_is_followed_by_every_continuation(watched, temperature):
    spec = GrammarSpec("json_schema", json.dumps(SCHEMA))
    # More than fit side by side: some wait, some are preempted, and keep their place.
    outputs = ask(watched, spec, n=8, temperature=temperature, seed=3)
    for output in outputs:
        assert output.finish_reason == "stop"
        fits_schema(output.text)
    assert (len({output.text for output in outputs}) > 4) is (temperature > 0)


@pytest.mark.parametrize(
    ("spec", "pattern"),
    [
        (GrammarSpec("regex", "[ab]{3}-[0-9]{2,4}"), r"[ab]{3}-[0-9]{2,4}"),
        (GrammarSpec("choice", '["yes", "no", "say \\"no\\""]'), r'yes|no|say "no"'),
        (GrammarSpec("grammar", 'root ::= "x" [0-9] "y"'), r"x[0-9]y"),
        (GrammarSpec("grammar", 'start: "a" (" b")~2'), r"a b b"),
    ],
    ids=str,
)
def test_other_kinds(watched, spec, pattern):
    for output in ask(watched, spec, n=5, seed=1):
        assert re.fullmatch(pattern, output.text)
        assert output.finish_reason == "stop"


def test_a_json_object_is_one_if_it_ends(watched):
    outputs = ask(watched, GrammarSpec("json_object"), n=6, seed=8, logit_bias={90: 5, 92: 12})
    ended = [output for output in outputs if output.finish_reason == "stop"]
    assert ended
    for output in ended:
        assert isinstance(json.loads(output.text), dict)


def test_a_step_that_is_taken_back_leaves_the_matcher_where_it_was(watched):
    request = EngineRequest(
        request_id="g",
        prompt_token_ids=(1, 2, 3),
        params=SamplingParams(max_tokens=50, seed=4),
        grammar=GrammarSpec("json_schema", json.dumps(SCHEMA)),
    )
    watched.engine.add_request(request)
    token_ids = []
    while watched.engine.has_work:
        plan = watched.scheduler.schedule()
        watched.scheduler.rollback(plan)
        for update in watched.engine.step():
            token_ids += update.token_ids
    fits_schema(watched.llm.tokenizer.decode(token_ids))


def test_grammar_and_none_side_by_side(watched):
    prompt = [5, 6, 7]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    (alone,) = watched.llm.generate([prompt], params, use_tqdm=False)
    watched.engine.add_request(
        EngineRequest(
            request_id="g", prompt_token_ids=(1,), grammar=GrammarSpec("regex", "[0-9]{40}")
        )
    )
    (together,) = watched.llm.generate([prompt], params, use_tqdm=False)
    watched.drain()
    assert together.outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (GrammarSpec("json_schema", '{"type": "nothing"}'), "nothing"),
        (GrammarSpec("json_schema", '{"type":'), "json_schema"),
        (GrammarSpec("json_schema", "[]"), "object"),
        (GrammarSpec("regex", "a("), "unclosed|regex"),
        (GrammarSpec("choice", "[]"), "not empty"),
        (GrammarSpec("choice", "[1]"), "texts"),
        (GrammarSpec("grammar", "start: nothing"), "nothing"),
        (GrammarSpec("poem"), "none of"),
        (GrammarSpec("regex", "(abc|def){0,5}" * 3_000), "42000 bytes, it may have 32768"),
    ],
    ids=str,
)
def test_a_wrong_grammar_is_refused_by_name(watched, spec, says):
    with pytest.raises(RequestError, match=f"response_format.*({says})") as caught:
        ask(watched, spec)
    assert caught.value.param == "response_format"
    assert not watched.engine.has_work


def test_what_shows_only_in_the_engine_ends_the_request_and_no_other(watched):
    ends = {}
    specs = {
        "bad": GrammarSpec("regex", "a(", "guided_regex"),
        # Only its first letters show that it has more states than anyone may have.
        "huge": GrammarSpec("regex", "(a{1000}){1000}", "guided_regex"),
        "good": GrammarSpec("regex", "a"),
    }
    for name, spec in specs.items():
        watched.engine.add_request(
            EngineRequest(request_id=name, prompt_token_ids=(1,), grammar=spec)
        )
    while watched.engine.has_work:
        for update in watched.engine.step():
            if update.is_last:
                ends[update.request_id] = (update.finish_reason, update.fault)
                if update.error is not None:
                    assert update.error.startswith("guided_regex: this regex cannot be followed")
    assert ends == {
        "bad": ("error", "request"),
        "huge": ("error", "request"),
        "good": ("stop", None),
    }


def test_an_abort_before_the_grammar_is_there(watched):
    spec = GrammarSpec("regex", "[a-z]{100}")
    watched.engine.add_request(EngineRequest(request_id="g", prompt_token_ids=(1,), grammar=spec))
    with pytest.raises(RequestError, match="in use"):
        watched.engine.add_request(
            EngineRequest(request_id="g", prompt_token_ids=(1,), grammar=spec)
        )
    update = watched.engine.abort_request("g")
    assert update is not None
    assert update.is_last
    assert not watched.engine.has_work


def test_an_anteroom_lets_nobody_wait_behind_another():
    """The second is ready although the first never will be; leaving forgets it."""
    release = []

    def compile_grammar(spec):
        if spec.text == "slow":
            while not release:
                time.sleep(0.001)
        return spec.text

    room = GrammarQueue(compile_grammar)
    room.enter("a", GrammarSpec("regex", "quick"))
    while not (ready := room.ready(1.0)):
        pass
    assert ready == [("a", "quick")]
    room.enter("b", GrammarSpec("regex", "slow"))
    assert room.ready(0.01) == []
    assert "b" in room
    assert room.leave("b")
    assert not room.leave("b")
    assert len(room) == 0
    release.append(True)


def test_a_matcher_and_its_fork_go_their_own_ways(tiny_folder):
    matcher = GrammarCompiler(tiny_folder("qwen2"), 261).compile(GrammarSpec("regex", "ab|ac"))
    tokens = {letter: 64 + i for i, letter in enumerate("abc")}  # this tokenizer's ids
    before = matcher.mask()
    assert before == matcher.mask()
    other = matcher.fork()
    assert other.advance(tokens["a"])
    assert matcher.mask() == before != other.mask()
    assert not other.is_done
    assert other.advance(tokens["c"])
    assert other.is_done
    assert not matcher.advance(tokens["b"])


def test_checking_needs_no_model():
    check_grammar(GrammarSpec("json_schema", json.dumps(SCHEMA)))
    check_grammar(GrammarSpec("json_object"))


@pytest.mark.slow
def test_smollm2_follows_a_schema(smollm2_folder):
    watched = WatchedEngine(
        smollm2_folder, 200, dtype="bfloat16", max_model_len=512, max_num_batched_tokens=128
    )
    outputs = ask(watched, GrammarSpec("json_schema", json.dumps(SCHEMA)), n=3, seed=1)
    for output in outputs:
        fits_schema(output.text)
