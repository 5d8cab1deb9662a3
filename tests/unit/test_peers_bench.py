"""The peers benchmark: one engine that fails costs its own numbers and nobody else's."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.peers import child, turns
from benchmarks.peers.__main__ import left_out_of, wanted_measures
from benchmarks.peers.bandwidth import Rate
from benchmarks.peers.bars import judge
from benchmarks.peers.measures import QUICK, Engine, Lengths, measures, own_measures
from benchmarks.peers.results import Record, Results
from benchmarks.peers.table import to_markdown

_ANY = turns.Turn(QUICK, "seed", set(), lambda _: None, 30, lambda: None)
_DRIVERS = Path(turns.__file__).parent / "drivers"
_FAKE = """
import os, sys, time
from driver_protocol import Facts, Generated, serve

def open_engine(options):
    print("noise of a library")
    os.system("echo noise of a program")
    ill = options["ill"]
    if ill == "does not open":
        raise RuntimeError("no weights")

    def generate(prompts, tokens):
        length = len(prompts[0])
        if ill == "refuses" and length == options["length"]:
            raise ValueError("too long\\nfor me")
        if ill == "dies" and length == options["length"]:
            os.abort()
        if ill == "stops early" and length == options["length"]:
            tokens -= 1
        times, ids = [0.5 + i for i in range(tokens)], [7] * tokens
        return Generated([times] * len(prompts), [ids] * len(prompts), 3)

    def hang():
        os.system("sleep 60 &")
        time.sleep(60)

    return {"generate": generate, "hang": hang, "facts": lambda: Facts({"threads": 2}, 5.0)}

serve(open_engine)
"""


def _launch(tmp_path: Path, ill: str = "", length: int = 0) -> turns.Launch:
    script = tmp_path / "fake.py"
    script.write_text(_FAKE)
    return turns.Launch(
        command=[sys.executable, str(script)],
        environ={**os.environ, "PYTHONPATH": str(_DRIVERS)},
        options={"ill": ill, "length": length},
        log=tmp_path / "log",
        keeps_prefixes=True,
        is_ours=False,
        is_cold=False,
    )


def _turn(launch: turns.Launch, left_out: set[str] | None = None) -> Record:
    record = Record()
    turns.take_turn(launch, record, replace(_ANY, left_out=left_out or set()))
    return record


def test_a_turn_measures_all(tmp_path: Path) -> None:
    record = _turn(_launch(tmp_path))
    assert not record.reasons
    assert record.samples.keys() >= {"start_s", "decode_short", "prefill", "ttft_warm_s"}
    assert record.samples["memory_peak_rss"][0] > 1e6
    assert record.kv_token_bytes == 5.0
    assert record.settings == {"threads": 2}
    assert "noise of a program" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("ill", "reason"),
    [("refuses", "ValueError: too long for me"), ("stops early", "0 tokens at 0 times")],
)
def test_what_fails_leaves_a_reason_and_the_rest_goes_on(
    tmp_path: Path, ill: str, reason: str
) -> None:
    record = _turn(_launch(tmp_path, ill, QUICK.prefill))
    assert record.reasons.keys() == {"prefill"}
    assert reason in record.reasons["prefill"]
    assert "ttft_cold_s" in record.samples


def test_a_dead_driver_ends_its_turn_with_a_reason(tmp_path: Path) -> None:
    record = _turn(_launch(tmp_path, "dies", QUICK.prefill))
    assert record.reasons == {"prefill": "ended by SIGABRT"}
    assert "decode_short" in record.samples
    assert "ttft_cold_s" not in record.samples
    # Without what killed it, it gets to the end.
    again = _turn(_launch(tmp_path, "dies", QUICK.prefill), left_out={"prefill"})
    assert not again.reasons
    assert "ttft_cold_s" in again.samples


def test_an_engine_that_does_not_open_is_out(tmp_path: Path) -> None:
    record = _turn(_launch(tmp_path, "does not open"))
    assert record.is_out
    assert record.reasons == {"start": "RuntimeError: no weights"}
    results = Results(QUICK, records={"Fake": record})
    assert "**Fake**, start: RuntimeError: no weights" in to_markdown(results)


def test_no_answer_in_time_ends_the_driver_and_its_children(tmp_path: Path) -> None:
    launch = _launch(tmp_path)
    with child.Driver(launch.command, launch.environ, launch.log) as driver:
        driver.call("open", 30, **launch.options)
        with pytest.raises(child.DriverError, match="no answer within"):
            driver.call("hang", 0.5)
    assert not _alive(driver.pid)


def _alive(group: int) -> list[str]:
    """Names of the processes of a group, but those that only wait to be reaped."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = path.read_text().rpartition(")")
            state, _, its_group = rest.split()[:3]
            if int(its_group) == group and state != "Z":
                found.append(name)
    return found


def test_streams_count_prefill_and_decode_apart() -> None:
    # Two streams: first tokens after 1 and 2 s, then two more each, a second apart.
    times = [[1.0, 2.5, 3.5], [2.0, 3.0, 4.0]]
    lengths = Lengths(prompt=10, output=3, streams=(2,))
    engine = Engine(lambda *_, **__: {"times": times, "token_ids": [[1, 2, 3]] * 2}, True)
    found = dict(measures(lengths))["2 streams"](engine, lengths, _ANY.draw("x"))
    assert found == {
        "streams_2": 6 / 4,
        "streams_2_prefill": 20 / 2,
        "streams_2_decode": 4 / 2,
    }


