"""The compute dtype, and a loaded model that is whole, quiet and still."""

from __future__ import annotations

import json

import pytest

from kvist.engine.weights.loading import load_model, resolve_dtype
from kvist.engine.weights.progress import silent
from kvist.engine.weights.source import resolve
from kvist.errors import ConfigError, ModelError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("config", "dtype", "device", "expected"),
    [
        ({"dtype": "bfloat16"}, "auto", "cpu", "bfloat16"),
        ({"torch_dtype": "bfloat16"}, "auto", "cuda:0", "bfloat16"),
        ({"dtype": "float32"}, "auto", "cpu", "bfloat16"),
        ({"dtype": "torch.float32"}, "auto", "cuda", "bfloat16"),
        ({}, "auto", "cpu", "bfloat16"),
        ({"dtype": "float16"}, "auto", "cuda", "float16"),
        ({"dtype": "float16"}, "auto", "cpu", "bfloat16"),  # ours, not vLLM's
        ({"dtype": "float16", "model_type": "gemma2"}, "auto", "cuda", "bfloat16"),
        ({"text_config": {"dtype": "float16"}}, "auto", "cuda", "float16"),
        ({"dtype": "bfloat16"}, "float32", "cpu", "float32"),
        ({"dtype": "bfloat16"}, "float", "cpu", "float32"),
        ({"dtype": "bfloat16"}, "half", "cpu", "float16"),
        ({"dtype": "bfloat16"}, "bf16", "cpu", "bfloat16"),
    ],
)
def test_the_compute_dtype(config, dtype, device, expected):
    assert resolve_dtype(config, dtype, device) == expected


def test_dtypes_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="'int8' is unknown; use auto"):
        resolve_dtype({}, "int8", "cpu")
    with pytest.raises(ConfigError, match=r"gemma3_text.*65504"):
        resolve_dtype({"model_type": "gemma3_text"}, "half", "cuda")


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=32,
        tie_word_embeddings=False,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_is_loaded_to_serve(folder, dtype, capfd):
    model = load_model(resolve(str(folder), silent), dtype, "cpu", "eager")
    assert not model.training
    assert {str(p.dtype) for p in model.parameters()} == {f"torch.{dtype}"}
    assert not any(p.requires_grad for p in model.parameters())
    assert model.config._attn_implementation == "eager"
    assert capfd.readouterr().err == ""
    assert transformers.utils.logging.is_progress_bar_enabled()  # as it was


def test_a_parameter_without_weights_never_serves(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(ModelError, match=r"no weights for 9 parameters.*layers\.1\."):
        load_model(resolve(str(folder), silent), "float32", "cpu", "eager")


def test_weights_of_another_shape_are_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 64}))
    with pytest.raises(ModelError, match="cannot load model from"):
        load_model(resolve(str(folder), silent), "float32", "cpu", "eager")


def test_an_unknown_family_is_refused(folder):
    (folder / "config.json").write_text('{"model_type": "brandnew"}')
    with pytest.raises(ModelError, match=r"cannot load model.*brandnew"):
        load_model(resolve(str(folder), silent), "float32", "cpu", "eager")


@pytest.mark.parametrize("cut", [0, 4, 1000])
def test_a_damaged_weight_file_is_refused(folder, cut):
    """Guarded: its library has an exception of its own, which no caller of ours expects."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(ModelError, match=r"cannot load model from .*damaged"):
        load_model(resolve(str(folder), silent), "float32", "cpu", "eager")
