"""How far a simulation is from the run that it simulates.

Three workloads run on the real engine and are recorded. Each recording is replayed step by step:
hits must be equal, token for token. Then time: seconds a step are fitted to one workload, and the
medians of the time to the first token of the *other two* are compared with what was measured there;
the bar is 25 %.

The workloads take turns, some rounds of all three, and those of a kind are taken together: on a
machine whose clock changes from minute to minute two runs of one workload differ by more than the
bar, and no fit to the one could foretell the other.

    python benchmarks/simulate_fidelity.py --json
    python benchmarks/simulate_fidelity.py --keep FOLDER        # recordings and times stay there
    python benchmarks/simulate_fidelity.py --again FOLDER       # judge those, run nothing
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from kvist.engine.llm import LLM
from kvist.engine.sampling import SamplingParams
from kvist.engine.sequence import EngineRequest
from kvist.events import RequestFinished
from kvist.lab.report import environment
from kvist.lab.simulate.books import Machine
from kvist.lab.simulate.locked import replay_locked
from kvist.lab.simulate.reading import from_recording
from kvist.lab.simulate.recording import Recording, read_recording
from kvist.lab.simulate.timing import StepTiming
from kvist.lab.simulate.virtual import simulate

BAR = 0.25
MEMORY = "64MiB"
"""Some 2,900 tokens of SmolLM2-135M in bf16: too few for all that is sent, so blocks leave."""


@dataclass
class Turn:
    """A request, and what is asked when it is answered."""

    prompt: list[int]
    max_tokens: int
    after: list[tuple[float, list[int], int]] = field(default_factory=list)


def ids(draw: random.Random, n: int) -> list[int]:
    return [draw.randrange(100, 40_000) for _ in range(n)]


def chat() -> Iterator[tuple[float, Turn]]:
    """Six conversations of three turns over one system prompt; a third of a second to think."""
    draw = random.Random(1)
    system = ids(draw, 160)
    for number in range(6):
        after = [(0.3, ids(draw, draw.randrange(20, 60)), 24) for _ in range(2)]
        yield number * 0.7, Turn(system + ids(draw, draw.randrange(30, 90)), 24, after)


def documents() -> Iterator[tuple[float, Turn]]:
    """Four documents, three questions to each, in any order."""
    draw = random.Random(2)
    texts = [ids(draw, draw.randrange(350, 700)) for _ in range(4)]
    order = [text for text in texts for _ in range(3)]
    draw.shuffle(order)
    for number, text in enumerate(order):
        yield number * 0.8, Turn(text + ids(draw, 20), 12)


def burst() -> Iterator[tuple[float, Turn]]:
    """Eighteen strangers at once."""
    draw = random.Random(3)
    for number in range(18):
        yield number * 0.02, Turn(ids(draw, draw.randrange(40, 300)), draw.randrange(6, 40))


WORKLOADS = {"chat": chat, "documents": documents, "burst": burst}


@dataclass
class Measured:
    """What came of a real run."""

    ttft_s: dict[str, float]
    hits: dict[str, int]


Run = tuple[Recording, Measured]


def record(model: str, name: str, path: Path) -> Measured:
    """Run a workload on the real engine, recorded."""
    measured = Measured({}, {})
    with LLM(model, record=str(path), kv_cache_memory_bytes=MEMORY, max_model_len=1024) as llm:
        engine = llm.engine
        engine.events.subscribe(
            lambda event: (
                measured.hits.update({event.request_id: event.num_cached_tokens})
                if isinstance(event, RequestFinished)
                else None
            )
        )
        ties = count()
        start_s = time.monotonic()
        due = [(at_s, next(ties), turn) for at_s, turn in WORKLOADS[name]()]
        heapq.heapify(due)
        live: dict[str, tuple[float, Turn, list[int]]] = {}
        names = count()
        while due or live:
            now_s = time.monotonic() - start_s
            while due and due[0][0] <= now_s:
                at_s, _, turn = heapq.heappop(due)
                request_id = str(next(names))
                live[request_id] = (at_s, turn, [])
                engine.add_request(
                    EngineRequest(
                        request_id=request_id,
                        prompt_token_ids=tuple(turn.prompt),
                        params=SamplingParams(
                            temperature=0.0, max_tokens=turn.max_tokens, ignore_eos=True
                        ),
                        arrived_s=start_s + at_s,
                    )
                )
            if not live:
                time.sleep(max(0.0, due[0][0] - now_s))
                continue
            for update in engine.step():
                now_s = time.monotonic() - start_s
                at_s, turn, said = live[update.request_id]
                measured.ttft_s.setdefault(update.request_id, now_s - at_s)
                said.extend(update.token_ids)
                if not update.is_last:
                    continue
                del live[update.request_id]
                if turn.after:
                    (think_s, more, length), *rest = turn.after
                    following = Turn(turn.prompt + said + more, length, rest)
                    heapq.heappush(due, (now_s + think_s, next(ties), following))
    return measured


def simulated_ttft(recording: Recording, timing: StepTiming) -> dict[str, float]:
    """Return seconds to the first token of every request, in virtual time."""
    workload = from_recording(recording, None)
    workload.requests.sort(key=lambda request: request.arrival_s)
    found = simulate(workload, Machine.from_header(recording.header), timing)
    return {
        name: life.first_s - life.arrival_s
        for name, life in found.lives.items()
        if life.first_s is not None
    }


def run_rounds(model: str, rounds: int, folder: Path) -> None:
    """Run and record the workloads in turn; what was measured lies beside the recordings."""
    for number in range(rounds):
        for name in WORKLOADS:
            path = folder / f"{name}-{number}.jsonl"
            measured = record(model, name, path)
            path.with_suffix(".json").write_text(json.dumps(asdict(measured)))


def read_run(path: Path) -> Run:
    """Read a recording and what was measured beside it."""
    measured = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    return read_recording(path), Measured(**measured)


def judge_hits(runs: list[Run]) -> dict[str, Any]:
    """Compare hits of the runs with those of their step-locked replays."""
    found = [replay_locked(recording) for recording, _ in runs]
    return {
        "hit_tokens": sum(sum(measured.hits.values()) for _, measured in runs),
        "replayed": sum(replay.num_hit_tokens for replay in found),
        "equal": all(
            replay.hit_tokens == measured.hits
            for replay, (_, measured) in zip(found, runs, strict=True)
        ),
        "different_steps": sum(replay.num_different for replay in found),
    }


def judge_time(runs: dict[str, list[Run]]) -> list[dict[str, Any]]:
    """Fit to each workload, judge on each."""
    rows: list[dict[str, Any]] = []
    for fitted, sources in runs.items():
        steps = [row for recording, _ in sources for row in recording.steps.values()]
        timing = StepTiming.fit(steps)
        for judged, targets in runs.items():
            real = median(s for _, measured in targets for s in measured.ttft_s.values())
            virtual = median(
                s for recording, _ in targets for s in simulated_ttft(recording, timing).values()
            )
            rows.append(
                {
                    "fitted": fitted,
                    "judged": judged,
                    "measured_s": round(real, 4),
                    "simulated_s": round(virtual, 4),
                    "error": round(virtual / real - 1, 4),
                }
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--keep", type=Path, help="folder for the recordings")
    parser.add_argument("--again", type=Path, help="folder with recordings that were kept")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as scratch:
        folder = args.again or args.keep or Path(scratch)
        if args.again is None:
            folder.mkdir(parents=True, exist_ok=True)
            run_rounds(args.model, args.rounds, folder)
        runs = {
            name: [read_run(path) for path in sorted(folder.glob(f"{name}-*.jsonl"))]
            for name in WORKLOADS
        }
    hits = {name: judge_hits(each) for name, each in runs.items()}
    rows = judge_time(runs)
    others = [abs(row["error"]) for row in rows if row["fitted"] != row["judged"]]
    result = {"hits": hits, "ttft_median": rows, "bar": BAR, "within_bar": max(others) <= BAR}
    if args.json:
        print(json.dumps({**result, "environment": environment()}))
    else:
        for name, each in hits.items():
            print(f"{name}: {each}")
        for row in rows:
            print(
                f"fitted on {row['fitted']:<10} judged on {row['judged']:<10}"
                f" measured {row['measured_s']:.3f} s, simulated {row['simulated_s']:.3f} s"
                f" ({row['error']:+.1%})"
            )
    return 0 if all(each["equal"] for each in hits.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
