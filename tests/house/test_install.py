"""What pip installs from this tree: with a compiler the C++ kernels, without one a pure package.

Guards: a machine with no (or a broken) compiler must still get a working kvist that says why its
kernels are slower; a machine with one must not end up without them unnoticed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SELECT_KERNELS = """
import torch
import kvist
from kvist.kernels import dispatch
from kvist.spec import BlockLayout
layout = BlockLayout(
    num_layers=1, num_kv_heads=1, key_dim=32, value_dim=32, block_size=16, itemsize=4
)
kernels = dispatch.select(torch.device("cpu"), torch.float32, layout, num_query_heads=1)
print(kvist.__file__)
for operation, backend, why in kernels.report:
    print(operation, backend, why)
"""
# Minutes only where several do this at once on a machine of two cores.
pytestmark = pytest.mark.timeout(900)

COMPILERS = ("c++", "g++", "clang++")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a copy of what a build reads: the install must not touch the working tree."""
    pytest.importorskip("scikit_build_core", reason="builds without isolation: needs the dev extra")
    pytest.importorskip("nanobind", reason="builds without isolation: needs the dev extra")
    copy = tmp_path / "tree"
    copy.mkdir()
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("src", "csrc"):
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    return copy


def install(tree: Path, target: Path, **env: str) -> str:
    """Install `tree` into `target` from what is already here; return what pip said."""
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--verbose"]
    pip = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(tree)],
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert pip.returncode == 0, pip.stdout + pip.stderr
    return pip.stdout


def python(target: Path, code: str) -> str:
    """Run `code` with the package in `target`, and no other kvist, in front of this environment."""
    # -S: the .pth file of an editable install would put the working tree first.
    path = os.pathsep.join([str(target), sysconfig.get_path("purelib")])
    run = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_install_without_a_compiler_is_pure_and_says_so(tree: Path, tmp_path: Path):
    dispatch = pytest.importorskip("kvist.kernels.dispatch", reason="needs torch")
    target = tmp_path / "site"
    broken = shutil.which("false")
    assert broken is not None

    said = install(tree, target, CC=broken, CXX=broken)

    assert "-py3-none-any.whl" in said
    assert not list(target.rglob("_C*.so"))
    where, *report = python(target, SELECT_KERNELS).splitlines()
    assert Path(where).is_relative_to(target)
    assert [line.split()[0] for line in report] == list(dispatch.OPERATIONS)
    assert not [line for line in report if "cpp" in line]
    assert "kvist._C" in report[0]  # the start-up log names what is missing


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C++ compiler here")
def test_install_with_a_compiler_has_the_kernels(tree: Path, tmp_path: Path):
    target = tmp_path / "site"

    install(tree, target)

    code = "import torch, kvist._C as c; print(c.__file__, c.version())"
    library, version = python(target, code).split()
    assert Path(library).parent == target / "kvist"
    assert version == distribution("kvist").version


@pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C++ compiler here")
def test_this_environment_has_the_kernels():
    pytest.importorskip("torch")
    try:
        distribution("kvist")
    except PackageNotFoundError:
        pytest.skip("kvist runs from its sources here, not installed")

    assert importlib.util.find_spec("kvist._C") is not None, (
        "installed with a compiler at hand, but kvist._C was not built; "
        "`pip install --verbose .` shows why"
    )
