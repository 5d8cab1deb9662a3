"""Content digests of model files, computed once and kept.

Owns what counts as "the same weights" and where the answer is kept. The digest is part of every
block's key (law 2), so two models whose arithmetic differs must never share one. Does not read what
the files mean.

A model's digest stands in `.kvist-digest.json` beside its weights, or in the user cache where that
folder cannot be written. It is believed while every file's size and modification time (ns) are
those that were hashed; whoever rewrites a file and resets both has to delete it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvist.engine.weights.userdir import cache_dir, make_dir, write_atomically
from kvist.errors import ConfigError, ModelError

SIDECAR = ".kvist-digest.json"
_VERSION = 1
_CHUNK_BYTES = 16 << 20
_MAX_THREADS = 8
# What transformers writes anew with every version, and what only says where a model came from. The
# dtype is not here: K and V are computed in the engine's, which a block's key names by itself.
_VOLATILE = frozenset(
    {
        "transformers_version",
        "_name_or_path",
        "_model_name_or_path",
        "_commit_hash",
        "torch_dtype",
        "dtype",
        "use_cache",
    }
)


def weights_digest(path: Path) -> bytes:
    """Digest of everything in a model folder that changes the model's arithmetic, 32 bytes.

    BLAKE2b-256 over the name, length and content of every weight file and over `config.json` in
    canonical form, without the fields that change nothing. Full content: a fine-tune that differs
    in one weight has another digest.

    Each file is cut in chunks of 16 MiB that threads hash side by side (hashing and reading release
    the GIL), and the chunks' digests are hashed in order.

    Parameters
    ----------
    path
        Folder with `config.json` and `*.safetensors` (or, where there are none, `*.bin`).

    Raises
    ------
    ModelError
        If there is no such folder, configuration or weight file.

    Notes
    -----
    Cost: one read of all weights the first time (about 1 GB/s a thread), a few stats later on.
    Any thread may call it; two at once compute the same twice.
    """
    files = weight_files(path)
    config = _config_digest(path / "config.json")
    stamps = {file.name: _stamp(file) for file in files}
    kept = _read_kept(path, stamps)
    if kept is None:
        kept = hash_files(files)
        # A file that was still being written: its digest would be kept under a wrong stamp.
        if {file.name: _stamp(file) for file in files} == stamps:
            _keep(path, stamps, kept)
    top = hashlib.blake2b(digest_size=32, person=b"kvist-weights-1")
    for name in sorted(kept):
        for part in (name.encode(), bytes.fromhex(kept[name])):
            top.update(len(part).to_bytes(8, "little") + part)
    top.update(config)
    return top.digest()


def weight_files(path: Path) -> list[Path]:
    """The weight files of a model folder, by name: `*.safetensors`, else `*.bin`.

    Raises
    ------
    ModelError
        If there are none.
    """
    for pattern in ("*.safetensors", "*.bin"):
        files = sorted(file for file in path.glob(pattern) if file.is_file())
        if files:
            return files
    raise ModelError(
        f"{path} holds no weights (*.safetensors or *.bin); give the folder that has the model's "
        "config.json and weights side by side"
    )


def hash_files(files: Sequence[Path]) -> dict[str, str]:
    """Hex digest of each file's full content, by file name; threads share the chunks."""
    jobs = [
        (file, offset)
        for file in files
        for offset in range(0, max(file.stat().st_size, 1), _CHUNK_BYTES)
    ]
    threads = max(1, min(_MAX_THREADS, os.cpu_count() or 1, len(jobs)))
    with ThreadPoolExecutor(threads, thread_name_prefix="kvist-digest") as pool:
        chunks = list(pool.map(_hash_chunk, jobs))
    tops = {file: hashlib.blake2b(digest_size=32, person=b"kvist-file-1") for file in files}
    for (file, _), (digest, length) in zip(jobs, chunks, strict=True):
        tops[file].update(length.to_bytes(8, "little") + digest)
    return {file.name: top.hexdigest() for file, top in tops.items()}


def file_sha256(path: Path) -> str:
    """Hex sha256 of one file, kept in the user cache while its size and time stay.

    Cost: one read of the file the first time, a stat later on.
    """
    path = path.resolve()
    stamp = _stamp(path)
    kept_at = _cache_entry(path)
    record = _load(kept_at)
    if record.get("stamp") == stamp and isinstance(record.get("sha256"), str):
        return str(record["sha256"])
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    make_dir(kept_at.parent)
    write_atomically(kept_at, json.dumps({"stamp": stamp, "sha256": digest, "path": str(path)}))
    return digest


def _hash_chunk(job: tuple[Path, int]) -> tuple[bytes, int]:
    path, offset = job
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(_CHUNK_BYTES)
    return hashlib.blake2b(data, digest_size=32, person=b"kvist-chunk-1").digest(), len(data)


def _config_digest(path: Path) -> bytes:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(
            f"cannot read {path}: {error.strerror or error}; a model folder needs a config.json"
        ) from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON ({error}); fetch the model again") from error
    canonical = json.dumps(_without_volatile(config), sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=32, person=b"kvist-config-1").digest()


def _without_volatile(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_volatile(v) for k, v in value.items() if k not in _VOLATILE}
    if isinstance(value, list):
        return [_without_volatile(item) for item in value]
    return value


def _stamp(path: Path) -> list[int]:
    stat = path.stat()  # of what a link points at: hub snapshots are links
    return [stat.st_size, stat.st_mtime_ns]


def _cache_entry(path: Path) -> Path:
    name = hashlib.blake2b(os.fsencode(path.resolve()), digest_size=16).hexdigest()
    return cache_dir() / "digests" / f"{name}.json"


def _read_kept(path: Path, stamps: Mapping[str, list[int]]) -> dict[str, str] | None:
    for place in (path / SIDECAR, _cache_entry(path)):
        record = _load(place)
        digests = record.get("digests")
        if record.get("version") != _VERSION or record.get("stamps") != stamps:
            continue
        if isinstance(digests, dict) and digests.keys() == stamps.keys():
            return {str(name): str(digest) for name, digest in digests.items()}
    return None


def _keep(path: Path, stamps: Mapping[str, list[int]], digests: Mapping[str, str]) -> None:
    text = json.dumps({"version": _VERSION, "stamps": stamps, "digests": digests}, indent=1)
    try:
        write_atomically(path / SIDECAR, text)
    except OSError:  # a read-only folder: the user cache keeps it
        entry = _cache_entry(path)
        try:
            make_dir(entry.parent)
            write_atomically(entry, text)
        except (OSError, ConfigError):
            return  # nowhere to write at all: right, only slower at the next start


def _load(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # absent or torn: computed again
    return record if isinstance(record, dict) else {}
