"""One GGUF file to a Hugging Face directory in bf16, in this process.

Owns the conversion: transformers' own loader undoes llama.cpp's changes (permuted q and k, norms
plus one); what it leaves behind comes from `gguf_facts` beside this; what it may silently do
wrong is checked here. Knows no cache folder and no process (`kvist.engine.weights.convert`).

Run as a program it speaks JSON lines on stdout: progress, then the result or the error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvist.engine.weights.gguf_facts import end_ids, rope_scaling, sampling_defaults, splits_digits
from kvist.engine.weights.gguf_header import GGUFHeader, read_header
from kvist.errors import KvistError, ModelError

Report = Callable[[str], None]
"""Told what is being done, before it is done."""

_ROPE_FACTORS = "rope_freqs.weight"
_FLOAT32 = 0
_PROBES = ("Hello, world!", " In 2024, it cost 1,250.75 € – naïve?", "line\n\n  indented\ttab 日本")
_TOKENIZER_NOISE = ("is_local", "local_files_only", "name_or_path", "gguf_file")


def import_gguf(gguf: Path, out: Path, report: Report) -> list[str]:
    """Convert `gguf` into the empty folder `out`; returns notes for the person.

    Writes `config.json`, `generation_config.json`, `model.safetensors` (bf16) and the tokenizer.
    Peak memory: the model in bf16 twice, plus its largest tensor in fp32.

    Raises
    ------
    ModelError
        If the file cannot be read, its architecture is unknown to transformers, or not every value
        of it found its place in the model.
    """
    header = read_header(gguf)
    if int(header.get("split.count", 0)) > 1:
        raise ModelError(
            f"{gguf} is one of {header.get('split.count')} parts of a split GGUF; join them with "
            "llama.cpp's llama-gguf-split --merge first"
        )
    import torch
    import transformers

    report("reading the model's shape")
    place: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    try:
        config = transformers.AutoConfig.from_pretrained(gguf.parent, **place)
        report("dequantizing")
        # Where transformers could keep blocks packed it must not: they cannot be saved again.
        packing = getattr(transformers, "GgufConfig", None)
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            config=config,
            dtype=torch.bfloat16,
            output_loading_info=True,
            **({"quantization_config": packing(dequantize=True)} if packing else {}),
            **place,
        )
        report("building the tokenizer")
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, config=config, **place)
    except (ValueError, KeyError, NotImplementedError, RuntimeError) as error:
        raise ModelError(
            f"transformers {transformers.__version__} cannot convert {gguf} (architecture "
            f"{header.architecture!r}): {error}; use the model's own Hugging Face directory"
        ) from error
    _check_complete(gguf, header, model, info)
    notes = _finish_tokenizer(header, tokenizer)
    _check_tokenizer(gguf, header, tokenizer)
    _finish_model(gguf, header, model, tokenizer)

    report("writing bf16 weights")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    _clean_tokenizer_config(out / "tokenizer_config.json")
    return notes


def _check_complete(gguf: Path, header: GGUFHeader, model: Any, info: dict[str, Any]) -> None:
    """Every value of the file is in the model, and every value of the model is from the file.

    The loader skips a tensor whose name it does not know and leaves a parameter that it finds no
    tensor for at random; both end in a model that runs and is wrong.
    """
    missing = sorted(info.get("missing_keys", ()))
    if missing:
        raise ModelError(
            f"{gguf} has no values for {len(missing)} parameters, the first {missing[0]}; "
            "the file is incomplete or transformers does not know this variant"
        )
    in_file = sum(t.elements for t in header.tensors if t.name != _ROPE_FACTORS)
    in_model = sum(parameter.numel() for parameter in model.parameters())
    if in_file != in_model:
        raise ModelError(
            f"{gguf} holds {in_file:,} values but the {type(model).__name__} built from it "
            f"{in_model:,}: transformers does not know this variant of {header.architecture!r}; "
            "use the model's own Hugging Face directory"
        )


def _finish_model(gguf: Path, header: GGUFHeader, model: Any, tokenizer: Any) -> None:
    config = model.config
    # It is a plain model now; these two would make saving and loading believe otherwise.
    model.hf_quantizer = None
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    scaling = rope_scaling(header, _rope_factors(gguf, header))
    if scaling is not None:
        parameters = config.rope_parameters
        parameters.get("full_attention", parameters).update(scaling)
    ends = end_ids(header, config.eos_token_id)
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ends:
        ends.append(tokenizer.eos_token_id)
    if ends:
        config.eos_token_id = ends[0] if len(ends) == 1 else ends
    generation = model.generation_config
    generation.eos_token_id = config.eos_token_id
    sampling = sampling_defaults(header)
    if sampling:
        generation.update(**sampling, do_sample=sampling.get("temperature", 1.0) > 0)


def _rope_factors(gguf: Path, header: GGUFHeader) -> list[float] | None:
    tensor = next((t for t in header.tensors if t.name == _ROPE_FACTORS), None)
    if tensor is None:
        return None
    if tensor.ggml_type != _FLOAT32:
        raise ModelError(f"{gguf}: {_ROPE_FACTORS} has storage type {tensor.ggml_type}, not F32")
    import numpy as np

    values = np.fromfile(gguf, dtype="<f4", count=tensor.elements, offset=tensor.offset)
    return [float(value) for value in values]


def _finish_tokenizer(header: GGUFHeader, tokenizer: Any) -> list[str]:
    from tokenizers import pre_tokenizers

    digits, note = splits_digits(header)
    if digits:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    _set_special_tokens(header, tokenizer)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = header.get("tokenizer.chat_template")
    context = header.get("{arch}.context_length")
    if context:
        tokenizer.model_max_length = int(context)
    tokenizer.clean_up_tokenization_spaces = False
    notes = [note] if note else []
    if tokenizer.chat_template is None:
        notes.append("the file has no chat template: a base model, for completions only")
    return notes


def _set_special_tokens(header: GGUFHeader, tokenizer: Any) -> None:
    """BOS, EOS and the like as the file has them; transformers before 5.24 guesses some."""
    tokens = header.get("tokenizer.ggml.tokens", [])
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = header.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None and getattr(tokenizer, f"{name}_token_id") != index:
            setattr(tokenizer, f"{name}_token", tokens[index])
    # llama.cpp's rule for files that do not say: sentencepiece vocabularies begin with BOS.
    sentencepiece = header.get("tokenizer.ggml.model") == "llama"
    begins = bool(header.get("tokenizer.ggml.add_bos_token", sentencepiece))
    if getattr(tokenizer, "add_bos_token", begins) != begins:
        tokenizer.add_bos_token = begins


def _check_tokenizer(gguf: Path, header: GGUFHeader, tokenizer: Any) -> None:
    """The ids mean what the file says, and text survives the way there and back."""
    tokens = header.get("tokenizer.ggml.tokens", [])
    if len(tokenizer) > len(tokens):
        raise ModelError(
            f"the tokenizer built from {gguf} has {len(tokenizer):,} tokens, the file "
            f"{len(tokens):,}: ids would run over the model's embeddings"
        )
    for probe in _PROBES:
        ids = tokenizer.encode(probe, add_special_tokens=False)
        back = tokenizer.decode(ids, skip_special_tokens=False)
        # A sentencepiece vocabulary may add or drop one space in front; a small one may have no
        # pieces for the text at all, which its unknown token says.
        unknown = tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids
        if back.lstrip(" ") != probe.lstrip(" ") and not unknown:
            raise ModelError(
                f"the tokenizer built from {gguf} turns {probe!r} into {back!r}; use the model's "
                "own Hugging Face directory"
            )


def _clean_tokenizer_config(path: Path) -> None:
    """Drop what only says how and where the tokenizer was loaded for the conversion."""
    config = json.loads(path.read_text(encoding="utf-8"))
    kept = {key: value for key, value in config.items() if key not in _TOKENIZER_NOISE}
    path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Convert argv[1] into argv[2]; JSON lines on stdout."""
    # Libraries may print; what the parent reads must be ours alone.
    lines, sys.stdout = sys.stdout, sys.stderr

    def say(**fields: Any) -> None:
        lines.write(json.dumps(fields) + "\n")
        lines.flush()

    try:
        notes = import_gguf(Path(sys.argv[1]), Path(sys.argv[2]), lambda what: say(step=what))
    except KvistError as error:
        say(error=str(error))
    else:
        say(notes=notes)


if __name__ == "__main__":
    main()
