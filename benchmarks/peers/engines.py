"""What is compared: which engine, how it is started and what is set for it.

Owns the fairness: every engine gets the same cores, as many threads as cores, the same context
length and the same memory for K and V; beyond that each runs as it comes, with prefix caching on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import ENVIRONMENTS
from benchmarks.peers.model import ModelFiles

import kvist

_DRIVERS = Path(__file__).resolve().parent / "drivers"
_MAX_MODEL_LEN = 8192
_KV_BYTES = 2 << 30

PEERS = ("kvist", *ENVIRONMENTS)


@dataclass(frozen=True)
class Contender:
    """An engine with its settings: one column of the table.

    Attributes
    ----------
    label : str
    peer : str
        Whose venv it needs; one of `PEERS`.
    driver : str
        File in ``drivers/``.
    options : mapping
        For the driver, beside those that all get.
    keeps_prefixes : bool
        Whether a second prompt with the same beginning can be cheaper.
    compiles : bool
        Whether its first start fills a cache of compiled code that later ones find.
    skips : mapping of str to str
        Measures that it is spared, and why.
    rounds : int
        Turns at most.
    """

    label: str
    peer: str
    driver: str
    options: Mapping[str, Any] = field(default_factory=dict)
    keeps_prefixes: bool = True
    compiles: bool = False
    skips: Mapping[str, str] = field(default_factory=dict)
    rounds: int = 99

    @property
    def is_ours(self) -> bool:
        """Whether this is Kvist."""
        return self.peer == "kvist"


_OURS = "drive_kvist.py"
_LLAMA = "drive_llama_cpp.py"
_TAKES_MINUTES = "left out, it would take minutes (--all takes it)"

# In later rounds, as long as there is time, those come first whom the bars compare.
CONTENDERS = (
    Contender("Kvist bf16", "kvist", _OURS, {"arguments": {}}),
    Contender("vLLM bf16", "vllm", "drive_vllm.py", compiles=True),
    Contender("OpenVINO GenAI Q4_1, u8 KV", "openvino", "drive_openvino.py", {"properties": {}}),
    Contender("Kvist int8 weights", "kvist", _OURS, {"arguments": {"weights": "int8"}}),
    Contender("Kvist int4 weights", "kvist", _OURS, {"arguments": {"weights": "int4"}}),
    Contender(
        "llama.cpp Q4_1, f16 KV",
        "llama.cpp",
        _LLAMA,
        {"kv": "f16"},
        skips=dict.fromkeys(("32 streams",), _TAKES_MINUTES),
    ),
    Contender(
        "llama.cpp Q4_1, q8_0 KV",
        "llama.cpp",
        _LLAMA,
        {"kv": "q8_0"},
        skips=dict.fromkeys(("8 streams", "32 streams", "prefill", "context"), _TAKES_MINUTES),
    ),
    Contender("transformers bf16", "transformers", "drive_transformers.py", keeps_prefixes=False),
    # What a machine without a compiler gets, and what all kernels are held to. No bar counts them.
    Contender(
        "Kvist bf16, torch kernels",
        "kvist",
        _OURS,
        {"arguments": {"kernels": "torch"}},
        skips=dict.fromkeys(("32 streams", "outside the model"), _TAKES_MINUTES),
        rounds=1,
    ),
    Contender(
        "Kvist bf16, reference kernels",
        "kvist",
        _OURS,
        {"arguments": {"kernels": "reference"}},
        skips=dict.fromkeys(
            ("8 streams", "32 streams", "prefill", "context", "outside the model", "attention"),
            _TAKES_MINUTES,
        ),
        rounds=1,
    ),
)


def command(contender: Contender) -> list[str]:
    """How the contender's driver is started."""
    python = sys.executable if contender.is_ours else str(ENVIRONMENTS[contender.peer].python)
    return [python, str(_DRIVERS / contender.driver)]


def environ(contender: Contender, cores: list[int], compile_cache: Path) -> dict[str, str]:
    """What the driver finds in its environment."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    own |= {
        "OMP_NUM_THREADS": str(len(cores)),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if contender.is_ours:
        # The Kvist that runs the benchmark is the one that is measured.
        assert kvist.__file__ is not None
        own["PYTHONPATH"] = str(Path(kvist.__file__).resolve().parents[1])
    if contender.peer == "vllm":
        own |= {
            # Without these two it serves on one thread.
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            # What it compiles ahead of time it cannot load again on a CPU: every start would be
            # a cold one.
            "VLLM_USE_AOT_COMPILE": "0",
            "VLLM_CACHE_ROOT": str(compile_cache),
            "TORCHINDUCTOR_CACHE_DIR": str(compile_cache / "inductor"),
            "VLLM_NO_USAGE_STATS": "1",
        }
    return own


def options(contender: Contender, model: ModelFiles, threads: int) -> dict[str, Any]:
    """What the driver is opened with."""
    return {
        "model": str(model.folder),
        "gguf": str(model.gguf),
        "threads": threads,
        "max_model_len": _MAX_MODEL_LEN,
        "kv_bytes": _KV_BYTES,
        **contender.options,
    }
