"""A GGUF file's converted form in the user cache: found, or made once.

Owns its key (content of the file and `CONVERTER_VERSION`), its making in a process of its own, and
the note kept beside it. What the conversion does stands in `kvist.engine.weights.gguf_import`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvist.engine.weights.progress import Progress
from kvist.engine.weights.userdir import cache_dir, publish_dir
from kvist.errors import ModelError

CONVERTER_VERSION = 1
"""Raise it when the same GGUF file would come out otherwise: every model is then made anew."""

SOURCE_NOTE = "kvist-source.json"
"""What the converted folder was made from, for people and for `read_note`."""

DOCUMENTS = "documents"
"""Folder inside the converted one with licence, terms and notices that came with the file."""

_STEPS = 5  # what `gguf_import` reports, and one for the checks before it


def converted_dir(gguf_sha256: str) -> Path:
    """Where the converted form of the GGUF file with this hex digest lies, or would."""
    return cache_dir() / "models" / f"gguf-{gguf_sha256[:32]}-c{CONVERTER_VERSION}"


def ensure_converted(
    gguf_sha256: str,
    origin: str,
    provide: Callable[[Path], Path],
    progress: Progress,
) -> Path:
    """The converted folder of a GGUF file; makes it if it is not there.

    Of several processes one converts and the others wait. An interrupted conversion leaves nothing
    that is used later.

    Parameters
    ----------
    gguf_sha256
        Hex digest of the file's content.
    origin
        Where it comes from, in words, for the note.
    provide
        Given a scratch folder, returns the GGUF file: in it, or elsewhere. May put papers to keep
        in `scratch / DOCUMENTS`. Only called if the folder has to be made.
    progress
        Told of each step.

    Raises
    ------
    ModelError
        If the file cannot be converted; says why.
    """

    def build(work: Path) -> None:
        out = work / "out"
        notes = run_import(provide(work), out, progress)
        papers = work / DOCUMENTS
        if papers.is_dir():
            papers.rename(out / DOCUMENTS)
        note = {
            "origin": origin,
            "gguf_sha256": gguf_sha256,
            "converter_version": CONVERTER_VERSION,
            "notes": notes,
        }
        (out / SOURCE_NOTE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")

    def waiting() -> None:
        progress("waiting for another process that is converting it", 0, _STEPS)

    return publish_dir(converted_dir(gguf_sha256), build, waiting)


def read_note(path: Path) -> dict[str, Any]:
    """The note of a converted folder; empty for any other folder."""
    try:
        note = json.loads((path / SOURCE_NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def run_import(gguf: Path, out: Path, progress: Progress) -> list[str]:
    """Run `gguf_import` as a program and pass its progress on; returns its notes.

    A process of its own, because the conversion takes several times the model's memory and its
    allocator would keep it, where the engine has to say for every byte what it is for.

    Raises
    ------
    ModelError
        If it fails; with its own message, or the end of what it printed.
    """
    package_root = str(Path(__file__).resolve().parents[2])
    paths = [package_root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-P", "-m", "kvist.engine.weights.gguf_import", str(gguf), str(out)]
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as noise,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=noise, text=True, encoding="utf-8", env=env
        ) as child,
    ):
        try:
            progress("opening the GGUF file", 0, _STEPS)
            said = _listen(child, progress)
        except BaseException:
            child.kill()  # an interrupt ends the conversion too, not only the waiting for it
            raise
        if "notes" in said:
            return [str(note) for note in said["notes"]]
        if "error" in said:
            raise ModelError(str(said["error"]))
        code = child.wait()
        noise.seek(0)
        lines = noise.read().strip().splitlines() or ["it printed nothing"]
    if code < 0:
        raise ModelError(
            f"the conversion of {gguf} was killed by signal {-code}; signal 9 is mostly a lack of "
            f"memory: it needs about {8 * gguf.stat().st_size / 2**30:.1f} GiB"
        )
    raise ModelError(f"the conversion of {gguf} failed (exit {code}): {lines[-1]}")


def _listen(child: subprocess.Popen[str], progress: Progress) -> dict[str, Any]:
    """Pass on progress until the child's last word, or its end."""
    if child.stdout is None:
        return {}
    for done, line in enumerate(child.stdout, start=1):
        said: dict[str, Any] = json.loads(line)
        if "step" not in said:
            return said
        progress(str(said["step"]), done, _STEPS)
    return {}
