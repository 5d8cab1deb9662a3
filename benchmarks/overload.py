"""What a server still gets done when several times as much is asked of it as it can do.

`kvist serve` runs as a process of its own. How many short streamed chats it ends in a second is
measured first, by clients that ask again as soon as they are answered. Then chats arrive at random
times (Poisson), at several multiples of that, each with a deadline; nobody who is refused comes
again. Goodput: chats that ended within their deadline, a second. It is counted from one deadline
after the start of a run, when as many end as will, to the end of the arrivals.

The last multiple is the heavy one and gets the most time. What is done under it is to be 90 % of
what is done under the best of all, memory is to stay as it was (the KV pool apart, whose pages come
as blocks are first written), no block is to be used afterwards, and every refusal is to say when to
come again. A machine whose clock changes from minute to minute would decide which multiple is
best: so all of them run in every round, and their means over the rounds are compared.

    python benchmarks/overload.py --json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from typing import Any

from open_loop import Chats, Client, Tally
from running_server import RunningServer, add_arguments, running_server

from kvist.lab.report import environment
from kvist.sizes import format_size

BAR = 0.9
FLAT = 0.05
"""By so much memory may grow from the middle of the first heavy run to the end of the last."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--factors", type=float, nargs="+", default=[0.8, 1, 1.5, 2, 5])
    parser.add_argument("--rounds", type=int, default=3, help="in each, all factors in turn")
    parser.add_argument("--seconds", type=float, default=15, help="of a run")
    parser.add_argument("--long-seconds", type=float, default=60, help="of the last factor")
    parser.add_argument("--deadline", type=float, default=10, help="seconds that a chat gets")
    parser.add_argument("--clients", type=int, default=64, help="that measure the capacity")
    parser.add_argument("--words", type=int, default=30, help="of a prompt")
    parser.add_argument("--tokens", type=int, nargs=2, default=[16, 32], help="least and most")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with running_server(args) as server:
        result = asyncio.run(measure(server, args))
    if args.json:
        print(json.dumps({**result, "environment": environment()}))
        return
    show(result)


async def measure(server: RunningServer, args: argparse.Namespace) -> dict[str, Any]:
    least, most = args.tokens
    chats = Chats(server.model, args.words, (least, most))
    client = Client(server.port, chats)
    ready = memory(server)
    await client.closed_loop(args.clients, args.seconds / 4)  # what is made at first use
    started_s = time.monotonic()
    tally = await client.closed_loop(args.clients, args.seconds)
    if not tally.finished:
        raise SystemExit(f"no chat was finished without load: {dict(tally.ends)}")
    capacity = len(tally.finished) / (max(tally.finished)[0] - started_s)
    runs = []
    last = args.factors[-1]
    for _ in range(args.rounds):
        for factor in args.factors:
            seconds = args.long_seconds if factor == last else args.seconds
            runs.append(await run(server, client, factor, capacity, seconds, args.deadline))
    client.close()
    means = {
        factor: statistics.mean(row["goodput_per_s"] for row in runs if row["factor"] == factor)
        for factor in args.factors
    }
    best = max(means.values())
    stats = server.idle_stats()
    heavy = [row["memory"] for row in runs if row["factor"] == last]
    held = {"half": heavy[0]["half"], "end": heavy[-1]["end"]}
    result = {
        "capacity_per_s": round(capacity, 2),
        "capacity_latency_p50_s": percentile([took for _, took in tally.finished], 0.5),
        "runs": runs,
        "goodput_per_s": {str(factor): round(mean, 2) for factor, mean in means.items()},
        "best_goodput_per_s": round(best, 2),
        "ratio_of_last_to_best": round(means[last] / best, 3) if best else 0.0,
        "memory": {"ready": ready} | held,
        "used_blocks_in_the_end": stats["pool"]["used_blocks"],
        "queue_in_the_end": stats["queue"],
        "rejected": stats["rejected"],
        "deadlines_exceeded": stats["deadlines_exceeded"],
    }
    result["passes"] = {
        "goodput": result["ratio_of_last_to_best"] >= BAR,
        "memory_flat": besides_pool(held["end"]) <= besides_pool(held["half"]) * (1 + FLAT),
        "no_block_used": stats["pool"]["used_blocks"] == 0,
        "every_refusal_says_when": not any(row["without_retry_after"] for row in runs),
        "nothing_else": all(
            sum(row["ends"].get(end, 0) for end in ("finished", "refused", "cut off"))
            == row["sent"]
            for row in runs
        ),
    }
    return result


