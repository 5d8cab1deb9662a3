"""From what a person names to the model a plan is made for.

Owns where shape and weight bytes come from: a file, a folder, the table of known models, a hub.
Knows no memory budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvist.engine.weights.registry import find_packaged
from kvist.errors import ConfigError
from kvist.lab.known_models import find_known, not_known
from kvist.lab.parameters import Parameters, estimate_parameters
from kvist.lab.plan import WEIGHT_BITS, Model
from kvist.spec import KVSpec, read_config

_SPELLINGS = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pth")


def find_model(name: str, weights_dtype: str = "auto", parameters: float | None = None) -> Model:
    """Find a model by path, by name in the table, or by hub id.

    Parameters
    ----------
    name : str
        Folder, `config.json`, name of `KNOWN_MODELS` or of `kvist pull`, or hub id; the first that
        fits.
    weights_dtype : str
        What the weights are held in; ``"auto"``: as the checkpoint has them.
    parameters : float, optional
        How many there are, where that cannot be counted.

    Raises
    ------
    ModelError
        If there is no such model, or its configuration cannot be read.
    ConfigError
        For an unknown `weights_dtype`.
    DownloadError
        If a hub id cannot be fetched.
    """
    path = Path(name).expanduser()
    known = None if _is_there(path) else find_known(name)
    if known is not None:
        spec = KVSpec.from_config(known.config)
        counted = Parameters(known.num_parameters, known.num_active_parameters)
        return _model(known.name, spec, counted, weights_dtype, parameters, ())
    config, stored = _read(name, path)
    spec = KVSpec.from_config(config)
    estimated = estimate_parameters(spec, config)
    notes: tuple[str, ...] = ()
    if stored:
        bits = 8 * spec.itemsize
        total = round(stored * 8 / bits)
        active = total if estimated is None else round(total * estimated.active / estimated.total)
        counted_files = Parameters(total, active)
        return _model(path.name or name, spec, counted_files, weights_dtype, parameters, ())
    if estimated is not None and parameters is None:
        notes = ("parameters are counted from the configuration; the weights are not here",)
    return _model(path.name or name, spec, estimated, weights_dtype, parameters, notes)


def _model(
    name: str,
    spec: KVSpec,
    counted: Parameters | None,
    weights_dtype: str,
    parameters: float | None,
    notes: tuple[str, ...],
) -> Model:
    dtype = spec.dtype if weights_dtype == "auto" else _SPELLINGS.get(weights_dtype, weights_dtype)
    if dtype not in WEIGHT_BITS:
        raise ConfigError(
            f"weights_dtype={weights_dtype!r} is unknown; there are auto, {', '.join(WEIGHT_BITS)}"
        )
    if parameters is not None:
        if parameters <= 0:
            raise ConfigError(f"parameters={parameters} must be above 0")
        share = counted.active / counted.total if counted is not None else 1.0
        counted = Parameters(round(parameters), round(parameters * share))
    bits = WEIGHT_BITS[dtype]
    return Model(
        name=name,
        spec=spec,
        weights_bytes=None if counted is None else round(counted.total * bits / 8),
        active_bytes=None if counted is None else round(counted.active * bits / 8),
        weights_dtype=dtype,
        num_active_parameters=None if counted is None else counted.active,
        notes=notes,
    )


def _read(name: str, path: Path) -> tuple[Mapping[str, Any], int]:
    """Return the raw configuration, and bytes of the weights beside it, 0 if there are none."""
    if _is_there(path) and path.suffix != ".gguf":
        folder = path if path.is_dir() else None
        return read_config(path), _stored_bytes(folder)
    if path.suffix == ".gguf" or find_packaged(name) is not None:
        # Fetched and converted as the engine would do it.
        from kvist.engine.weights.source import resolve

        source = resolve(name)
        return source.config, _stored_bytes(source.path)
    if name.count("/") != 1 or name.startswith((".", "~", "/")):
        raise not_known(name)
    from kvist.engine.weights.hub import fetch_shape

    fetched, weights_bytes = fetch_shape(name)
    return read_config(fetched), weights_bytes or _stored_bytes(fetched)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name too long for a path is none
        return False


def _stored_bytes(folder: Path | None) -> int:
    """Bytes of the weight files of a folder: of the first kind that there is."""
    if folder is None:
        return 0
    for pattern in _WEIGHT_FILES:
        sizes = [file.stat().st_size for file in folder.glob(pattern) if file.is_file()]
        if sizes:
            return sum(sizes)
    return 0
