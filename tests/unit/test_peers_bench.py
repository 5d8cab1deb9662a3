"""The peers benchmark: one engine that fails costs its own numbers and nobody else's."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from benchmarks.peers import child, turns
from benchmarks.peers.bars import judge
from benchmarks.peers.measures import QUICK, Engine, Lengths, measures
from benchmarks.peers.results import Record, Results
from benchmarks.peers.table import to_markdown

_ANY = turns.Turn(QUICK, "seed", set(), lambda _: None, 30)
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
    turns.take_turn(
        launch, record, turns.Turn(QUICK, "seed", left_out or set(), lambda _: None, 30)
    )
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
    assert loaded.bandwidth == 3.0
    with pytest.raises(ValueError, match="cannot be merged"):
        Results.load(path, Lengths())


def test_bars_are_ratios_of_medians_and_need_both_sides() -> None:
    results = Results(Lengths(), runs=[{"bandwidth": {"a": 20.0}}])
    results.record("Kvist bf16").add({"decode_short": 30.0, "attention_1": 13.0})
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
