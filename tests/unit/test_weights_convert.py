"""GGUF files become the model they were made from; what cannot be carried over is refused.

The files are written here by llama.cpp's rules (permuted q and k, norms plus one, quantized blocks)
from a model that we know, so the truth does not come from the loader that is tested.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvist.engine.tokenizer import Tokenizer
from kvist.engine.weights import gguf_facts
from kvist.engine.weights.convert import run_import
from kvist.engine.weights.gguf_header import GGUFHeader, read_header
from kvist.engine.weights.gguf_import import import_gguf
from kvist.engine.weights.progress import silent
from kvist.errors import ModelError

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")  # transformers asks for it before it reads a GGUF file
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

Q8 = gguf.GGMLQuantizationType.Q8_0
CONTROL, NORMAL, USER = 3, 1, 4
CHAT = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"

BYTE_VOCAB = [
    *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
    *("he", "12"),
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "</s>"),
]
BYTE_TYPES = [NORMAL] * 258 + [CONTROL] * 3 + [USER]
END_OF_TEXT, IM_START, IM_END = 258, 259, 260


def _llama():
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(BYTE_VOCAB),
        max_position_embeddings=512,
        rope_theta=5e4,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def _permuted(weight, heads):
    """llama.cpp's order of q and k rows: the two halves of a head interleaved."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _llama_tensors(model):
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    state = {name: value.float().numpy() for name, value in model.state_dict().items()}
    tensors = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
        "output.weight": state["lm_head.weight"],
    }
    for layer in range(model.config.num_hidden_layers):
        for theirs, ours in names.items():
            value = state[f"model.layers.{layer}.{theirs}.weight"]
            heads = {"attn_q": 4, "attn_k": 2}.get(ours)
            tensors[f"blk.{layer}.{ours}.weight"] = _permuted(value, heads) if heads else value
    return tensors


def _byte_vocabulary(writer):
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(BYTE_VOCAB)
    writer.add_token_types(BYTE_TYPES)
    writer.add_token_merges(["h e", "1 2"])
    writer.add_bos_token_id(IM_START)
    writer.add_eos_token_id(IM_END)
    writer.add_add_bos_token(False)


def _write(path: Path, arch: str, numbers: dict, tensors: dict, vocabulary=_byte_vocabulary):
    writer = gguf.GGUFWriter(path, arch)
    for key, value in numbers.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add.get(type(value), writer.add_string)(key.replace("{arch}", arch), value)
    vocabulary(writer)
    for name, value in tensors.items():
        if value.ndim == 2:
            writer.add_tensor(name, gguf.quantize(value, Q8), raw_dtype=Q8)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


LLAMA_NUMBERS = {
    "{arch}.context_length": 512,
    "{arch}.embedding_length": 64,
    "{arch}.block_count": 2,
    "{arch}.feed_forward_length": 96,
    "{arch}.attention.head_count": 4,
    "{arch}.attention.head_count_kv": 2,
    "{arch}.attention.layer_norm_rms_epsilon": 1e-6,
    "{arch}.rope.freq_base": 5e4,
    "{arch}.rope.dimension_count": 16,
    "{arch}.vocab_size": len(BYTE_VOCAB),
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.chat_template": CHAT,
    "general.sampling.temp": 0.5,
    "general.sampling.top_k": 7,
}


@pytest.fixture(scope="module")
def llama_tensors():
    return _llama_tensors(_llama())


@pytest.fixture(scope="module")
def converted(tmp_path_factory, llama_tensors):
    folder = tmp_path_factory.mktemp("llama")
    file = _write(folder / "tiny.gguf", "llama", LLAMA_NUMBERS, llama_tensors)
    out = folder / "out"
    out.mkdir()
    notes = import_gguf(file, out, lambda what: None)
    return SimpleNamespace(path=out, notes=notes, file=file)


def _through_q8(value):
    return gguf.dequantize(gguf.quantize(value, Q8), Q8) if value.ndim == 2 else value


def test_every_weight_is_the_dequantized_one_in_its_place(converted):
    truth = _llama().state_dict()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(converted.path, dtype="auto")
    got = loaded.state_dict()
    assert got.keys() == truth.keys()
    for name, value in truth.items():
        expected = torch.from_numpy(np.copy(_through_q8(value.float().numpy())))
        assert got[name].dtype == torch.bfloat16
        torch.testing.assert_close(got[name], expected.to(torch.bfloat16), rtol=0, atol=0)


