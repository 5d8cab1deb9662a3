"""Published traces are read right: hits of a cache that forgets nothing, against known values.

Guards: ids that are numbered across sessions, pieces of content in the wrong order, a block that
counts as equal because its last part is, the partial last block counted as full.
"""

from __future__ import annotations

import json

import pytest

from kvist.lab.simulate.reading import read_workload


def infinite(workload):
    """Share of the prompt tokens that stand in leading blocks that were there before."""
    seen, hit = set(), 0
    for chain in workload.chains():
        fresh = next((i for i, block in enumerate(chain) if block not in seen), len(chain))
        hit += fresh * workload.block_size
        seen.update(chain)
    return hit / workload.num_prompt_tokens


@pytest.mark.parametrize(
    ("name", "kind", "num_requests", "block_size", "rate"),
    [
        ("mooncake_fast25_synthetic_trace.jsonl", "mooncake", 3_993, None, 0.651),
        ("azure_llm_2023_code.csv", "azure", 8_819, 512, 0.0),
        ("ragpulse/0_trace.jsonl", "ragpulse", 7_106, 16, 0.315),
        ("claude_code_kv_cache_tester", "claude-code", None, None, 0.933),
    ],
)
def test_a_cache_that_forgets_nothing_hits_what_is_known(
    data_dir, name, kind, num_requests, block_size, rate
):
    workload, _ = read_workload(data_dir / "traces" / name, block_size)
    assert workload.kind == kind
    if num_requests is not None:
        assert len(workload.requests) == num_requests
    assert infinite(workload) == pytest.approx(rate, abs=0.012)
    assert all(r.arrival_s >= 0 for r in workload.requests[1:])


def test_a_trace_block_is_cut_into_parts_that_are_equal_where_the_whole_is(tmp_path):
    path = tmp_path / "trace"
    requests = [(1200, [7, 8, 9]), (1300, [7, 8, 9]), (1500, [7, 5, 6])]
    path.write_text(
        "\n".join(
            json.dumps({"timestamp": 0, "input_length": n, "output_length": 1, "hash_ids": ids})
            for n, ids in requests
        )
    )
    workload, _ = read_workload(path, 128)
    first, second, third = workload.chains()
    assert [len(chain) for chain in (first, second, third)] == [9, 10, 11]
    assert second[:9] == first
    assert third[:4] == first[:4]
    assert not set(third[4:]) & set(first)


def test_pieces_make_a_prefix_only_in_their_order(tmp_path):
    for number, name in enumerate(
        ("sys_prompt", "passages", "history", "user_input", "web_search"), start=1
    ):
        lines = [json.dumps({f"{name}_id": 10 * number + i, "token_length": 24}) for i in range(4)]
        (tmp_path / f"{number}_{name}.jsonl").write_text("\n".join(lines))

    def request(passages):
        ids = {
            "sys_prompt": [10],
            "passages_ids": passages,
            "history": [],
            "web_search": [],
            "user_input": [40],
        }
        return json.dumps(
            {"timestamp": "1", "input_length": 9, "output_length": 1, "hash_ids": ids}
        )

    path = tmp_path / "0_trace.jsonl"
    path.write_text("\n".join(map(request, ([20, 21], [20, 22], [21, 20]))))
    workload, _ = read_workload(path, 16)
    one, two, three = workload.chains()
    assert [len(chain) for chain in (one, two, three)] == [6, 6, 6]
    # 24 tokens of the system prompt, 24 of the passage: three blocks of 16.
    assert one[:3] == two[:3]
    assert one[3] != two[3]
    assert one[0] == three[0]
    assert one[1] != three[1]
    assert len({*one, *two, *three}) == len(one) + len(two) + len(three) - 4


def test_sessions_share_nothing_with_each_other_and_sub_agents_are_read(tmp_path):
    def call(t, n, model="a"):
        return {"t": t, "model": model, "in": 64 * n, "out": 2, "hash_ids": list(range(n))}

    nested = {"t": 5.0, "type": "subagent", "requests": [call(1.0, 2, "b")]}
    for name in ("one", "two"):
        session = {"id": name, "block_size": 64, "requests": [call(0.0, 3), nested, call(9.0, 4)]}
        (tmp_path / f"{name}.json").write_text(json.dumps(session))
    workload, _ = read_workload(tmp_path)
    assert [r.arrival_s for r in workload.requests] == [0, 6, 9, 60, 66, 69]
    a, agent, more, b, *_ = workload.chains()
    assert more[:3] == a
    assert not set(agent) & set(more)
    assert not set(a) & set(b)
