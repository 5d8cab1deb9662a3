"""What every test runs under. Imports no torch: the same tests run where it is not installed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Set before anything imports huggingface_hub, which reads it once: no test may wait for a network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# The same cases on every run: a red test is red for everyone. `thorough` looks for new ones.
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("thorough", deadline=None, max_examples=2_000, print_blob=True)
settings.load_profile(os.environ.get("KVIST_HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Return the folder of real traces and texts that KVIST_DATA names; skip without."""
    value = os.environ.get("KVIST_DATA")
    if not value:
        pytest.skip("KVIST_DATA is not set: no folder of traces and texts to read")
    path = Path(value)
    if not path.is_dir():
        pytest.fail(f"KVIST_DATA={value} is not a folder")
    return path


@pytest.fixture
def small_device(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 16 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root mounts a tmpfs to be filled up")
    place = tmp_path / "device"
    place.mkdir(mode=0o700)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m,mode=0700", "tmpfs", str(place)],
        check=False,
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)
