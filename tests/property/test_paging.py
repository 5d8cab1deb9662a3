"""The claims of `kvist bench paging` that need no model: exact, and the same on every machine."""

from __future__ import annotations

import pytest

from kvist.lab.paging import MODES, PagingResult, PagingWorkload, compare, run_mode

WORKLOAD = PagingWorkload(num_requests=96)


@pytest.fixture(scope="module")
def results() -> dict[str, PagingResult]:
    return {mode: run_mode(mode, WORKLOAD) for mode in MODES}


def test_paged_allocation_wastes_less_than_five_percent(results: dict[str, PagingResult]):
    assert results["paged"].utilization >= 0.95


def test_against_reserving_the_maximum(results: dict[str, PagingResult]):
    ratio = compare(results, None)["ratio"]
    assert ratio["utilization"] >= 2.4
    assert ratio["concurrency"] >= 3


def test_the_baseline_holds_as_many_as_its_arithmetic_says(results: dict[str, PagingResult]):
    # 16,384 slots hold 4 requests of 4,096, and 8 of 2,048: the baseline is no straw man.
    assert results["reserve"].concurrency == pytest.approx(4, abs=0.1)
    assert results["reserve_longest"].concurrency == pytest.approx(8, abs=0.2)
    assert results["reserve"].preemptions == results["reserve_longest"].preemptions == 0


def test_the_same_every_time(results: dict[str, PagingResult]):
    assert run_mode("paged", WORKLOAD) == results["paged"]


def test_the_workload_is_what_it_says():
    totals = [
        len(r.prompt_token_ids) + (r.params.max_tokens or 0) for r in PagingWorkload().requests()
    ]
    assert min(totals) >= 128
    assert max(totals) <= 2048
    assert sum(totals) / len(totals) == pytest.approx((128 + 2048) / 2, rel=0.1)
