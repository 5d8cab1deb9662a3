"""The benchmarks over a real, tiny model: what is opened for them, and a true baseline."""

from __future__ import annotations

import pytest

from kvist.lab.bench.cache import CacheBench, CacheWorkload
from kvist.lab.bench.ladder import LadderBench, LadderWorkload


def quiet(share: float, what: str) -> None:
    pass


def test_without_a_kv_cache_a_model_says_the_same(tiny_folder, one_thread):
    from kvist.lab.opening import open_host

    host, opened = open_host(str(tiny_folder("llama")), 580, max_num_batched_tokens=512)
    try:
        assert host.max_model_len == 592  # whole blocks
        before = opened.runner.num_forward_tokens
        bench = CacheBench(host, CacheWorkload(contexts=(64, 400), tokens=3))
        bench.measure(quiet)
        (table,) = bench.tables()
        assert [row["same_tokens"] for row in table.rows] == ["4 of 4"] * 2
        # No more than sums in another order, in bf16: another model's would be nats apart.
        assert all(0 < row["apart_nats"] < 0.1 for row in table.rows)
        # Cached: the prompt and three more. Without: 64 + 65 + 66 + 67. And what warms up.
        read = sum(c + 3 + 4 * c + 6 for c in (64, 400)) + 256 + 7
        assert opened.runner.num_forward_tokens - before == read
    finally:
        opened.close()


@pytest.mark.timeout(120)
def test_the_ladder_has_all_its_rungs(tiny_folder, one_thread):
    from kvist.lab.opening import open_host, open_tiered

    work = LadderWorkload(
        documents=4, document=64, question=8, answer=2, requests=8, clients=2, slots=288,
        max_model_len=144, no_cache_requests=2, repeats=1,
    )  # fmt: skip
    model = str(tiny_folder("llama"))
    host, opened = open_host(model, work.slots, max_num_batched_tokens=512)
    session, tiered = open_tiered(model, work.slots, 8 << 20, work.clients)
    try:
        bench = LadderBench(host, session, work)
        bench.measure(quiet)
        (table,) = bench.tables()
        rungs = [row["rung"] for row in table.rows]
        assert rungs == ["no cache", "KV cache", "paged", "prefix", "tiers"]
        assert session.engine.scheduler.loads is not None
    finally:
        tiered.close()
        opened.close()


def test_tiers_shows_the_decision_beside_both_extremes(tiny_folder, one_thread):
    pytest.importorskip("torch")
    from kvist.lab.tiers import TierBench, TiersWorkload

    work = TiersWorkload(num_tokens=128, rates_mb_s=(1, 50), repeats=1)
    bench = TierBench(str(tiny_folder("llama")), work)
    try:
        bench.measure(quiet)
        (table,) = bench.tables()
        assert [row["rate_mb_s"] for row in table.rows] == [1, 50]
        for row in table.rows:
            better = min(row["load_s"].median, row["recompute_s"].median)
            ratio = row["decided_s"].median / better
            assert row["decided_to_better_extreme"] == pytest.approx(ratio)
        # 112 of 128 tokens lie in full blocks before the last token, on a line of 1 MB/s.
        at_least_s = 112 * bench.opened.bill.kv_token_bytes / 1e6
        assert table.rows[0]["load_s"].median > at_least_s
    finally:
        bench.close()
