"""The doctor: a planted cause is the first finding, the healthy have none, bad input exits 2.

Samples are written by hand in the wording of each engine; nothing of a real deployment is in them.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvist.cli import app
from kvist.errors import ConfigError
from kvist.lab.bench.host import null_host
from kvist.lab.doctor.events import read_events
from kvist.lab.doctor.examine import diagnose
from kvist.lab.doctor.exposition import read_exposition
from kvist.lab.doctor.finding import SYMPTOMS
from kvist.lab.doctor.kpis import key_figures
from kvist.lab.doctor.log_rules import RULES
from kvist.lab.doctor.logs import examine_log
from kvist.lab.doctor.prompts import compare_prompts
from kvist.lab.doctor.reading import Reading, read_metrics
from kvist.lab.doctor.records import Record, read_records
from kvist.lab.doctor.requests import ServerFacts, examine_requests
from kvist.lab.doctor.reuse import measure_reuse
from kvist.lab.doctor.server import examine_server
from kvist.lab.doctor.template import lint_template
from kvist.lab.doctor.thresholds import (
    DEFAULT_THRESHOLDS,
    Level,
    Limit,
    Thresholds,
    read_thresholds,
)

HEALTHY = {
    "kv_cache_usage_perc": 0.45,
    "num_requests_running": 12,
    "num_requests_waiting": 0,
    "num_preemptions_total": 1,
    'request_success_total{finished_reason="stop"}': 900,
    'request_success_total{finished_reason="length"}': 100,
    "prefix_cache_queries_total": 2_000_000,
    "prefix_cache_hits_total": 1_500_000,
    "e2e_request_latency_seconds_sum": 1_200,
    "e2e_request_latency_seconds_count": 1_000,
    "request_prompt_tokens_count": 1_000,
    'request_prompt_tokens_bucket{le="2000"}': 995,
    'request_prompt_tokens_bucket{le="+Inf"}': 1_000,
    'request_generation_tokens_bucket{le="500"}': 1_000,
    'request_generation_tokens_bucket{le="+Inf"}': 1_000,
    'cache_config_info{block_size="16",enable_prefix_caching="True",max_model_len="8192"}': 1,
}


def exposition(engine: str, **changes: float) -> str:
    values = {**HEALTHY, **changes}
    return "# HELP x y\n" + "".join(f"{engine}:{name} {value}\n" for name, value in values.items())


def look(text: str, thresholds: Thresholds = DEFAULT_THRESHOLDS):
    return examine_server(read_metrics(read_exposition(text)), thresholds)


def records(prompts: list[str], **fields) -> list[Record]:
    return [Record(prompt, **fields) for prompt in prompts]


def names(found) -> list[str]:
    return [finding.symptom.name for finding in found]


@pytest.mark.parametrize("engine", ["kvist", "vllm"])
def test_a_healthy_server_has_no_finding(engine):
    metrics = read_exposition(exposition(engine))
    assert metrics.engine == engine
    assert look(exposition(engine)) == []
    idle = {name: 0.0 for name in HEALTHY if "config" not in name}
    assert look(exposition(engine, **idle)) == []


@pytest.mark.parametrize(
    ("symptom", "changes"),
    [
        ("pool-exhausted", {"kv_cache_usage_perc": 0.99, "num_requests_waiting": 30}),
        ("queue-without-pressure", {"kv_cache_usage_perc": 0.2, "num_requests_waiting": 30}),
        ("preemption-storm", {"num_preemptions_total": 700}),
        ("hit-rate-low", {"prefix_cache_hits_total": 500_000}),
        (
            "cache-too-small",
            {
                "prefix_cache_hits_total": 20_000,
                "kv_blocks_stored_total": 90_000,
                "kv_blocks_evicted_total": 85_000,
            },
        ),
        (
            "max-model-len-too-long",
            {'cache_config_info{max_model_len="131072",enable_prefix_caching="True"}': 1},
        ),
        (
            "reservation-waste",
            {'kv_slots{state="allocated"}': 100_000, 'kv_slots{state="filled"}': 20_000},
        ),
        (
            "answers-cut",
            {
                'request_success_total{finished_reason="length"}': 5_000,
                'request_prompt_tokens_bucket{le="8000"}': 1_000,
                'request_prompt_tokens_bucket{le="2000"}': 10,
            },
        ),
        ("latency-high", {"e2e_request_latency_seconds_sum": 7_000}),
    ],
)
def test_a_planted_cause_is_the_first_finding(symptom, changes):
    text = exposition("vllm", **changes)
    if symptom == "max-model-len-too-long":
        text = "\n".join(line for line in text.splitlines() if 'max_model_len="8192"' not in line)
    found = look(text)
    assert names(found)[:1] == [symptom]
    assert found[0].evidence
    assert found[0].remedy


def test_prefix_caching_that_is_off_is_said_and_its_hit_rate_is_not():
    text = exposition("vllm", prefix_cache_hits_total=0).replace(
        'enable_prefix_caching="True"', 'enable_prefix_caching="False"'
    )
    assert names(look(text)) == ["prefix-caching-off"]


def test_answers_that_clients_want_short_are_no_symptom():
    text = exposition("vllm", **{'request_success_total{finished_reason="length"}': 5_000})
    assert look(text) == []


def test_a_long_context_length_costs_nothing_where_many_of_it_fit():
    text = exposition("vllm").replace('max_model_len="8192"', 'max_model_len="131072"{}')
    assert names(look(text.replace("{}", ""))) == ["max-model-len-too-long"]
    assert look(text.replace("{}", ',kv_cache_size_tokens="2000000"')) == []


def test_evictions_of_prompts_that_are_all_new_are_as_they_must_be():
    changes = {
        "prefix_cache_hits_total": 2_000,
        "kv_blocks_stored_total": 90_000,
        "kv_blocks_evicted_total": 85_000,
    }
    assert look(exposition("kvist", **changes)) == []


def test_a_pool_that_is_full_of_cached_blocks_is_healthy():
    text = exposition("kvist") + 'kvist:kv_blocks{state="cached"} 9000\n'
    assert look(text) == []


def test_remedies_name_the_flags_of_the_engine():
    def remedy(text: str) -> str:
        return look(text)[0].remedy

    changes = {"kv_cache_usage_perc": 0.99, "num_requests_waiting": 30}
    assert "--kv-cache-memory-bytes" in remedy(exposition("kvist", **changes))
    assert "--gpu-memory-utilization" in remedy(exposition("vllm", **changes))
    llama = (
        "llamacpp:kv_cache_usage_ratio 0.98\nllamacpp:requests_processing 4\n"
        "llamacpp:requests_deferred 9\n"
    )
    assert "-np" in remedy(llama)


def test_thresholds_can_be_set():
    strict = Thresholds(mean_latency_s=Limit(0.5, 1.0))
    assert names(look(exposition("vllm"), strict)) == ["latency-high"]


LOGS = {
    "oom-at-start": "ValueError: No available memory for the cache blocks. Try increasing it.",
    "context-truncated": 'level=WARN msg="truncating input prompt" limit=4096 prompt=9211 keep=5',
    "max-model-len-too-long": "Maximum concurrency for 131,072 tokens per request: 1.21x",
    "kv-quantization-risk": "Using fp8 data type to store kv cache. It may drop accuracy without a"
    " proper scaling factor",
    "prefix-caching-off": "engine args: enable_prefix_caching=False, seed=0",
    "pool-exhausted": "slot update_slots: failed to find free space in the KV cache, retrying",
}
READY = "INFO: Application startup complete."


@pytest.mark.parametrize("symptom", sorted(LOGS))
def test_a_line_of_a_log_is_understood(symptom):
    lines = ["INFO loading weights", LOGS[symptom], READY, "INFO 200 OK"]
    found = examine_log(lines)
    assert names(found) == [symptom]
    assert "{" not in found[0].evidence + found[0].remedy


def test_running_out_of_memory_before_and_after_being_ready_are_two_things():
    crash = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    assert names(examine_log(["loading", crash])) == ["oom-at-start"]
    found = examine_log(["loading", READY, crash])
    assert names(found) == ["oom-at-first-request"]
    assert "--gpu-memory-utilization" in found[0].remedy


def test_one_preemption_is_no_storm():
    line = "Sequence group 7 is preempted by RECOMPUTE mode because of KV cache space"
    assert examine_log([READY, line]) == []
    assert names(examine_log([READY, *[line] * 3])) == ["preemption-storm"]


def test_a_quiet_log_has_no_finding():
    assert (
        examine_log([READY, "INFO: 127.0.0.1 GET /health 200", "GPU KV cache size: 90,000"]) == []
    )


def test_every_rule_names_a_symptom_of_the_table():
    assert {rule.symptom for rule in RULES} <= set(SYMPTOMS)


RULES_TEXT = " ".join(
    f"Rule {n}: answer number {n} with care and cite the source." for n in range(40)
)


def chats(make_system, n=40):
    rng = random.Random(0)
    return [
        f"system\n{make_system(i)}\nuser\nquestion {rng.random()} about {rng.random()}"
        for i in range(n)
    ]


def test_a_timestamp_near_the_start_is_found_with_its_place():
    prompts = chats(lambda i: f"You are a helpful bot. Time: 12:{i:02d}:30. {RULES_TEXT}")
    found = examine_requests(records(prompts))
    assert names(found)[0] == "prefix-differs-early"
    assert "a timestamp at about token" in found[0].evidence
    sharing = compare_prompts(prompts)
    # Before it: system You are a helpful bot . Time :
    assert sharing.differences[0].position == 9
    assert sharing.movable_words > 0.5 * sharing.num_words


def test_a_user_id_and_a_date_are_told_apart():
    ids = chats(lambda i: f"Session a{i:03d}f99c. {RULES_TEXT}")
    assert compare_prompts(ids).differences[0].kind == "an id"
    dates = chats(lambda i: f"Today is 2026-11-{i % 28 + 1:02d}. {RULES_TEXT}", 28)
    assert compare_prompts(dates).differences[0].kind == "a date"


def test_prompts_that_share_a_long_beginning_are_healthy():
    assert examine_requests(records(chats(lambda _: RULES_TEXT))) == []


def test_prompts_that_share_nothing_or_too_little():
    rng = random.Random(1)
    strangers = [" ".join(f"w{rng.randrange(10**9)}" for _ in range(60)) for _ in range(30)]
    assert names(examine_requests(records(strangers))) == ["prompts-share-nothing"]
    short = [f"You are helpful. {text}" for text in strangers]
    assert names(examine_requests(records(short))) == ["block-larger-than-prefix"]
    assert examine_requests(records(strangers[:1])) == []
    assert examine_requests(records([])) == []


def test_request_logs_are_read_in_the_shapes_that_there_are():
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    lines = [
        json.dumps(chat),
        json.dumps({"custom_id": "1", "body": chat}),
        json.dumps({"prompt": "hello"}),
        json.dumps({"other": 1}),
        "",
        '{"prompt": "cut o',
    ]
    found, bad = read_records(lines)
    assert [record.prompt for record in found] == ["user\nhi", "user\nhi", "hello"]
    assert bad == 2


def test_a_template_is_linted_where_it_changes_before_it_repeats():
    text = "Today: {{ now() }}\n" + "You are a bot.\n" * 30 + "{{ question }}\nAt {timestamp}"
    (issue,) = lint_template(text)
    assert issue.line == 1
    assert "now" in issue.text
    assert lint_template("You are a bot.\n" * 30 + "{{ now() }}") == []


def run(*arguments: str):
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_exit_codes_and_json(tmp_path):
    fine, sick = tmp_path / "fine.txt", tmp_path / "sick.txt"
    fine.write_text(exposition("vllm"))
    sick.write_text(exposition("vllm", num_preemptions_total=900))
    assert run(str(fine)).exit_code == 0
    assert run(str(sick)).exit_code == 1
    body = json.loads(run(str(sick), "--json").stdout)
    assert body["schema"] == "kvist.doctor.v1"
    assert body["findings"][0]["symptom"] == "preemption-storm"
    log = tmp_path / "server.log"
    log.write_text("\n".join([LOGS["oom-at-start"], "Traceback"]))
    assert run(str(log)).exit_code == 1
    requests = tmp_path / "requests.jsonl"
    requests.write_text("\n".join(json.dumps({"prompt": p}) for p in chats(lambda _: RULES_TEXT)))
    assert run(str(requests)).exit_code == 0
    assert set(SYMPTOMS) <= set(run("--list").stdout.replace("(", " ").replace(")", " ").split())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"   \n",
        b"\x00\x01\x02" * 100,
        b"up 1\nprocess_cpu_seconds_total 3\n",
        b'{"a": 1}\n' * 9,
    ],
)
def test_targets_that_are_none_are_misuse(tmp_path, content):
    file = tmp_path / "target"
    file.write_bytes(content)
    assert run(str(file)).exit_code == 2
    assert len(run(str(file)).stderr.strip().splitlines()) <= 3


def test_other_misuse(tmp_path):
    assert run().exit_code == 2
    assert run(str(tmp_path)).exit_code == 2
    assert run(str(tmp_path / "nothing")).exit_code == 2
    assert run("http://127.0.0.1:9").exit_code == 2
    assert run("prompts").exit_code == 2
    assert run("a", "b").exit_code == 2


def test_the_table_of_the_docs_is_the_list():
    docs = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    for symptom in SYMPTOMS.values():
        row = f"| {symptom.title} (`{symptom.name}`) | {symptom.check} | {symptom.remedy} |"
        assert row in docs.splitlines()


def test_key_figures_are_graded_only_where_they_say_something():
    def levels(**values):
        figures = key_figures(Reading(**values), DEFAULT_THRESHOLDS)
        return {figure.name: figure.level for figure in figures}

    idle = levels(requests_per_s=0.1, pool_use=0.85, queried_tokens=1e6, hit_tokens=1e3)
    assert idle["requests_per_s"] is Level.UNKNOWN  # nobody asks for more
    assert idle["hit_rate"] is Level.UNKNOWN  # prompts may share nothing
    assert idle["kv_pool_use"] is Level.WARNING
    assert idle["mean_latency_s"] is Level.UNKNOWN
    busy = levels(
        requests_per_s=60.0,
        waiting=9,
        pool_use=0.95,
        latency_s=3.0,
        num_latencies=50,
        queried_tokens=1e6,
        hit_tokens=4e5,
    )
    assert busy["requests_per_s"] is Level.WARNING
    assert busy["kv_pool_use"] is Level.BAD
    assert busy["mean_latency_s"] is Level.WARNING
    assert busy["hit_rate"] is Level.BAD
    # Nobody can find more than there is.
    assert levels(queried_tokens=1e6, hit_tokens=4e5, attainable_rate=0.45)["hit_rate"] is Level.OK
    assert levels(queried_tokens=1e6, attainable_rate=0.6)["hit_rate"] is Level.BAD


def test_thresholds_come_from_flags_over_a_file_over_the_defaults(tmp_path):
    file = tmp_path / "limits.toml"
    file.write_text("mean_latency_s = [1, 3]\nhit_rate = [0.6, 0.3]\nmin_requests = 7\n")
    found = read_thresholds(file, ["hit_rate=50%, 20%"])
    assert found.mean_latency_s == Limit(1, 3)
    assert found.hit_rate == Limit(0.5, 0.2)
    assert found.min_requests == 7
    assert found.kv_pool_use == DEFAULT_THRESHOLDS.kv_pool_use
    for wrong in (
        "latency=1,2",
        "hit_rate=0.5,0.9",
        "mean_latency_s=2",
        "hit_rate=a,b",
        "hit_rate",
        "min_requests=nan",
        "mean_latency_s=5,5",
    ):
        with pytest.raises(ConfigError):
            read_thresholds(None, [wrong])
    file.write_text("mean_latency_s = [1, ")
    with pytest.raises(ConfigError, match="no TOML"):
        read_thresholds(file)


def test_two_looks_count_what_came_between_and_forget_a_restart():
    before = read_exposition("vllm:num_preemptions_total 100\nvllm:num_requests_running 9\n")
    after = read_exposition("vllm:num_preemptions_total 130\nvllm:num_requests_running 4\n")
    changed = after.since(before)
    assert changed.total("num_preemptions_total") == 30
    assert changed.total("num_requests_running") == 4
    assert before.since(after).total("num_preemptions_total") == 100


def test_reuse_is_what_lru_of_each_size_finds():
    """Against LRU by the letter, over generated chains, at every size."""
    rng = random.Random(3)
    chains = [
        [(c, d) for d in range(rng.randrange(1, 6))] for c in (rng.randrange(8) for _ in range(80))
    ]
    reuse = measure_reuse(chains, 1.0)
    total = sum(map(len, chains))
    for size in range(1, 41):
        resident: list[tuple[int, int]] = []  # oldest first
        hits = 0
        for chain in chains:
            found = 0
            while found < len(chain) and chain[found] in resident:
                found += 1
            hits += found
            for block in reversed(chain):
                if block in resident:
                    resident.remove(block)
                resident.append(block)
            del resident[: max(0, len(resident) - size)]
        assert reuse.rate(size) == pytest.approx(hits / total), size
    assert reuse.rate(10**9) == reuse.attainable
    assert reuse.rate(reuse.enough_tokens()) >= 0.9 * reuse.attainable


def event(kind: str, **fields) -> str:
    return json.dumps({"t": 1.0, "event": kind, **fields})


def test_blocks_that_come_back_tell_a_small_cache_from_a_flooded_one():
    """An event log knows blocks by name, so that no rate has to be guessed at."""

    def lived(keys: list[str], size: int) -> list[str]:
        resident: list[str] = []
        lines = []
        for key in keys:
            if key in resident:
                resident.remove(key)
            else:
                lines.append(event("BlockStored", key=key))
            resident.append(key)
            if len(resident) > size:
                lines.append(event("BlockEvicted", key=resident.pop(0)))
        return lines

    in_turn = [f"k{i % 60}" for i in range(300)]
    found, _, bad = read_events(lived(in_turn, 40))
    assert names(found) == ["cache-too-small"]
    assert bad == 0
    once = iter(range(10**6))
    flooded = [key for i in range(20) for key in ("a", "b", *(f"n{next(once)}" for _ in range(6)))]
    assert names(read_events(lived(flooded, 6))[0]) == ["hot-prefixes-evicted"]
    assert names(read_events(lived(in_turn, 60))[0]) == []
    assert read_events(["{", "[]", '{"t": 1, "event": "New", "x": 2}', '{"event": 3}'])[2] == 3


def test_what_a_server_finds_is_held_against_what_prompts_share():
    prompts = records(chats(lambda _: RULES_TEXT))

    def found(**server):
        return names(examine_requests(prompts, server=ServerFacts(**server)))

    assert found(hit_rate=0.9) == []
    assert found(hit_rate=0.001) == ["salt-or-hash-differs"]
    assert found(hit_rate=0.4) == ["hit-rate-low"]
    assert found(pool_tokens=100) == ["cache-too-small"]
    assert found(max_model_len=131072) == ["max-model-len-too-long"]
    salted = [Record(r.prompt, ("", "", f"user {n}")) for n, r in enumerate(prompts)]
    assert names(examine_requests(salted)) == ["salt-or-hash-differs"]


def test_several_targets_are_looked_at_together(tmp_path):
    metrics, requests = tmp_path / "metrics.txt", tmp_path / "requests.jsonl"
    metrics.write_text(exposition("vllm", prefix_cache_hits_total=0))
    requests.write_text("\n".join(json.dumps({"prompt": p}) for p in chats(lambda _: RULES_TEXT)))
    assert run(str(metrics)).exit_code == 0
    shown = json.loads(run(str(requests), str(metrics), "--json").stdout)
    assert shown["findings"][0]["symptom"] == "salt-or-hash-differs"
    assert shown["targets"] == ["metrics", "requests"]
    ignore = ("--ignore", "salt-or-hash-differs", "--ignore", "max-model-len-too-long")
    assert run(str(requests), str(metrics), *ignore).exit_code == 0
    assert run(str(metrics), "--ignore", "nonsense").exit_code == 2


def test_a_queue_is_not_called_idle_where_blocks_had_to_go():
    def symptoms(**values):
        return names(examine_server(Reading(engine="kvist", waiting=9, running=4, **values)))

    assert symptoms() == ["queue-without-pressure"]
    assert symptoms(pool_use=0.1, evicted_blocks=50) == ["queue-without-pressure"]
    assert symptoms(evicted_blocks=50) == []  # nobody says how full the pool is


def test_prompts_with_the_same_passages_in_another_order_are_seen():
    passages = [" ".join(f"p{k}w{i}" for i in range(30)) for k in range(6)]
    texts = [" ".join(passages[k:] + passages[:k]) + f" ask{k}" for k in range(6)]
    sharing = compare_prompts(texts)
    assert sharing.shared_words == 0
    assert {difference.kind for difference in sharing.differences} == {"the order of passages"}
    assert sharing.movable_words > 0.6 * sharing.num_words
    same = compare_prompts([" ".join(passages) + f" ask{k}" for k in range(6)])
    assert same.movable_words == 0


# ---------------------------------------------------------------------- recordings


def recorded(path: Path, prompts: list[tuple[int, ...]], num_blocks: int = 512) -> Path:
    host = null_host(num_blocks, 16, 512)
    host.record = path
    session = host.open(prefix_caching=True)
    for prompt in prompts:
        session.one(prompt, 4)
    host.close()
    return path


def test_a_recording_says_that_its_pool_was_too_small(tmp_path):
    # Twenty documents in turn, and room for some three of them.
    prompts = [
        tuple(range(1000 * d, 1000 * d + 160)) + (q,) * 20 for q in range(5) for d in range(20)
    ]
    small = diagnose([str(recorded(tmp_path / "small.jsonl", prompts, 40))])
    assert names(small.findings)[:1] == ["cache-too-small"]
    assert "640 tokens" in small.findings[0].evidence
    large = diagnose([str(recorded(tmp_path / "large.jsonl", prompts))])
    assert large.kinds == ["recording"]
    assert large.findings == []


def test_a_recording_of_strangers_says_that_nothing_is_shared(tmp_path):
    prompts = [tuple(range(1000 * n, 1000 * n + 200)) for n in range(40)]
    found = diagnose([str(recorded(tmp_path / "new.jsonl", prompts))])
    assert names(found.findings) == ["prompts-share-nothing"]


def test_a_damaged_recording_is_one_line(tmp_path):
    path = recorded(tmp_path / "run.jsonl", [tuple(range(100))])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "{]", *lines[1:]]))
    with pytest.raises(ConfigError, match="line 2"):
        diagnose([str(path)])
