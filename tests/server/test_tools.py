"""Tool calls in text, in each form that models write them in.

Guards: a call is shown as text, or text as a call; arguments come out other than they were written;
it matters where the output was cut into pieces.
"""

from __future__ import annotations

import json

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("msgspec")

from hypothesis import given
from hypothesis import strategies as st

from kvist.server.tools import FORMATS, REQUIRED, CallDelta, ToolParser, format_of

F = {"city": "Malmö", "text": 'a "b" {c} \\ [d]', "nested": {"x": [1, {"y": None}]}}
G = {"n": 1}


def read(form, pieces, **options):
    """Return text and calls; the calls' pieces are put together as a client would."""
    parser = ToolParser(form, ("f", "g"), **options)
    texts, calls = [], []
    for piece in [p for text in pieces for p in parser.push(text)] + parser.flush():
        match piece:
            case str():
                texts.append(piece)
            case CallDelta(index, arguments, call_id, name) if name is not None:
                assert (index, bool(call_id)) == (len(calls), True)
                calls.append([name, arguments])
            case CallDelta(index, arguments):
                calls[index][1] += arguments
    assert parser.num_calls == len(calls)
    return "".join(texts), [(name, json.loads(arguments)) for name, arguments in calls]


def call(name, arguments, key="arguments"):
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


TOOL_CALL_G = f"<tool_call>\n{call('g', G)}\n</tool_call>"
HERMES, LLAMA, MISTRAL = FORMATS["hermes"], FORMATS["llama3_json"], FORMATS["mistral"]
CASES = [
    (HERMES, f"<tool_call>\n{call('f', F)}\n</tool_call>", "", [("f", F)]),
    (
        HERMES,
        f"Let me see.\n<tool_call>{call('f', F)}</tool_call>\n{TOOL_CALL_G}\n",
        "Let me see.",
        [("f", F), ("g", G)],
    ),
    (HERMES, f"<tool_call>{call('f', F)}</tool_call> done", " done", [("f", F)]),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
    # The name last; arguments as JSON in JSON; more keys; a name that is no tool's.
    (
        HERMES,
        '<tool_call>{"arguments": {"n": 1}, "id": 7, "x": [true], "name": "g"}</tool_call>',
        "",
        [("g", G)],
    ),
    (HERMES, f"<tool_call>{call('g', json.dumps(G))}</tool_call>", "", [("g", G)]),
    (HERMES, f"<tool_call>{call('other', G)}</tool_call>", "", [("other", G)]),
    (LLAMA, call("f", F, "parameters"), "", [("f", F)]),
    (
        LLAMA,
        f"<|python_tag|>{call('f', F, 'parameters')}; {call('g', G, 'parameters')}",
        "",
        [("f", F), ("g", G)],
    ),
    (MISTRAL, f"[TOOL_CALLS][{call('f', F)}, {call('g', G)}]", "", [("f", F), ("g", G)]),
    (MISTRAL, f"Well [TOOL_CALLS] [ {call('g', G)} ]", "Well", [("g", G)]),
    (
        MISTRAL,
        f"[TOOL_CALLS]f{json.dumps(F)}[TOOL_CALLS]g[ARGS]{json.dumps(G)}",
        "",
        [("f", F), ("g", G)],
    ),
    (MISTRAL, f"[TOOL_CALLS]g[CALL_ID]a1b2c3d4e[ARGS]{json.dumps(G)}", "", [("g", G)]),
    (
        REQUIRED,
        f"[{call('f', F, 'parameters')}, {call('g', G, 'parameters')}]",
        "",
        [("f", F), ("g", G)],
    ),
]
TEXTS = [
    (HERMES, "No call here: <tool, <tool_cal"),
    (HERMES, "<tool_call>never mind"),
    (HERMES, '<tool_call>{"nam'),
    (HERMES, '<tool_call>{"name": 3}</tool_call>'),
    (HERMES, "  \n "),
    (LLAMA, "Hello {there}"),
    (LLAMA, '{"city": "Lund", "name": "x"}'),
    (LLAMA, call("unknown", G, "parameters")),
    (LLAMA, "[1] a reference"),
    (MISTRAL, "[TOOL_CALLS"),
    (MISTRAL, "[TOOL] [T"),
]


@pytest.mark.parametrize(("form", "output", "text", "calls"), CASES)
def test_calls_are_found(form, output, text, calls):
    assert read(form, [output]) == (text, calls)
    assert read(form, output) == (text, calls), "letter by letter"


@pytest.mark.parametrize(("form", "output"), TEXTS)
def test_what_is_no_call_is_text(form, output):
    assert read(form, [output]) == (output, [])
    assert read(form, output) == (output, [])


@given(st.data())
def test_where_an_output_is_cut_does_not_show(data):
    parts = [output for _, output, *_ in CASES] + [output for _, output in TEXTS]
    output = "".join(data.draw(st.lists(st.sampled_from(parts) | st.text('ab<[{" \n'), max_size=4)))
    form = data.draw(st.sampled_from([*FORMATS.values(), REQUIRED]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(output)), max_size=6)))
    pieces = [output[a:b] for a, b in zip([0, *cuts], [*cuts, len(output)], strict=True)]

    def raw(pieces):
        parser = ToolParser(form, ("f", "g"))
        found = [p for text in pieces for p in parser.push(text)] + parser.flush()
        told: dict[object, str] = {}
        for piece in found:
            if isinstance(piece, str):
                told["text"] = told.get("text", "") + piece
            else:
                told[piece.index] = told.get(piece.index, "") + (piece.name or "") + piece.arguments
        return told

    assert raw(pieces) == raw([output])


def test_arguments_come_while_they_are_written():
    parser = ToolParser(HERMES, ("f",))
    (head,) = parser.push('<tool_call>{"name": "f", "arguments": {"a": ')
    assert (head.name, head.arguments) == ("f", '{"a": ')
    (more,) = parser.push("1")
    assert (more.name, more.arguments) == (None, "1")


def test_a_call_that_is_cut_off_stays_so():
    parser = ToolParser(HERMES, ("f",))
    pieces = parser.push('<tool_call>{"name": "f", "arguments": {"a": 1') + parser.flush()
    assert [(p.name, p.arguments) for p in pieces] == [("f", '{"a": 1')]


def test_only_one_call_where_only_one_is_wanted():
    output = f"<tool_call>{call('f', F)}</tool_call><tool_call>{call('g', G)}</tool_call>"
    assert read(HERMES, [output], several=False) == ("", [("f", F)])


def test_ids_of_mistral_are_what_its_templates_take():
    parser = ToolParser(MISTRAL, ("f",))
    call_id = parser.push("[TOOL_CALLS]f{}")[0].id
    assert len(call_id) == 9
    assert call_id.isalnum()


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ messages }}", None),
        (None, None),
        ("{% for tool in tools %}<tool_call>", "hermes"),
        ("{% if tools %}[AVAILABLE_TOOLS]…[TOOL_CALLS]", "mistral"),
        ('{% if tools %}{"name": function name, "parameters": …}<|python_tag|>', "llama3_json"),
    ],
)
def test_the_template_tells_the_form(template, form):
    assert format_of(template) == form