@pytest.mark.parametrize(
    ("reads", "read", "shares"),
    [
        ([Rate(20.0, 24.0), Rate(10.0, 30.0)], 20.0, (0.5, 0.4)),
        ([Rate(10.0, 24.0), Rate(20.0, 20.0)], 20.0, (0.5, 0.5)),
        ([None, None], None, None),
    ],
)
def test_attention_is_held_against_the_better_read_around_it(
    reads: list[Rate | None], read: float | None, shares: tuple[float, float] | None
) -> None:
    order: list[str] = []

    def call(name: str, **arguments: object) -> list[float]:
        order.append(name)
        return [10.0, 12.0, 9.0]

    def measured() -> Rate | None:
        order.append("read")
        return reads[order.count("read") - 1]

    measure = dict(own_measures(measured))["attention"]
    found = measure(Engine(call, True), QUICK, _ANY.draw("x"))
    expected = {"attention_1": 10.0, "attention_8": 10.0}
    if shares is not None:
        for batch in (1, 8):
            expected[f"attention_{batch}_of_read"] = shares[0]
            expected[f"attention_{batch}_of_fastest"] = shares[1]
        expected["read"] = read
    assert found == expected
    assert order == ["read", "attention", "attention", "read"]


def test_measures_are_asked_for_by_name() -> None:
    assert wanted_measures("streams32, attention", Lengths()) == {"32 streams", "attention"}
    assert len(wanted_measures(None, Lengths())) == 7
    with pytest.raises(ValueError, match="no streams32; of stream, streams2, streams4, prefill"):
        wanted_measures("streams32", QUICK)


def test_only_what_is_wanted_is_taken(tmp_path: Path) -> None:
    wanted = wanted_measures("streams2", QUICK)
    record = Record()
    left_out = left_out_of(record, 0, wanted, QUICK)
    turns.take_turn(_launch(tmp_path), record, replace(_ANY, left_out=left_out))
    assert record.taken == {"2 streams": 1}
    assert "streams_2" in record.samples
    assert "prefill" not in record.samples


def test_a_resumed_round_takes_what_it_has_not_taken_yet() -> None:
    record = Record(turns=2, taken={"prefill": 2, "context": 1}, cost_s={"one stream": 21.0})
    wanted = wanted_measures("stream,prefill,context,attention", QUICK)
    others = {"2 streams", "4 streams", "outside the model", "one stream"}
    assert left_out_of(record, 0, wanted, QUICK) == others | {"prefill", "context"}
    assert left_out_of(record, 1, wanted, QUICK) == others | {"prefill"}
    assert left_out_of(record, 2, wanted, QUICK) == others


def test_results_of_a_time_when_every_turn_took_everything(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    results = Results(QUICK)
    results.records["x"] = Record(
        turns=2, cost_s={"start": 1.0, "prefill": 2.0}, reasons={"context": "died"}
    )
    results.save(path)
    saved = json.loads(path.read_text())
    del saved["records"]["x"]["taken"]
    path.write_text(json.dumps(saved))
    assert Results.load(path, QUICK).record("x").taken == {"prefill": 2, "context": 2}


def test_every_engine_gets_the_same_prompts_whatever_it_left_out() -> None:
    first, second = _ANY.draw("prefill"), _ANY.draw("prefill")
    assert [first.random() for _ in range(3)] == [second.random() for _ in range(3)]
    assert _ANY.draw("context").random() != _ANY.draw("prefill").random()


def test_results_go_on_where_they_stopped(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    results = Results(QUICK, runs=[{"bandwidth": {"a": 2.0, "b": 3.0}}])
    results.record("x").add({"prefill": 10.0})
    results.save(path)
    loaded = Results.load(path, QUICK)
    assert loaded == results
    loaded.record("x").add({"prefill": 20.0})
    assert loaded.record("x").median("prefill") == 15.0
    with pytest.raises(ValueError, match="cannot be merged"):
        Results.load(path, Lengths())


def test_bars_are_ratios_of_medians_and_need_both_sides() -> None:
    results = Results(Lengths(), runs=[{"bandwidth": {"a": 20.0}}])
    ours = results.record("Kvist bf16")
    ours.add({"decode_short": 30.0, "attention_1": 13.0})
    # Of three turns, one of them with another clock.
    for share in (0.64, 0.65, 0.66):
        ours.add({"attention_1_of_read": share})
    results.record("Kvist bf16, torch kernels").add({"decode_short": 99.0})
    results.record("Kvist int8 weights").add({"decode_short": 60.0})
    results.record("vLLM bf16").add({"decode_short": 25.0})
    results.record("other").add({"decode_short": 50.0})
    found = {(v.what, v.measured): v.holds for v in judge(results)}
    assert found == {
        ("decode attention at 7,500, batch 1, of the read", "65%"): True,
        ("one stream, short, Kvist bf16", "1.20 × vLLM bf16"): False,
        ("one stream, short, Kvist int8 weights", "1.20 × other"): True,
    }
