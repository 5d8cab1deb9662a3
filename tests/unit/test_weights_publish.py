"""A folder of the user cache is there whole, made once, or not there at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvist.engine.weights.userdir import cache_dir, locked, make_dir, publish_dir, write_atomically
from kvist.errors import ConfigError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVIST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _fill(work: Path) -> None:
    (work / "out" / "file").write_text("whole")
    (work / "scratch").write_text("thrown away")


def _leftovers(target: Path) -> list[str]:
    return sorted(path.name for path in target.parent.iterdir() if path != target)


def test_a_folder_is_published_whole_and_scratch_is_gone(cache):
    target = cache / "models" / "m"
    assert publish_dir(target, _fill) == target
    assert [path.name for path in target.iterdir()] == ["file"]
    assert _leftovers(target) == []


def test_a_folder_that_is_there_is_not_made_again(cache):
    target = publish_dir(cache / "models" / "m", _fill)

    def never(work: Path) -> None:
        raise AssertionError("built twice")

    assert publish_dir(target, never) == target


def test_a_failed_build_leaves_nothing(cache):
    target = cache / "models" / "m"

    def fail(work: Path) -> None:
        _fill(work)
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        publish_dir(target, fail)
    assert not target.exists()
    assert _leftovers(target) == []
    publish_dir(target, _fill)
    assert (target / "file").read_text() == "whole"


def test_a_killed_build_leaves_nothing_that_is_used(cache):
    target = cache / "models" / "m"
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from kvist.engine.weights.userdir import publish_dir\n"
        "def build(work):\n"
        "    (work / 'out' / 'half').write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "publish_dir(Path(sys.argv[1]), build)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(target)], check=False)
    assert ran.returncode == -9
    assert not target.exists()
    assert len(_leftovers(target)) == 1  # the scratch folder of the dead one
    publish_dir(target, _fill)  # its lock died with it
    assert [path.name for path in target.iterdir()] == ["file"]
    assert _leftovers(target) == []


def test_of_two_processes_one_builds_and_both_end_well(cache, tmp_path):
    target, built = cache / "models" / "m", tmp_path / "built"
    code = (
        "import sys, time; from pathlib import Path\n"
        "from kvist.engine.weights.userdir import publish_dir\n"
        "def build(work):\n"
        "    with open(sys.argv[2], 'a') as file: file.write('x')\n"
        "    time.sleep(1)\n"
        "    (work / 'out' / 'file').write_text('whole')\n"
        "print((publish_dir(Path(sys.argv[1]), build) / 'file').read_text())\n"
    )
    command = [sys.executable, "-c", code, str(target), str(built)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0] for process in both] == ["whole\n", "whole\n"]
    assert built.read_text() == "x"


def test_who_waits_is_told_so(cache):
    code = (
        "from kvist.engine.weights.userdir import locked\n"
        "with locked('k', lambda: print('waiting', flush=True)): print('in', flush=True)\n"
    )
    with locked("k"):
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "waiting\n"
    assert child.communicate()[0] == "in\n"


def test_published_files_are_readable_as_the_umask_says(cache):
    def private(work: Path) -> None:
        (work / "out" / "file").write_text("x")
        (work / "out" / "file").chmod(0o600)

    target = publish_dir(cache / "models" / "m", private)
    assert (target / "file").stat().st_mode & 0o777 == target.stat().st_mode & 0o666


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"KVIST_CACHE": "/a/b"}, "/a/b"),
        ({"KVIST_CACHE": "", "XDG_CACHE_HOME": "/x"}, "/x/kvist"),
        ({"KVIST_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/h/n"}, "/h/n/.cache/kvist"),
        ({"KVIST_CACHE": "~/k", "HOME": "/h/n"}, "/h/n/k"),
    ],
)
def test_where_the_cache_is(monkeypatch, variables, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_dir() == Path(expected)


def test_a_cache_that_cannot_be_made_names_the_variable(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="KVIST_CACHE"):
        make_dir(tmp_path / "file" / "cache")


def test_a_failed_write_keeps_the_old_text(tmp_path):
    path = tmp_path / "record"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\udc80")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["record"]