def test_shape_rope_context_and_head_are_carried_over(converted):
    config = json.loads((converted.path / "config.json").read_text())
    assert config["rope_parameters"]["rope_theta"] == 5e4
    assert config["max_position_embeddings"] == 512
    assert config["tie_word_embeddings"] is False
    assert config["head_dim"] == 16
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config
    assert config["architectures"] == ["LlamaForCausalLM"]


def test_all_ends_template_and_defaults_are_carried_over(converted):
    generation = json.loads((converted.path / "generation_config.json").read_text())
    # Not </s>: user-defined, as HTML's tag is in Gemma's vocabulary.
    assert generation["eos_token_id"] == [IM_END, END_OF_TEXT]
    assert (generation["temperature"], generation["top_k"]) == (0.5, 7)
    tokenizer = Tokenizer(converted.path)
    assert set(tokenizer.eos_token_ids) == {IM_END, END_OF_TEXT}
    assert tokenizer.render_chat([{"content": "x"}]) == "<|im_start|>x<|im_end|>"
    assert tokenizer.encode("he")[0] != IM_START  # add_bos_token is false in the file
    assert converted.notes == []


def test_digits_are_split_as_the_vocabulary_was_trained(converted):
    # transformers does not know the rule "smollm" and would merge "12", which the file could.
    tokenizer = Tokenizer(converted.path)
    assert tokenizer.encode("12") == [BYTE_VOCAB.index("1"), BYTE_VOCAB.index("2")]
    assert tokenizer.encode("he") == [BYTE_VOCAB.index("he")]


def test_scaled_rope_of_llama_3_is_recognised(tmp_path, llama_tensors):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        "rope_type": "llama3",
        "rope_theta": 5e4,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = transformers.LlamaConfig(head_dim=16, rope_parameters=parameters)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 5e4 ** (-torch.arange(0, 16, 2) / 16)
    tensors = {**llama_tensors, "rope_freqs.weight": (plain / scaled).float().numpy()}
    file = _write(tmp_path / "scaled.gguf", "llama", LLAMA_NUMBERS, tensors)
    (tmp_path / "out").mkdir()
    import_gguf(file, tmp_path / "out", lambda what: None)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_parameters"] == parameters


def test_a_value_without_a_place_in_the_model_is_refused(tmp_path, llama_tensors):
    # As in the first Qwen files: biases under architecture "llama", which the loader skips.
    tensors = {**llama_tensors, "blk.0.attn_q.bias": np.ones(64, np.float32)}
    file = _write(tmp_path / "bias.gguf", "llama", LLAMA_NUMBERS, tensors)
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match=r"holds .* values but the LlamaForCausalLM"):
        import_gguf(file, tmp_path / "out", lambda what: None)


def test_a_parameter_without_values_is_refused(tmp_path, llama_tensors):
    tensors = {k: v for k, v in llama_tensors.items() if k != "blk.1.ffn_up.weight"}
    file = _write(tmp_path / "hole.gguf", "llama", LLAMA_NUMBERS, tensors)
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match=r"no values for 1 parameters.*up_proj"):
        import_gguf(file, tmp_path / "out", lambda what: None)


def test_an_unknown_architecture_is_refused_with_the_version(tmp_path, llama_tensors):
    file = _write(tmp_path / "new.gguf", "brandnew", LLAMA_NUMBERS, llama_tensors)
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match=r"cannot convert.*'brandnew'"):
        import_gguf(file, tmp_path / "out", lambda what: None)


def test_a_part_of_a_split_file_is_refused(tmp_path):
    numbers = {"split.count": 3}
    file = _write(tmp_path / "part.gguf", "llama", numbers, {"x.weight": np.ones(4, np.float32)})
    with pytest.raises(ModelError, match="one of 3 parts"):
        import_gguf(file, tmp_path, lambda what: None)


