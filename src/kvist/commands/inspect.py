"""`kvist inspect`: look after a directory of the disk tier. Parse, call, print.

Exit codes: 0 all is well, 1 damage was found, 2 the directory or file cannot be used.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvist.commands.terminal import bad_input, out
from kvist.errors import ConfigError
from kvist.sizes import format_size

if TYPE_CHECKING:
    from kvist.tiers.checksum import SegmentChecksum


_HOUR_S = 3600.0


def inspect(
    directory: Annotated[Path, typer.Argument(help="Of a disk tier.")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read everything and check it; exit 1 if damaged.")
    ] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Save what can be saved, drop what is damaged.")
    ] = False,
    gc: Annotated[
        bool, typer.Option("--gc", help="Free what writers that are gone left behind.")
    ] = False,
    older_than: Annotated[
        float | None,
        typer.Option(help="With --gc: also blocks stored so many hours ago.", min=0.0),
    ] = None,
    backup: Annotated[
        Path | None, typer.Option(help="Write all blocks to a file, also while serving.")
    ] = None,
    restore: Annotated[
        Path | None, typer.Option(help="Store the blocks of such a file, also while serving.")
    ] = None,
    tier_key: Annotated[
        str, typer.Option(envvar="KVIST_TIER_KEY", help="What the tier was made with, if any.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What lies in a disk tier, by model, format and tenant; is it whole; mend, copy, sweep it.

    kvist inspect DIR

    kvist inspect DIR --verify --json

    kvist inspect DIR --gc --older-than 168

    kvist inspect DIR --backup blocks.kvist
    """
    from kvist.tiers.checksum import SegmentChecksum

    with bad_input():
        checksum = SegmentChecksum(tier_key)
        if older_than is not None and not gc:
            raise ConfigError("--older-than says what --gc takes; give both")
        max_age_s = None if older_than is None else older_than * _HOUR_S
        results = _work(directory, checksum, verify, repair, gc, max_age_s, backup, restore)
    if as_json:
        out.print_json(json.dumps(results))
    else:
        _show(results)
    found = [results.get(name) for name in ("verify", "repair")]
    if any(verdict and not verdict["is_whole"] for verdict in found):
        raise typer.Exit(1)


def _work(
    directory: Path,
    checksum: SegmentChecksum,
    verify: bool,
    repair: bool,
    gc: bool,
    max_age_s: float | None,
    backup: Path | None,
    restore: Path | None,
) -> dict[str, Any]:
    """Do what was asked, what changes the store first; return each result by its option."""
    from kvist.tiers.disk import archive, care
    from kvist.tiers.disk.opening import open_store

    results: dict[str, Any] = {}
    now_s = time.time()
    if repair:
        verdict = care.repair(directory, checksum, now_s)
        results["repair"] = {**asdict(verdict), "is_whole": verdict.is_whole}
    budget = None
    if restore is not None and not directory.exists():
        budget = archive.budget_in(restore)
    opened = open_store(directory, budget, checksum=checksum)
    store = opened.store
    try:
        if opened.notes:
            results["notes"] = opened.notes
        if restore is not None:
            results["restore"] = asdict(archive.restore(store, restore))
        if gc:
            results["gc"] = asdict(care.collect(store, directory, max_age_s, now_s))
        if verify:
            verdict = care.verify(store)
            results["verify"] = {**asdict(verdict), "is_whole": verdict.is_whole}
        if backup is not None:
            results["backup"] = asdict(archive.backup(store, backup))
        results["store"] = asdict(care.inspect(store, directory, now_s))
    finally:
        store.close()
    return results


def _show(results: dict[str, Any]) -> None:
    from kvist.lab.report import print_table

    for note in results.get("notes", ()):
        out.print(note, markup=False, highlight=False, soft_wrap=True)
    for name in ("repair", "restore", "gc", "verify", "backup"):
        if name in results:
            facts = ", ".join(f"{key} {value}" for key, value in results[name].items())
            out.print(f"{name}: {facts}", markup=False, highlight=False, soft_wrap=True)
    store: dict[str, Any] = results["store"]
    out.print(
        f"{store['num_blocks']} blocks in {format_size(store['used_room_bytes'])} of"
        f" {format_size(store['room_bytes'])}; slab {format_size(store['slab_bytes'])}, index"
        f" {format_size(store['index_bytes'])}, budget {format_size(store['budget_bytes'])};"
        f" checksums {store['checksums']}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    columns = ("model", "format", "tenant", "blocks", "bytes", "hits", "oldest", "newest")
    rows = [
        [
            one["model"] or one["digest"][:12],
            one["format"],
            one["tenant"][:12],
            str(one["num_blocks"]),
            format_size(one["room_bytes"]),
            str(one["hits"]),
            _age(one["oldest_s"]),
            _age(one["newest_s"]),
        ]
        for one in store["namespaces"]
    ]
    print_table("namespaces", columns, rows, out)


def _age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"
