"""Kvist beside its peers: same model, same prompts, same greedy lengths, one engine at a time.

Each peer is installed in a venv of its own below the user cache. The engines then take turns, a
process each, several rounds; what is slow is measured in the first round only. A full run takes
15 minutes at most, beside the installing.

    python -m benchmarks.peers --json peers.json
    python -m benchmarks.peers --peers kvist,vllm --resume peers.json
    python -m benchmarks.peers --peers kvist --measures streams32,attention
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Set
from pathlib import Path

from benchmarks.peers.bandwidth import best_read, read_bandwidth
from benchmarks.peers.engines import CONTENDERS, PEERS, Contender, command, environ, options
from benchmarks.peers.environments import ENVIRONMENTS, SetupError, prepare
from benchmarks.peers.measures import FULL, OWN, QUICK, Lengths, measure_names
from benchmarks.peers.model import ModelFiles, find_model
from benchmarks.peers.results import Record, Results
from benchmarks.peers.table import to_markdown
from benchmarks.peers.turns import Launch, Turn, take_turn

from kvist.engine.weights.userdir import cache_dir, make_dir
from kvist.lab.report import environment

_SLOW_S = 20.0
"""A measure that takes longer is not repeated."""
_LIMIT_S, _LONG_LIMIT_S = 120.0, 1200.0
"""For one answer of an engine; the second where nothing is spared."""
_TURN_GUESS_S = 45.0
"""Of a turn that nobody took yet."""


def main() -> int:
    args = _arguments()
    # So that a polite end, too, ends the engine whose turn it is.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    lengths = QUICK if args.quick else FULL
    results = Results(lengths)
    if args.resume is not None and args.resume.exists():
        try:
            results = Results.load(args.resume, lengths)
        except (OSError, ValueError, TypeError, KeyError) as error:
            print(f"--resume: {error}", file=sys.stderr)
            return 2
    kept = args.json or args.resume
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    os.sched_setaffinity(0, cores)
    chosen = [c for c in CONTENDERS if c.peer in args.peers]
    versions = _prepare_all(chosen, results, args.torch_index)
    model = find_model(_say)
    model.touch()
    said = shlex.join(["python", "-m", "benchmarks.peers", *sys.argv[1:]])
    run = {**environment(), "command": said, "cores": cores}
    loops = {name: rate.median for name, rate in read_bandwidth(len(cores)).items()}
    results.runs.append({**run, "bandwidth": loops})
    bench = _Bench(
        results, model, cores, kept, args.measures, quick=args.quick, spares=not args.all
    )
    budget_s = math.inf if args.all else args.minutes * 60
    bench.take_rounds(chosen, versions, args.rounds, budget_s)
    print(to_markdown(results), end="")
    return 0


class _Bench:
    """The rounds of one invocation."""

    def __init__(
        self,
        results: Results,
        model: ModelFiles,
        cores: list[int],
        kept: Path | None,
        wanted: frozenset[str],
        *,
        quick: bool,
        spares: bool,
    ) -> None:
        self._results = results
        self._model = model
        self._cores = cores
        self._kept = kept
        self._wanted = wanted
        self._quick = quick
        self._spares = spares
        self._folder = make_dir(cache_dir() / "peers")

    def take_rounds(
        self,
        chosen: list[Contender],
        versions: dict[str, dict[str, str]],
        rounds: int,
        budget_s: float,
    ) -> None:
        """Let the contenders take turns until all had theirs, or no more fit into the budget."""
        begun_s = time.monotonic()
        for number in range(rounds):
            for contender in chosen:
                record = self._results.record(contender.label)
                if record.is_out or number >= contender.rounds:
                    continue
                record.versions = versions[contender.peer]
                if self._spares:
                    record.reasons |= contender.skips
                wanted = self._wanted if contender.is_ours else self._wanted - OWN
                left_out = left_out_of(record, number, wanted, self._results.lengths)
                if wanted <= left_out:
                    continue
                left_s = budget_s - (time.monotonic() - begun_s)
                costs_s = [s for name, s in record.cost_s.items() if name not in left_out]
                needed_s = sum(costs_s) or _TURN_GUESS_S
                if needed_s > left_s:
                    reason = f"no time: a turn takes about {needed_s:.0f} s, {left_s:.0f} s left"
                    _say(f"{contender.label} [{number + 1}]: {reason}")
                    if not record.turns:
                        record.reasons["start"] = reason
                    continue
                self._take(contender, record, number, left_out)
                if self._kept is not None:
                    self._results.save(self._kept)

    def _take(self, contender: Contender, record: Record, number: int, left_out: set[str]) -> None:
        compiled = self._folder / f"compiled-{contender.peer}"
        if contender.compiles and not record.turns and not self._quick:
            shutil.rmtree(compiled, ignore_errors=True)
        is_cold = contender.compiles and not compiled.exists()
        if contender.compiles:
            make_dir(compiled)
        name = "".join(c if c.isalnum() else "-" for c in contender.label)
        launch = Launch(
            command(contender),
            environ(contender, self._cores, compiled),
            options(contender, self._model, len(self._cores)),
            make_dir(self._folder / "logs") / f"{name}.log",
            keeps_prefixes=contender.keeps_prefixes,
            is_ours=contender.is_ours,
            is_cold=is_cold,
        )
        turn = Turn(
            self._results.lengths,
            f"round {number}",
            left_out,
            lambda text: _say(f"{contender.label} [{number + 1}]: {text}"),
            _LIMIT_S if self._spares else _LONG_LIMIT_S,
            lambda: best_read(len(self._cores)),
        )
        take_turn(launch, record, turn)
        record.turns += not record.is_out


def left_out_of(record: Record, number: int, wanted: Set[str], lengths: Lengths) -> set[str]:
    """Return the measures that a turn of this round leaves out.

    Those that were slow or failed, were taken in this round already (results are gone on with, may
    be with other measures than before), or are not wanted.
    """
    slow = {name for name, s in record.cost_s.items() if s > _SLOW_S and name != "start"}
    had = {name for name, turns in record.taken.items() if turns > number}
    unwanted = set(measure_names(lengths).values()) - wanted
    return slow | record.reasons.keys() | had | unwanted


def _prepare_all(
    chosen: list[Contender], results: Results, torch_index: str | None
) -> dict[str, dict[str, str]]:
    """Make the venvs; a peer whose venv fails is out, with the reason."""
    versions = {"kvist": {**environment()["versions"], "kvist": _own_commit()}}
    for contender in chosen:
        if contender.peer in versions:
            continue
        try:
            versions[contender.peer] = prepare(ENVIRONMENTS[contender.peer], _say, torch_index)
        except SetupError as error:
            versions[contender.peer] = {}
            for same in chosen:
                if same.peer == contender.peer:
                    results.record(same.label).reasons["start"] = str(error)
            _say(str(error))
    return versions


def _own_commit() -> str:
    """Say which state of the sources is measured; the version's number says too little."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    folder = Path(__file__).resolve().parent
    try:
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.SubprocessError):
        return "of no repository"
    return f"at commit {ran.stdout.strip()}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--peers", type=_peers, default=PEERS, help=f"of {','.join(PEERS)}")
    parser.add_argument("--measures", default=None, help=f"of {','.join(measure_names(FULL))}; all")
    parser.add_argument("--quick", action="store_true", help="short lengths: does it run at all?")
    parser.add_argument("--rounds", type=int, default=None, help="turns of each; 3, quick 1")
    parser.add_argument(
        "--minutes", type=float, default=14.0, help="no turn begins that ends later"
    )
    parser.add_argument("--all", action="store_true", help="spare nobody anything: takes an hour")
    parser.add_argument("--threads", type=int, default=None, help="cores to use; all")
    parser.add_argument("--json", type=Path, help="kept up to date after every turn")
    parser.add_argument("--resume", type=Path, help="go on with the results in this file")
    parser.add_argument("--torch-index", help="one more index for pip, with torch for CPUs")
    args = parser.parse_args()
    if args.rounds is None:
        args.rounds = 1 if args.quick else 3
    try:
        args.measures = wanted_measures(args.measures, QUICK if args.quick else FULL)
    except ValueError as error:
        parser.error(str(error))
    return args


def wanted_measures(text: str | None, lengths: Lengths) -> frozenset[str]:
    """Return the measures that a command line asks for, by their names in a turn.

    Raises
    ------
    ValueError
        For a name that there is not.
    """
    known = measure_names(lengths)
    names = list(known) if text is None else [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"--measures: no {', '.join(unknown)}; of {', '.join(known)}")
    return frozenset(known[name] for name in names)


def _peers(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no peer {', '.join(unknown)}; of {', '.join(PEERS)}")
    return names


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