def test_norms_of_gemma_lose_their_one(tmp_path):
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<end_of_turn>", "<mask>"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "h", "e", "he"]
    model = transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            vocab_size=len(pieces),
        )
    )
    state = {
        name: value.float().numpy() + (0.25 if name.endswith("norm.weight") else 0.0)
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    layer = "model.layers.0."
    names = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "blk.0.attn_q": layer + "self_attn.q_proj",
        "blk.0.attn_k": layer + "self_attn.k_proj",
        "blk.0.attn_v": layer + "self_attn.v_proj",
        "blk.0.attn_output": layer + "self_attn.o_proj",
        "blk.0.attn_q_norm": layer + "self_attn.q_norm",
        "blk.0.attn_k_norm": layer + "self_attn.k_norm",
        "blk.0.attn_norm": layer + "input_layernorm",
        "blk.0.post_attention_norm": layer + "post_attention_layernorm",
        "blk.0.ffn_norm": layer + "pre_feedforward_layernorm",
        "blk.0.post_ffw_norm": layer + "post_feedforward_layernorm",
        "blk.0.ffn_gate": layer + "mlp.gate_proj",
        "blk.0.ffn_up": layer + "mlp.up_proj",
        "blk.0.ffn_down": layer + "mlp.down_proj",
    }
    tensors = {}
    for ours, theirs in names.items():
        value = state[theirs + ".weight"]
        tensors[ours + ".weight"] = value + 1.0 if "norm" in ours else value
    writer_numbers = {
        "{arch}.context_length": 256,
        "{arch}.embedding_length": 32,
        "{arch}.block_count": 1,
        "{arch}.feed_forward_length": 64,
        "{arch}.attention.head_count": 2,
        "{arch}.attention.head_count_kv": 1,
        "{arch}.attention.key_length": 32,
        "{arch}.attention.value_length": 32,
        "{arch}.attention.layer_norm_rms_epsilon": 1e-6,
        "{arch}.attention.sliding_window": 64,
        "{arch}.rope.freq_base": 1e6,
    }

    def vocabulary(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list(pieces)
        writer.add_token_scores([0.0] * len(pieces))
        writer.add_token_types([CONTROL] * 6 + [6] * 256 + [NORMAL] * 4)
        writer.add_bos_token_id(2)
        writer.add_eos_token_id(1)
        writer.add_unk_token_id(3)
        writer.add_add_bos_token(True)

    file = _write(tmp_path / "gemma.gguf", "gemma3", writer_numbers, tensors, vocabulary)
    (tmp_path / "out").mkdir()
    notes = import_gguf(file, tmp_path / "out", lambda what: None)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    got = loaded.state_dict()
    for theirs in names.values():
        name = theirs + ".weight"
        expected = torch.from_numpy(np.copy(_through_q8(state[name])))
        torch.testing.assert_close(got[name], expected.to(torch.bfloat16), rtol=0, atol=0)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["sliding_window"] == 64
    assert config["tie_word_embeddings"] is True
    assert config["eos_token_id"] == [1, 4]
    assert "base model" in notes[0]
    assert Tokenizer(tmp_path / "out").encode("he")[0] == 2  # BOS, as the file asks


def test_the_program_passes_on_why_it_failed(tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"PK\x03\x04 not a model")
    with pytest.raises(ModelError, match="no GGUF file: it begins with b'PK"):
        run_import(tmp_path / "bad.gguf", tmp_path, silent)


# ------------------------------------------------------------------------------------ the header


def test_the_header_agrees_with_the_gguf_package(converted):
    ours = read_header(converted.file)
    theirs = gguf.GGUFReader(converted.file)
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == fields
    assert [(t.name, t.offset, int(t.elements)) for t in ours.tensors] == [
        (t.name, t.data_offset, int(t.n_elements)) for t in theirs.tensors
    ]


def test_a_cut_file_is_refused_wherever_it_ends(converted, tmp_path):
    whole = converted.file.read_bytes()
    cut = tmp_path / "cut.gguf"
    data_start = read_header(converted.file).tensors[0].offset
    for length in (0, 3, 4, 20, 100, data_start // 2, data_start):
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError):
            read_header(cut)


def _header(**metadata) -> GGUFHeader:
    return GGUFHeader({"general.architecture": "llama", **metadata}, ())


def _scaling(**fields) -> GGUFHeader:
    return _header(**{f"llama.rope.scaling.{key}": value for key, value in fields.items()})


def test_other_rope_scalings_are_carried_over_or_refused():
    scale = gguf_facts.rope_scaling
    assert scale(_header(), None) is None
    assert scale(_scaling(type="none"), None) is None
    assert scale(_scaling(type="linear", factor=1.0), None) is None
    assert scale(_scaling(type="linear", factor=4.0), None) == {
        "rope_type": "linear",
        "factor": 4.0,
    }
    yarn = _scaling(type="yarn", factor=4.0, original_context_length=4096)
    assert scale(yarn, None) == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
    }
    with pytest.raises(ModelError, match="longrope"):
        scale(_scaling(type="longrope", factor=4.0), None)
    with pytest.raises(ModelError, match="none of Llama 3's"):
        scale(_header(), [1.0, 2.0, 3.0])


def test_a_splitting_rule_that_nobody_checked_is_noted():
    def rule(name):
        return gguf_facts.splits_digits(
            _header(**{"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name})
        )

    assert rule("smollm") == (True, None)
    assert rule("gpt-2") == (False, None)
    digits, note = rule("never-seen")
    assert not digits
    assert "never-seen" in note
