"""The benchmarks over an engine without a model, in virtual time: every number is exact.

A step costs 10 ms and half a millisecond a token, so what each benchmark claims can be computed by
hand; a bench that compared the wrong things, or lost what was measured, would show here.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvist.cli import app
from kvist.engine.sequence import TokenLogprobs
from kvist.lab.bench.agents import AgentsBench, AgentsWorkload
from kvist.lab.bench.block_size import BlockSizeBench, BlockSizeWorkload
from kvist.lab.bench.cache import CacheBench, CacheWorkload
from kvist.lab.bench.context import ContextBench, ContextWorkload
from kvist.lab.bench.host import Host, Session, Timeline, null_host
from kvist.lab.bench.ladder import LadderBench, LadderWorkload
from kvist.lab.bench.paging import PagingBench
from kvist.lab.bench.policies import PoliciesBench
from kvist.lab.bench.pollution import PollutionBench, PollutionWorkload
from kvist.lab.bench.prefix import PrefixBench, PrefixWorkload
from kvist.lab.bench.result import Bench, BenchResult, Samples, Spread, run_bench
from kvist.lab.bench.schedule import ScheduleBench, ScheduleWorkload
from kvist.lab.bench.view import to_markdown
from kvist.lab.flood import FloodWorkload
from kvist.lab.paging import PagingWorkload
from kvist.lab.report import environment
from kvist.lab.simulate.locked import replay_locked
from kvist.lab.simulate.recording import read_recording

STEP_S, TOKEN_S = 0.01, 0.0005  # what `null_host` takes


def run(bench: Bench) -> BenchResult:
    return run_bench(bench, lambda share, what: None, environment)


def rows(result: BenchResult, table: str) -> list[dict]:
    return result.to_dict()["tables"][table]["rows"]


def by(found: list[dict], key: str) -> dict:
    return {row[key]: row for row in found}


def test_cache_times_a_token_against_its_whole_context():
    bench = CacheBench(null_host(64, 16, 1024), CacheWorkload(contexts=(64, 512, 2048), tokens=4))
    found = by(rows(run(bench), "tokens"), "context_tokens")
    assert sorted(found) == [64, 512]  # 2048 is more than its window
    assert found[512]["cached_s"]["median"] == pytest.approx(STEP_S + TOKEN_S)
    # The fifth token computes 512 + 4 tokens, the second 512 + 1.
    assert found[512]["recomputed_s"]["min"] == pytest.approx(STEP_S + 513 * TOKEN_S)
    assert found[512]["recomputed_s"]["max"] == pytest.approx(STEP_S + 516 * TOKEN_S)
    assert found[512]["recomputed_s"]["repeats"] == 4
    assert found[512]["same_tokens"] == "5 of 5"


def test_where_cache_and_no_cache_part_the_lead_says_whether_it_was_a_tie(monkeypatch):
    def line(third: int, lead: float) -> Timeline:
        made = Timeline(0.0, [0.0, 1.0, 2.0], [7, 8, third])
        made.logprobs = [
            TokenLogprobs(token, -0.5 - lead, 1, ((token, -0.5), (1, -0.5 - lead)))
            for token in made.token_ids
        ]
        return made

    lines = iter([line(9, 0.25), line(5, 0.5)])
    monkeypatch.setattr(Session, "one", lambda *args, **options: next(lines))
    monkeypatch.setattr(Host, "warm_up", lambda self: None)
    bench = CacheBench(null_host(64, 16, 1024), CacheWorkload(contexts=(64,), tokens=2))
    result = run(bench)
    (row,) = rows(result, "tokens")
    assert row["same_tokens"] == "2 of 3"
    assert row["lead_nats"] == 0.5
    assert row["apart_nats"] == 0.25
    assert "0.500 nats" in result.facts[-1]


def test_sessions_are_recorded_each_by_itself_and_replay_to_the_same_hits(tmp_path):
    host = null_host(512, 16, 1024)
    host.record = tmp_path / "run.jsonl"
    found = rows(run(PrefixBench(host, PrefixWorkload(tokens=256, repeats=2))), "shared")
    host.close()
    # With prefix caching, and without; the warm-up is nobody's workload.
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run-2.jsonl", "run.jsonl"]
    replays = [replay_locked(read_recording(tmp_path / n)) for n in ("run.jsonl", "run-2.jsonl")]
    assert [replay.num_different for replay in replays] == [0, 0]
    assert replays[0].num_hit_tokens == 2 * sum(row["cached_tokens"] for row in found)
    assert replays[1].num_hit_tokens == 0


def test_prefix_counts_what_was_shared_and_the_price_of_nothing():
    work = PrefixWorkload(tokens=256, shares=(0, 50, 100), batch=2, batch_prompt=64, repeats=2)
    result = run(PrefixBench(null_host(512, 16, 1024), work))
    found = by(rows(result, "shared"), "shared")
    assert [found[s]["cached_tokens"] for s in ("0 %", "50 %", "100 %")] == [0, 128, 240]
    assert found["50 %"]["ttft_s"]["median"] == pytest.approx(STEP_S + 128 * TOKEN_S)
    assert any("first token takes +0.0%" in fact for fact in result.facts)


def test_streams_that_take_many_steps_to_be_read_fit_all_the_same():
    work = ContextWorkload(contexts=(64,), tokens=2, streams=8, slots=16_384)
    result = run(ContextBench(null_host(1024, 16, 4096), work))
    found = by(rows(result, "load"), "context_tokens")
    # 8 x 1,024 tokens are four steps: longer than the first of them talk.
    assert [n for n, row in found.items() if row["side_by_side"] == 8][:1] == [1024]
    assert "up to 1,920 tokens each" in result.facts[0]


def test_context_finds_where_the_streams_no_longer_fit():
    work = ContextWorkload(contexts=(64, 128), tokens=4, streams=4, slots=2048, step=64)
    result = run(ContextBench(null_host(128, 16, 1024), work))
    found = by(rows(result, "load"), "context_tokens")
    fits = [context for context, row in found.items() if row["side_by_side"] == 4]
    # 4 × 512 would fill the pool; the watermark of 5 % and the tokens to come do not let that be.
    assert max(fits) == 448
    assert found[512]["side_by_side"] < 4
    assert "up to 448 tokens each" in result.facts[0]


def test_schedule_shows_the_gap_that_a_long_prompt_makes():
    work = ScheduleWorkload(
        streams=4, stream_prompt=16, stream_output=40, long_prompt=1024, chunk=64, repeats=1
    )
    result = run(ScheduleBench(null_host(512, 16, 2048), work))
    found = by(rows(result, "modes"), "mode")
    gap = {mode: row["gap_longest_s"]["median"] for mode, row in found.items()}
    assert gap["continuous"] == pytest.approx(STEP_S + (1024 + 4) * TOKEN_S)
    assert gap["chunked"] == pytest.approx(STEP_S + 64 * TOKEN_S)
    assert gap["static"] == pytest.approx(STEP_S + 4 * TOKEN_S)
    assert gap["preset throughput"] == pytest.approx(gap["continuous"])
    assert gap["chunked"] < gap["preset latency"] < gap["continuous"]
    late = {mode: row["long_ttft_s"]["median"] for mode, row in found.items()}
    assert late["static"] > late["continuous"]


def test_agents_find_again_what_they_said():
    work = AgentsWorkload(
        agents=2, kinds=1, static=128, turns=3, tool_answer=32, said=8, branch_every=2, branches=2,
        repeats=1,
    )  # fmt: skip
    result = run(AgentsBench(null_host(256, 16, 1024), work))
    turns = by(rows(result, "turns"), "turn")
    assert [turns[turn]["context_tokens"] for turn in (1, 2, 3)] == [160, 200, 240]
    assert turns[3]["cached_share"]["min"] > 0.75
    assert turns[3]["reused_ttft_s"]["median"] < turns[3]["computed_ttft_s"]["median"]
    runs = by(rows(result, "runs"), "mode")
    assert runs["off"]["read_tokens"]["median"] == 2 * (160 + 200 + 240)
    assert runs["on"]["wall_s"]["median"] < runs["off"]["wall_s"]["median"]


def test_every_rung_of_the_ladder_is_above_the_one_before():
    work = LadderWorkload(
        documents=4, document=128, question=16, answer=8, requests=16, clients=4, slots=1024,
        max_model_len=512, no_cache_requests=4, repeats=2,
    )  # fmt: skip
    result = run(LadderBench(null_host(64, 16, 1024), None, work))
    found = rows(result, "rungs")
    assert [row["rung"] for row in found] == ["no cache", "KV cache", "paged", "prefix"]
    assert all(row["step_up"] > 1 for row in found[1:])
    assert [row["requests"] for row in found] == [4, 16, 16, 16]
    assert found[1]["side_by_side"]["median"] <= 2 < found[2]["side_by_side"]["median"]
    assert found[2]["cached_share"]["max"] == 0 < found[3]["cached_share"]["min"]


def test_smaller_blocks_waste_less_and_find_more():
    work = BlockSizeWorkload(sizes=(8, 64), requests=8)
    found = by(rows(run(BlockSizeBench(None, work)), "sizes"), "block_tokens")
    assert found[8]["utilization"] > found[64]["utilization"]
    assert 1 > found[8]["hit"] > found[64]["hit"] > 0


def test_protection_keeps_what_a_flood_takes_from_lru():
    flood = FloodWorkload(num_hot_requests=80, capacity=512, num_prefixes=8)
    work = PollutionWorkload(policies=("lru",), flood=flood)
    (row,) = rows(run(PollutionBench(work)), "policies")
    assert row["kept"] < 0.9 < row["kept_protected"]


def test_paging_has_books_and_speed_of_every_mode():
    work = PagingWorkload(num_requests=32, longest=512, slots=4096)
    host = null_host(work.num_blocks, work.block_size, 4096)
    result = run(PagingBench(host, work, seconds=0.2))
    found = by(rows(result, "modes"), "mode")
    assert list(found) == ["reserve", "reserve_longest", "paged"]
    assert found["paged"]["concurrency"] > 3 * found["reserve"]["concurrency"]
    assert all(row["tokens_per_s"] > 0 for row in found.values())
    assert result.facts[0].startswith("Paged over reserve: ")
    told = result.to_dict()
    for mode in ("reserve", "reserve_longest", "paged", "ratio"):
        assert all(told[mode][name] > 0 for name in ("utilization", "concurrency", "tokens_per_s"))
    assert told["ratio"]["concurrency"] > 3
    books = run(PagingBench(None, work, seconds=0.2)).to_dict()
    assert books["paged"]["tokens_per_s"] is None


def test_policies_have_a_table_for_each_trace_and_one_for_all():
    hot = [[1, 2], [3], [1, 2], [4], [1, 2], [5]] * 20
    result = run(PoliciesBench({"one": hot, "two": hot[:60]}, ["lru", "arc"]))
    tables = result.to_dict()["tables"]
    assert list(tables) == ["one", "two", "summary"]
    assert [row["policy"] for row in tables["one"]["rows"]] == ["lru", "arc", "farthest next use"]
    assert {row["hits_10_vs_lru"] for row in tables["one"]["rows"][:1]} == {1.0}
    assert {row["policy"] for row in tables["summary"]["rows"]} == {"lru", "arc"}


class _Stopped:
    """Somebody presses Ctrl-C in the second of three rows."""

    name, question, workload = "stopped", "What is kept?", {}

    def __init__(self) -> None:
        self.samples = Samples()

    def measure(self, tell) -> None:
        for row in ("a", "b", "c"):
            self.samples.note(row, "x", 1.0)
            if row == "b":
                raise KeyboardInterrupt
            self.samples.note(row, "x", 3.0)

    def tables(self):
        from kvist.lab.bench.result import Chart, Column, Table

        chart = Chart("x", "row", ("x",), "s", bars=True)
        columns = (Column("row", "row"), Column("x", "x, s", 1))
        return (Table("t", "rows", columns, self.samples.rows("row"), (chart,)),)

    def facts(self):
        return ()


def test_what_was_measured_before_ctrl_c_is_kept_and_marked():
    result = run(_Stopped())
    assert result.to_dict()["complete"] is False
    assert [row["x"] for row in rows(result, "t")] == [
        Spread(2.0, 1.0, 3.0, 2).to_dict(),
        Spread(1.0, 1.0, 1.0, 1).to_dict(),
    ]
    shown = to_markdown(result)
    assert "Stopped before the end" in shown
    assert "| a | 2.0 (1.0–3.0) |" in shown
    assert "| b | 1.0 |" in shown


def test_a_picture_is_drawn_of_lines_and_of_bars(tmp_path: Path):
    pytest.importorskip("matplotlib")
    from kvist.lab.bench.plots import write_png

    for number, result in enumerate(
        (
            run(_Stopped()),
            run(CacheBench(null_host(64, 16, 1024), CacheWorkload(contexts=(64, 128), tokens=2))),
        )
    ):
        path = tmp_path / f"{number}.png"
        write_png(result, path)
        assert path.read_bytes().startswith(b"\x89PNG")


def test_json_stands_alone_or_names_its_file(tmp_path: Path):
    bench = ["bench", "block-size", "--no-model", "--sizes", "16,32"]
    alone = CliRunner().invoke(app, [*bench, "--json"])
    assert alone.exit_code == 0, alone.output
    printed = json.loads(alone.stdout)
    assert printed["schema"] == "kvist.bench.v1"
    assert printed["complete"] is True
    path = tmp_path / "found.json"
    filed = CliRunner().invoke(app, [*bench, "--json", str(path)])
    assert filed.exit_code == 0, filed.output
    assert json.loads(path.read_text())["tables"] == printed["tables"]


@pytest.mark.parametrize(
    "args", [["--sizes", "8,x"], ["--sizes", "0"], ["--markdown", "no/such/folder/x.md"]]
)
def test_misuse_is_one_line_before_anything_is_measured(args: list[str]):
    found = CliRunner().invoke(app, ["bench", "block-size", "--no-model", *args])
    assert found.exit_code == 2
    assert len(found.stderr.strip().splitlines()) == 1


def test_a_wide_table_is_cut_in_two_at_a_terminal():
    from io import StringIO

    from rich.console import Console

    from kvist.lab.bench.result import Column, Table
    from kvist.lab.bench.view import show

    columns = tuple(Column(f"c{n}", f"c{n}") for n in range(10))
    table = Table("t", "wide", columns, ({"c0": "name", **{f"c{n}": n for n in range(1, 10)}},))
    text = StringIO()
    show(BenchResult("b", "?", {}, (table,), (), True, {}), Console(file=text, width=80))
    assert text.getvalue().count("name") == 2
    assert text.getvalue().count("b: wide") == 2
