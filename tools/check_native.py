"""Kernel tests over an instrumented build: AddressSanitizer and UndefinedBehaviorSanitizer.

Builds ``kvist._C`` with both into ``build/native``, lays it beside a copy of the sources, and
runs the kernel tests there, with the sanitizer's runtime loaded first: so every tensor that torch
allocates has a guarded edge. Loads and stores of matrix tiles are assembly, which it cannot see:
what they read is laid out by code that it can. Run ``python tools/check_native.py [pytest args]``;
takes a quarter of an hour on two cores. Needs gcc.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "native"
SITE = BUILD / "site"
TESTS = [
    "tests/contract/test_native_border.py",
    "tests/contract/test_native_border_fuzz.py",
    "tests/contract/test_linear.py",
    "tests/contract/test_kernels.py",
    "tests/contract/test_stack.py",
]
INSIDE = "KVIST_CHECK_NATIVE"


def build() -> None:
    """Configure, compile, and put sources and library side by side."""
    tool = Path(sys.executable).parent
    path = f"{tool}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "PATH": path}
    configure = [
        "cmake",
        "-S",
        str(ROOT),
        "-B",
        str(BUILD),
        "-DCMAKE_BUILD_TYPE=Release",
        "-DKVIST_SANITIZE=ON",
        f"-DPython_EXECUTABLE={sys.executable}",
    ]
    subprocess.run(configure, check=True, env=environment)
    jobs = str(os.cpu_count() or 1)
    subprocess.run(["cmake", "--build", str(BUILD), "-j", jobs], check=True, env=environment)
    shutil.rmtree(SITE, ignore_errors=True)
    shutil.copytree(
        ROOT / "src" / "kvist", SITE / "kvist", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    for library in BUILD.glob("_C*.so"):
        shutil.copy(library, SITE / "kvist")


def runtime() -> str:
    """Libraries that have to come before all others: the sanitizer's runtime, and that of C++.

    Python does not load the latter, and the sanitizer looks for what throws exceptions at once.
    """

    def path(name: str) -> str:
        asked = ["gcc", f"-print-file-name={name}"]
        return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()

    return f"{path('libasan.so')}:{path('libstdc++.so')}"


def inside(arguments: list[str]) -> int:
    """Run pytest on the copy, whatever an editable install would have found first."""
    import pytest

    sys.meta_path[:] = [
        finder
        for finder in sys.meta_path
        if "Editable" not in type(finder).__name__ and "Redirecting" not in type(finder).__name__
    ]
    sys.path.insert(0, str(SITE))
    from kvist import _C

    print(f"instrumented: {_C.__file__}")
    return int(pytest.main([*TESTS, "-q", "--capture=sys", "-p", "no:cacheprovider", *arguments]))


def main() -> int:
    """Build, then run this file again under the sanitizer's runtime."""
    if os.environ.get(INSIDE):
        return inside(sys.argv[1:])
    build()
    environment = {
        **os.environ,
        INSIDE: "1",
        # For processes that tests start.
        "PYTHONPATH": str(SITE),
        "LD_PRELOAD": runtime(),
        # Python and torch keep things to the end; only memory errors are of interest.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
        # Instrumented threads that spin for each other on cores they share take hours.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive"),
    }
    command = [sys.executable, __file__, *sys.argv[1:]]
    return subprocess.run(command, check=False, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
