"""House rules that no linter knows: nothing hidden from the import graph, small files, no leaks.

Owns the three checks below and nothing of what the files say. Run from anywhere:
``python tools/house.py``; exits 1 and says what, where and what to do.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src"
MAX_LINES = 400
MAX_FILE_BYTES = 1_500_000

# Written so that no pattern matches itself.
LEAKS = {
    "a path of one machine": re.compile(r"(?<![\w./])/(?:work|root|opt|farm|home/\w+|tmp/\w+)/"),
    "a registry's host": re.compile(r"\b(?:pypi|pythonhosted|npmjs|pytorch)\.org\b"),
}


def unseen_modules() -> Iterator[str]:
    """Yield a complaint for each file that the import contracts cannot see, and the reverse.

    A folder without ``__init__.py`` is invisible to the graph, and with it every import inside:
    a contract over a graph that misses modules holds nothing.
    """
    sys.path.insert(0, str(SOURCES))
    graph = grimp.build_graph("kvist", cache_dir=None)
    files = {_module_name(path): path for path in (SOURCES / "kvist").rglob("*.py")}
    for name in sorted(files.keys() - graph.modules):
        yield (
            f"{files[name].relative_to(ROOT)}: the import graph does not see it; "
            "is an __init__.py missing in its folder?"
        )
    for name in sorted(graph.modules - files.keys()):
        yield f"{name}: in the import graph, but not below src/kvist; is another kvist installed?"
    print(f"modules: the import graph sees {len(graph.modules)}, src/kvist has {len(files)}")


def large_files() -> Iterator[str]:
    """Yield a complaint for each source file too long to be held in the head."""
    sizes = {
        path: len(path.read_text(encoding="utf-8").splitlines())
        for pattern in ("src/**/*.py", "csrc/*.[ch]pp", "tools/*.py")
        for path in ROOT.glob(pattern)
    }
    ranked = sorted(sizes.items(), key=lambda item: -item[1])
    for path, lines in ranked:
        if lines > MAX_LINES:
            yield f"{path.relative_to(ROOT)}: {lines} lines, at most {MAX_LINES}; cut it in two"
    total, median = sum(sizes.values()), ranked[len(ranked) // 2][1]
    print(f"lines: {total} in {len(sizes)} files, median {median}; the longest:")
    for path, lines in ranked[:5]:
        print(f"  {lines:4d} {path.relative_to(ROOT)}")


def leaks() -> Iterator[str]:
    """Yield a complaint for each tracked line that names a machine or a registry's host."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    if listing.returncode:
        yield f"{ROOT.name}: git cannot list its files, so none was read: {listing.stderr.strip()}"
        return
    names = [name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]
    for name in names:
        path = ROOT / name
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            yield f"{name}: {size} bytes; weights and data do not belong in the repository"
            continue
        text = path.read_bytes().decode("utf-8", errors="ignore")
        for number, line in enumerate(text.splitlines(), start=1):
            for what, pattern in LEAKS.items():
                if found := pattern.search(line):
                    yield f"{name}:{number}: names {what} ({found.group()!r}); leave it out"
    print(f"hygiene: {len(names)} files read")


def _module_name(path: Path) -> str:
    parts = path.relative_to(SOURCES).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def main() -> int:
    """Run all checks; 1 if any complained."""
    complaints = [text for check in (unseen_modules, large_files, leaks) for text in check()]
    for text in complaints:
        print(text, file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
