"""Pages: they need nothing from elsewhere, run nothing that they are given, and say the numbers."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET

import pytest
from typer.testing import CliRunner

from kvist.cli import app
from kvist.lab.bench.result import BenchResult, Column, Spread, Table
from kvist.lab.pages.bench import add_bench
from kvist.lab.pages.page import Page
from kvist.lab.pages.svg import Line, line_chart, stacked_bar

RESULT = BenchResult(
    "prefix",
    "How much sooner?",
    {"tokens": 2048},
    (
        Table(
            "shared",
            "prompts",
            (Column("shared", "shared"), Column("ttft_s", "first token, ms", scale=1000.0)),
            (
                {"shared": "0 %", "ttft_s": Spread(0.5, 0.25, 0.75, 3)},
                {"shared": "100 %", "ttft_s": Spread(0.125, 0.125, 0.125, 1)},
                {"shared": "<b>none</b>"},
            ),
        ),
    ),
    ("It is <script>faster</script>.",),
    False,
    {"cpu": "one", "versions": {"kvist": "1"}},
)


def run(*arguments: str):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_result_of_a_benchmark_is_shown_in_the_units_of_its_titles():
    page = Page("title & more")
    add_bench(page, json.loads(json.dumps(RESULT.to_dict())))
    html = page.html()
    assert "title &amp; more" in html
    assert ">500<small>250 – 750, 3 times</small>" in html
    assert ">125</td>" in html
    assert "first token, ms" in html
    assert "was stopped" in html
    assert "&lt;script&gt;faster" in html
    assert "<b>none" not in html
    # Written before columns had scales: the name tells the unit of what stands there.
    old = RESULT.to_dict()
    for column in old["tables"]["shared"]["columns"]:
        del column["scale"]
    page = Page("")
    add_bench(page, old)
    assert "<th>ttft_s</th>" in page.html()
    assert ">0.5<small>0.25 – 0.75, 3 times</small>" in page.html()


def test_a_chart_has_every_point_where_its_axes_say():
    svg = line_chart(
        [Line("a < b", [(1, 1), (2, 2), (4, 4), (0, 9)]), Line("most", [(1, 4), (4, 4)], True)],
        "x",
        "y",
    )
    root = ET.fromstring(svg)
    lines = [
        [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        for line in root.iter("polyline")
    ]
    (x1, y1), (x2, y2), (x3, y3) = lines[0]
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2)
    assert y1 - y2 == pytest.approx(y2 - y3, abs=0.2)
    assert lines[1][-1] == lines[0][-1]
    texts = [text.text for text in root.iter("text")]
    assert "a < b" in texts
    assert {"1", "2", "4"} <= set(texts)
    assert line_chart([Line("nothing", [(1, 0)])], "x", "y") == ""
    assert ET.fromstring(line_chart([Line("one", [(8, 8)])], "x", "y")) is not None


def test_a_bar_shows_what_is_beyond_its_budget():
    root = ET.fromstring(stacked_bar([("weights", 60.0), ("KV", 60.0)], 100.0, "{:g}".format))
    pieces = [rect for rect in root.iter("rect") if rect.get("height") == "26"]
    widths = [float(rect.get("width")) for rect in pieces]
    assert widths[0] == pytest.approx(widths[1], abs=0.2)
    assert widths[2] == pytest.approx(sum(widths[:2]) * 100 / 120, abs=0.5)
    assert stacked_bar([], None, str) == ""


def test_a_report_has_plan_bench_and_findings_and_needs_nothing_else(tmp_path):
    bench, sick, out = tmp_path / "b.json", tmp_path / "metrics.txt", tmp_path / "report.html"
    bench.write_text(json.dumps(RESULT.to_dict()))
    sick.write_text("vllm:num_preemptions_total 50\nvllm:request_success_total 30\n")
    given = ("--plan", "llama-3.1-8b", "--memory", "80GiB", "--bench", bench, "--doctor", sick)
    shown = run("report", "--out", out, *given)
    assert shown.exit_code == 0, shown.output
    html = out.read_text()
    for word in ("llama-3.1-8b", "16 GiB", "How much sooner?", "thrown out and computed again"):
        assert word in html
    assert html.count("<svg") >= 4
    for elsewhere in ("http://", "https://", "<script", "@import", "url(", "src="):
        assert elsewhere not in html
    for svg in re.findall(r"<svg.*?</svg>", html):
        ET.fromstring(svg)


def test_a_plan_is_drawn_for_each_model(tmp_path):
    out = tmp_path / "plan.html"
    shown = run("plan", "llama-3.1-70b", "gemma-3-27b", "--memory", "80GiB", "--html", out)
    assert shown.exit_code == 1  # one of them does not fit, and the page says so
    assert "does NOT fit" in out.read_text()
    assert out.read_text().count("<h2>") == 2
    assert run("plan", "llama-3.1-8b", "--html", tmp_path / "plain.html").exit_code == 0


def test_what_cannot_be_reported_is_misuse(tmp_path):
    out, other, cut = tmp_path / "r.html", tmp_path / "other.json", tmp_path / "cut.json"
    other.write_text('{"schema": "kvist.plan.v1"}')
    cut.write_text(json.dumps(RESULT.to_dict())[:200])
    bad = tmp_path / "bad.json"
    bad.write_text(
        '{"schema": "kvist.bench.v1", "tables": {"t": {"rows": [1], "columns": [{"name": 1}]}}}'
    )
    for given in (
        (),
        ("--bench", other),
        ("--bench", cut),
        ("--bench", bad),
        ("--bench", tmp_path / "none.json"),
        ("--plan", "no-such-model-at-all"),
        ("--plan", "llama-3.1-8b", "--memory", "much"),
        ("--doctor", tmp_path / "none.txt"),
    ):
        shown = run("report", "--out", out, *given)
        assert shown.exit_code == 2, given
        assert len(shown.stderr.strip().splitlines()) == 1
    assert run("report", "--out", tmp_path / "no" / "r.html", "--plan", "gpt-2").exit_code == 2
