"""What the bill says a server holds, against what the kernel says.

The bill's resident column is read from ``GET /v1/kv/stats``: rows of the engine, and the server's.
The kernel's word is the proportional set size (``smaps_rollup``) of server and engine. They are
compared at start and after load; the difference is to be 5 % and 150 MB at most.

The engine's rows have one called ``unaccounted`` that makes them add up to its resident set, so the
same is said without it: how far the rows that have a name explain what is there.

Pages that other processes map too, such as torch's libraries, count in part only: run it while no
other process of the same environment runs, or the proportional set size comes out too small.

    python benchmarks/bill.py --json
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

from open_loop import Chats, Client
from running_server import RunningServer, add_arguments, running_server

from kvist.lab.report import environment, print_table

SHARE, BYTES = 0.05, 150_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=30, help="of load")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--words", type=int, default=200, help="of a prompt")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with running_server(args) as server:
        start = compare(server)
        client = Client(server.port, Chats(server.model, args.words, (args.tokens, args.tokens)))
        tally = asyncio.run(client.closed_loop(args.clients, args.seconds))
        loaded = compare(server)
    result = {"start": start, "after_load": loaded, "ends": dict(tally.ends)}
    if args.json:
        print(json.dumps({**result, "environment": environment()}))
        return
    show(start, loaded)
    print(f"load: {dict(tally.ends)}")


def compare(server: RunningServer) -> dict[str, Any]:
    memory = server.idle_stats()["memory"]
    held = server.memory()
    pss_bytes = held["pss"]
    rows = {item: row["resident_bytes"] for item, row in memory["items"].items()}
    rows["server"] = memory["server_bytes"]
    bill_bytes = sum(rows.values())
    most_bytes = int(SHARE * pss_bytes) + BYTES
    named_off_bytes = pss_bytes - (bill_bytes - rows["unaccounted"])
    return {
        "rows": rows,
        "bill_bytes": bill_bytes,
        "pss_bytes": pss_bytes,
        "rss_bytes": held["rss"],
        "anonymous_bytes": held["anonymous"],
        "off_bytes": pss_bytes - bill_bytes,
        "named_rows_off_bytes": named_off_bytes,
        "allowed_bytes": most_bytes,
        "passes": abs(pss_bytes - bill_bytes) <= most_bytes,
        "named_rows_pass": abs(named_off_bytes) <= most_bytes,
    }


def show(start: dict[str, Any], loaded: dict[str, Any]) -> None:
    def both(name: str, key: str) -> list[str]:
        return [name, f"{start[key] / 1e6:,.1f}", f"{loaded[key] / 1e6:,.1f}"]

    table = [
        [item, f"{start['rows'][item] / 1e6:,.1f}", f"{loaded['rows'][item] / 1e6:,.1f}"]
        for item in start["rows"]
    ]
    table.append(both("bill", "bill_bytes"))
    table.append(both("PSS of server and engine", "pss_bytes"))
    table.append(both("RSS, shared pages in full", "rss_bytes"))
    table.append(both("anonymous part", "anonymous_bytes"))
    table.append(both("PSS - bill", "off_bytes"))
    table.append(both("PSS - rows with a name", "named_rows_off_bytes"))
    table.append(both("allowed", "allowed_bytes"))
    for name, key in (("bill", "passes"), ("rows with a name", "named_rows_pass")):
        words = ["passes" if side[key] else "FAILS" for side in (start, loaded)]
        table.append([f"{name} within", *words])
    print_table("Memory in MB (10^6 bytes)", ["item", "at start", "after load"], table)


if __name__ == "__main__":
    main()
