"""`kvist simulate`: real books in virtual time, against what can be worked out by hand.

Guards: a clock that forgets waiting, hits that are counted twice or for the wrong tier, a fit that
a disturbed step spoils, an allocator whose holes do not add up, bad input without a clear line.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict

import pytest
from typer.testing import CliRunner

from kvist.cli import app
from kvist.config import CacheConfig, EngineConfig, SchedulerConfig
from kvist.errors import ConfigError
from kvist.lab.simulate.books import Machine
from kvist.lab.simulate.contiguous import FITS, Regions, Tenancy, replay_contiguous
from kvist.lab.simulate.curve import compare_policies, miss_ratio_curve
from kvist.lab.simulate.reading import read_workload
from kvist.lab.simulate.recording import StepRow
from kvist.lab.simulate.script import Numbers
from kvist.lab.simulate.tier import make_tiers
from kvist.lab.simulate.timing import StepTiming, read_timing
from kvist.lab.simulate.virtual import simulate
from kvist.lab.simulate.workload import SimRequest, Workload

SIZE = 4


def machine(num_blocks=64, max_model_len=64, tiers=(), **options):
    return Machine(
        model="m",
        kv_format="bf16",
        block_bytes=1024,
        cache=CacheConfig(num_blocks=num_blocks, block_size=SIZE),
        scheduler=SchedulerConfig(
            max_model_len=max_model_len,
            **{"max_num_seqs": 4, "max_num_batched_tokens": 16, "watermark": 0.0, **options},
        ),
        tiers=tuple(tiers),
    )


def workload(*requests):
    """Make a workload of (arrival, blocks of the prompt, tokens of the answer)."""
    made = [
        SimRequest(str(i), at_s, len(blocks) * SIZE + 1, output, tuple(blocks), output)
        for i, (at_s, blocks, output) in enumerate(requests)
    ]
    return Workload("test", SIZE, made, Numbers())


# ---------------------------------------------------------------------- time


def test_times_are_those_of_the_steps_and_of_the_wait():
    # 9 tokens are read in one step of 1 + 9 × 0.1; each further token takes a step of 1 + 0.5.
    timing = StepTiming(base_s=1.0, decode_s=0.5, read_s=0.1)
    found = simulate(
        workload((10.0, (2, 3), 3), (11.0, (4, 5), 1)), machine(max_num_seqs=1), timing
    )
    first, second = found.lives["0"], found.lives["1"]
    assert first.begun_s == 10.0
    assert first.first_s == pytest.approx(10 + 1.9)
    assert first.end_s == pytest.approx(10 + 1.9 + 2 * 1.5)
    assert second.begun_s == pytest.approx(first.end_s)
    assert second.first_s == second.end_s == pytest.approx(first.end_s + 1.9)
    assert found.span_s == found.busy_s == pytest.approx(1.9 + 3 + 1.9)
    assert found.num_steps == 4
    assert found.is_complete


def test_nothing_runs_before_it_comes():
    found = simulate(workload((0.0, (2,), 1), (100.0, (3,), 1)), machine(), StepTiming(1.0))
    assert found.lives["1"].first_s == 101.0
    assert found.busy_s == 2.0
    assert found.span_s == 101.0


def test_hits_are_the_shared_full_blocks():
    found = simulate(
        workload((0.0, (2, 3, 4), 2), (50.0, (2, 3, 9), 2), (100.0, (7, 3, 4), 2)),
        machine(),
        StepTiming(1.0),
    )
    assert found.tokens_from == {"device": 2 * SIZE}
    assert found.prompt_tokens == 3 * (3 * SIZE + 1)
    assert found.hit_rate == pytest.approx(8 / 39)


def test_a_request_longer_than_is_served_is_left_out_and_counted():
    found = simulate(
        workload((0.0, tuple(range(2, 30)), 1), (1.0, (2,), 1)), machine(), StepTiming(1.0)
    )
    assert found.num_left_out == 1
    assert set(found.lives) == {"1"}


def test_a_small_pool_evicts_and_preempts():
    requests = [(0.0, (10 * i, 10 * i + 1), 20) for i in range(1, 5)]
    found = simulate(workload(*requests), machine(num_blocks=16, max_model_len=40), StepTiming(1.0))
    assert found.num_preempted > 0
    assert found.num_evicted > 0
    assert all(life.num_output == 20 for life in found.lives.values())


def test_what_left_the_device_comes_back_from_the_tier_that_has_it_and_takes_its_time():
    many = [(10.0 * i, tuple(range(100 * i, 100 * i + 8)), 1) for i in range(1, 6)]
    again = (100.0, tuple(range(100, 108)), 1)
    # Eight blocks of 1 KiB take a quarter of a second; computing them takes 100 s a token.
    slow = StepTiming(base_s=0.01, read_s=100.0)
    found = simulate(
        workload(*many, again),
        machine(num_blocks=16, tiers=["host:1MiB"], max_num_batched_tokens=64),
        slow,
        tier_rates={"host": 32 * 1024.0},
    )
    assert found.tokens_from["host"] == 8 * SIZE
    assert found.tokens_from["device"] == 0
    assert found.moved_bytes["host", "up"] == 8 * 1024
    assert found.moved_bytes["host", "down"] >= 40 * 1024
    life = found.lives["5"]
    # Its last token is one run of one: a step of the base alone.
    assert life.first_s - life.begun_s == pytest.approx(0.25 + 0.01, abs=0.001)
    assert found.num_late_blocks == 0


@pytest.mark.parametrize(("ttl", "loaded"), [("", 8), (",ttl=50", 0)])
def test_a_server_has_room_for_everything_until_its_time_is_over(ttl, loaded):
    many = [(5.0 * i, tuple(range(100 * i, 100 * i + 8)), 1) for i in range(1, 12)]
    found = simulate(
        workload(*many, (100.0, tuple(range(100, 108)), 1)),
        machine(num_blocks=16, tiers=[f"redis://nowhere{ttl}"], max_num_batched_tokens=64),
        StepTiming(base_s=0.01, read_s=100.0),
    )
    assert found.tokens_from["remote"] == loaded * SIZE


def test_the_tiers_of_a_recording_are_those_of_its_header():
    header = {
        **asdict(EngineConfig()),
        "model": "m",
        "kv_format": "bf16",
        "block_bytes": 1024,
        "num_blocks": 16,
        "max_model_len": 64,
        "tiers": ["host:1048576", "disk:2097152", "redis:0"],
    }
    tiers = make_tiers(Machine.from_header(header), {}, lambda: 0.0)
    assert [tier.medium for tier in tiers] == ["host", "disk", "remote"]
    assert tiers[1].usage().capacity_bytes == 2 << 20


def test_two_replays_are_the_same():
    draw = random.Random(1)
    requests = [
        (draw.random() * 20, tuple(draw.choices(range(2, 12), k=draw.randrange(1, 6))), 5)
        for _ in range(60)
    ]
    runs = [
        simulate(
            workload(*sorted(requests)), machine(16, tiers=["host:8KiB"]), StepTiming(0.1, 0.01)
        )
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


def test_ctrl_c_keeps_what_was_replayed():
    def stop(done):
        raise KeyboardInterrupt

    requests = [(float(i), (i + 2,), 4) for i in range(500)]
    found = simulate(workload(*requests), machine(), StepTiming(1.0), progress=stop)
    assert not found.is_complete
    assert 0 < len(found.lives) < 500


# ---------------------------------------------------------------------- timing


def rows(timing, n=200, noise=0.0, seed=0):
    draw = random.Random(seed)
    made = []
    for _ in range(n):
        decoded, read = draw.randrange(9), draw.choice((0, 0, 64, 500))
        context, pairs = decoded * draw.randrange(50, 900), read * draw.randrange(100, 900)
        seconds = timing.seconds(decoded, read, context, pairs) * (1 + noise * draw.gauss(0, 1))
        made.append(StepRow(decoded, read, context, pairs, seconds))
    return made


PLANTED = StepTiming(0.02, 0.003, 0.001, 2e-6, 3e-7)


def test_a_fit_finds_what_was_planted():
    found = StepTiming.fit(rows(PLANTED))
    for row in rows(PLANTED, seed=5):
        assert found.of(row) == pytest.approx(row.seconds, rel=0.02)


def test_a_fit_knows_what_one_more_costs_though_nobody_decoded_beside_others():
    # Base and decode are one number in such a recording; from a burst they would be asked apart.
    alone = StepTiming(0.02, 0.001, 0.001)
    made = [StepRow(1, 0, 100, 0, alone.seconds(1, 0, 100, 0)) for _ in range(100)]
    made += [StepRow(0, n, 0, 0, alone.seconds(0, n, 0, 0)) for n in range(20, 200, 10)]
    found = StepTiming.fit(made)
    assert found.seconds(16, 0, 1600, 0) == pytest.approx(0.036, rel=0.05)


def test_a_fit_stands_by_most_steps_when_the_clock_was_low_for_a_third_of_them():
    made = rows(PLANTED)
    low = [
        StepRow(r.decoded, r.read, r.context, r.pairs, r.seconds * (1.8 if i % 3 == 0 else 1))
        for i, r in enumerate(made)
    ]
    found = StepTiming.fit(low)
    for row in rows(PLANTED, seed=5):
        assert found.of(row) == pytest.approx(row.seconds, rel=0.1)


def test_a_fit_is_not_spoiled_by_steps_during_which_others_ran():
    disturbed = rows(PLANTED, noise=0.02)
    for index in range(0, 200, 40):
        row = disturbed[index]
        disturbed[index] = StepRow(row.decoded, row.read, row.context, row.pairs, 4 * row.seconds)
    found = StepTiming.fit(disturbed)
    for row in rows(PLANTED, seed=5):
        assert found.of(row) == pytest.approx(row.seconds, rel=0.1)


def test_a_fit_has_no_seconds_below_zero():
    made = [StepRow(1, 100 * (i % 5), 50 * i, 0, 1.0 - 0.0001 * i) for i in range(60)]
    found = StepTiming.fit(made)
    assert min(found.base_s, found.decode_s, found.read_s, found.context_s, found.pair_s) == 0
    assert found.of(made[0]) == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"speed": 3}', '{"base_s": -1}', '{"base_s": "much"}', "\x00"]
)
def test_what_is_no_timing_is_refused(tmp_path, text):
    path = tmp_path / "timing"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--timing"):
        read_timing(path)


def test_a_timing_may_be_given_in_numbers(tmp_path):
    path = tmp_path / "timing"
    path.write_text('{"base_s": 0.01, "read_s": 0.001}')
    assert read_timing(path) == StepTiming(0.01, read_s=0.001)


# ---------------------------------------------------------------------- curves and memory


def test_the_curve_ends_where_everything_stays():
    draw = random.Random(2)
    chains = [tuple(range(100 * (k := draw.randrange(8)), 100 * k + 10)) for _ in range(200)]
    points = miss_ratio_curve(chains, "lru", 20, 1 << 20)
    assert points[-1].num_blocks == 80
    assert points[-1].hit_rate == pytest.approx((2000 - 80) / 2000)
    assert [p.hit_rate for p in points] == sorted(p.hit_rate for p in points)
    assert points[0].gain_per_gib is None
    assert points[1].gain_per_gib == pytest.approx(
        (points[1].hit_rate - points[0].hit_rate) * 1024 / (points[1].num_blocks - 5)
    )


def test_nobody_beats_who_knows_the_future():
    draw = random.Random(3)
    chains = [tuple(range(100 * (k := draw.randrange(20)), 100 * k + 6)) for _ in range(300)]
    points = compare_policies(chains, ["all"], 40)
    *others, best = points
    assert best.policy == "belady"
    assert len(others) == 6
    assert all(point.hit_rate <= best.hit_rate for point in others)
    with pytest.raises(ConfigError, match="fifo"):
        compare_policies(chains, ["fifo"], 40)


@pytest.mark.parametrize("fit", FITS)
def test_regions_never_overlap_and_holes_grow_together(fit):
    draw = random.Random(fit)
    regions, taken = Regions(100, fit), {}
    for _ in range(3000):
        if taken and draw.random() < 0.5:
            start = draw.choice(list(taken))
            regions.give(start, taken.pop(start))
        elif (start := regions.take(size := draw.randrange(1, 25))) is not None:
            taken[start] = size
        else:
            assert all(length < size for _, length in regions.holes)
        owners = [None] * 100
        for start, size in (*taken.items(), *regions.holes):
            assert owners[start : start + size] == [None] * size
            owners[start : start + size] = [start] * size
        assert None not in owners
        assert regions.num_free == 100 - sum(taken.values())
        ends = [sum(hole) for hole in regions.holes]
        assert not {start for start, _ in regions.holes} & set(ends), "neighbours grow together"


def test_best_fit_takes_the_smallest_hole_and_first_fit_the_lowest():
    for fit, expected in (("first", 0), ("best", 50)):
        regions = Regions(100, fit)
        starts = [regions.take(size) for size in (30, 20, 10, 40)]
        assert starts == [0, 30, 50, 60]
        regions.give(0, 30)
        regions.give(50, 10)
        assert regions.take(10) == expected


def test_holes_block_a_request_that_would_fit():
    # 4 + 4 + 4 of 12; the outer ones end at once, and 8 in a row are not free until the third does.
    found = replay_contiguous(
        [Tenancy(0, 10, 4), Tenancy(0, 30, 4), Tenancy(0, 10, 4), Tenancy(1, 5, 8)],
        12,
        "first",
        8,
    )
    assert found.blocked_share == 0.25
    assert found.unusable_share == pytest.approx(0.0)
    assert found.used_share == pytest.approx((10 * 12 + 20 * 4 + 5 * 8) / 35 / 12)


# ---------------------------------------------------------------------- the command


def run(*args, code=0):
    result = CliRunner().invoke(app, ["simulate", *map(str, args)])
    assert result.exit_code == code, result.output
    return result


def mooncake(path, n=30, tail=""):
    lines = [
        json.dumps(
            {
                "timestamp": 1000 * i,
                "input_length": 1100 + i,
                "output_length": 3,
                "hash_ids": [1, 2, 100 + i],
            }
        )
        for i in range(n)
    ]
    path.write_text("\n".join(lines) + tail)
    return path


def test_json_has_the_documented_form(tmp_path):
    path = mooncake(tmp_path / "trace.jsonl")
    output = run(
        path,
        *("--curve", "--contiguous", "--policy", "lru", "--json", "--tier", "host:1GiB"),
        *("--model", "smollm2-135m", "--kv-cache-memory-bytes", "64MiB"),
    ).stdout
    found = json.loads(output)
    assert found["schema"] == "kvist.simulate.v1"
    assert set(found) == {
        *("schema", "trace", "step_locked", "runs", "curve", "policies", "contiguous"),
        "environment",
    }
    assert found["trace"]["kind"] == "mooncake"
    (result,) = found["runs"]
    assert result["tokens"]["device"] + result["tokens"].get("host", 0) == 29 * 1024
    assert sum(result["tokens"].values()) == result["prompt_tokens"]
    assert result["machine"]["block_bytes"] == 512 * 23_040
    assert {"mean", "p50", "p90", "p95", "p99"} == set(result["ttft_s"])
    assert [p["policy"] for p in found["policies"]] == ["lru", "belady"]


def test_two_configurations_stand_side_by_side(tmp_path):
    path = mooncake(tmp_path / "trace.jsonl")
    small, large = tmp_path / "small.toml", tmp_path / "large.toml"
    small.write_text('kv-cache-memory-bytes = "48MiB"\nenable-prefix-caching = false\nport = 1\n')
    large.write_text('kv-cache-memory-bytes = "1GiB"\n')
    args = ("--model", "smollm2-135m")
    text = run(path, "--compare", small, large, *args).stdout
    assert "small" in text
    assert "large" in text
    found = json.loads(run(path, "--compare", small, large, "--json", *args).stdout)
    assert [r["name"] for r in found["runs"]] == ["small", "large"]
    assert found["runs"][0]["hit_rate"] == 0
    assert found["runs"][1]["hit_rate"] == pytest.approx(
        29 * 1024 / found["trace"]["prompt_tokens"]
    )


def test_a_half_written_last_line_is_left_out(tmp_path):
    path = mooncake(tmp_path / "trace.jsonl", tail='\n{"timestamp": 99')
    workload, _ = read_workload(path)
    assert len(workload.requests) == 30
    assert "half written" in workload.notes[0]


@pytest.mark.parametrize(
    ("text", "args", "message"),
    [
        ("", (), "is empty"),
        ("\n\n", (), "is empty"),
        ("hello\n", (), "line 1: no request of a trace"),
        ('{"a": 1}\n', (), "line 1: no request of a trace"),
        ("a,b,c\n1,2,3\n", (), "no request of a trace"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", (), "has no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", (), "line 2: expected"),
        ('{"requests": 3, "block_size": 64}', (), "no Claude Code session"),
        (None, ("--kv-cache-memory-bytes", "1MiB"), "raise --kv-cache-memory-bytes"),
        (None, ("--block-size", "48"), "divisor"),
        (None, ("--model", "no-such-model"), "no-such-model"),
        (None, ("--tier-rate", "disk"), "NAME:BYTES_PER_S"),
        (None, ("--tier-rate", "disk:1GB"), "there is no such tier"),
        (None, ("--decode-step-ms", "0"), "above 0"),
        (None, ("--step-locked",), "only recordings have steps"),
        (None, ("--eviction-policy", "magic"), "magic"),
        (None, ("--policy", "magic"), "magic"),
        (None, ("--timing", "nowhere.json"), "--timing"),
    ],
)
def test_bad_input_is_one_clear_line_and_code_2(tmp_path, text, args, message):
    path = tmp_path / "trace"
    if text is None:
        mooncake(path, n=3)
    else:
        path.write_text(text)
    result = run(path, *args, code=2)
    assert message in " ".join(result.output.split())
    assert result.stdout == ""


def test_a_file_that_is_not_there_is_named(tmp_path):
    assert "cannot be read" in run(tmp_path / "none", code=2).output
    assert "without sessions" in run(tmp_path, code=2).output