async def run(
    server: RunningServer,
    client: Client,
    factor: float,
    capacity: float,
    seconds: float,
    deadline_s: float,
) -> dict[str, Any]:
    """Send `factor` times what can be done, for a deadline and then for `seconds` that count."""
    held = {"start": memory(server)}
    own_cpu_s, cpu_s, started_s = time.process_time(), server.cpu_s(), time.monotonic()
    half: list[dict[str, int]] = []
    tally = await client.open_loop(
        factor * capacity,
        seconds + deadline_s,
        deadline_s,
        lambda: half.append(memory(server)),
    )
    own_cpu_s, cpu_s = time.process_time() - own_cpu_s, server.cpu_s() - cpu_s
    wall_s = time.monotonic() - started_s
    server.idle_stats()
    held |= {"half": half[0], "end": memory(server)}
    from_s = started_s + deadline_s
    good = [
        took_s
        for end_s, took_s in tally.finished
        if took_s <= deadline_s and from_s <= end_s <= from_s + seconds
    ]
    return {
        "factor": factor,
        "asked_per_s": round(factor * capacity, 2),
        "seconds": seconds,
        "goodput_per_s": round(len(good) / seconds, 2),
        "latency_p50_s": percentile(good, 0.5),
        "latency_p99_s": percentile(good, 0.99),
        "sent": tally.sent,
        "ends": dict(tally.ends),
        "finished_too_late": too_late(tally, deadline_s),
        "refusal_p50_s": percentile(tally.refused_s, 0.5),
        "refusal_p99_s": percentile(tally.refused_s, 0.99),
        "without_retry_after": tally.without_retry_after,
        "client_late_p99_s": percentile(tally.late_s, 0.99),
        "client_cores": round(own_cpu_s / wall_s, 3),
        "server_cores": round(cpu_s / wall_s, 3),
        "memory": held,
    }


def memory(server: RunningServer) -> dict[str, int]:
    """Return the kernel's counts of server and engine, and what of the KV pool is there."""
    stats = server.stats()
    return server.memory() | {"kv_pool": stats["memory"]["items"]["kv_pool"]["resident_bytes"]}


def besides_pool(held: dict[str, int]) -> int:
    """Proportional bytes without the pool, whose pages come as they are first written."""
    return held["pss"] - held["kv_pool"]


def too_late(tally: Tally, deadline_s: float) -> int:
    """Answers that came whole, after the deadline: work for nothing."""
    return sum(took_s > deadline_s for _, took_s in tally.finished)


def percentile(values: list[float], share: float) -> float | None:
    """Return the value that so many are not above; ``None`` of nothing."""
    if not values:
        return None
    return round(sorted(values)[min(len(values) - 1, int(share * len(values)))], 4)


def show(result: dict[str, Any]) -> None:
    print(
        f"capacity {result['capacity_per_s']} chats/s,"
        f" median latency {result['capacity_latency_p50_s']} s"
    )
    columns = "load  asked/s  goodput/s  p50 s   p99 s   finished  late  refused  cut off  "
    print(columns + "client cores  client late p99 s  PSS without KV pool: start/half/end")
    for row in result["runs"]:
        ends = row["ends"]
        memory = " / ".join(
            format_size(nbytes) for nbytes in map(besides_pool, row["memory"].values())
        )
        print(
            f"{row['factor']:>4g} {row['asked_per_s']:>8} {row['goodput_per_s']:>10}"
            f" {row['latency_p50_s'] or '-':>7} {row['latency_p99_s'] or '-':>7}"
            f" {ends.get('finished', 0):>9} {row['finished_too_late']:>5}"
            f" {ends.get('refused', 0):>8} {ends.get('cut off', 0):>8}"
            f" {row['client_cores']:>13} {row['client_late_p99_s']!s:>18}  {memory}"
        )
    print(f"goodput by factor, mean of the rounds: {result['goodput_per_s']}")
    print(f"last factor / best: {result['ratio_of_last_to_best']} (to be {BAR} or more)")
    print(f"refused for {result['rejected']}; deadlines over: {result['deadlines_exceeded']}")
    print(f"blocks used in the end: {result['used_blocks_in_the_end']}")
    for name, passes in result["passes"].items():
        print(f"{name:<26} {'passes' if passes else 'FAILS'}")


if __name__ == "__main__":
    main()
