"""Fused layers compute what the model's own modules do, and anything else stays a module.

Guards: a layer taken for one that it is not, weights merged or interleaved in a wrong order, a
second copy of the weights, logits that are rounded, and notes that claim what was not done. That
whole texts come out the same in every family, `test_parity` shows: it runs on fused layers too.
"""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

from kvist.engine.surgery.recognise import NotRecognisedError, recognise_layer
from kvist.errors import ConfigError
from kvist.kernels import linear
from kvist.testing.models import tiny_model
from kvist.testing.parity import GreedyReference, WatchedEngine

NO_CPP = linear.obstacle(torch.device("cpu"), torch.bfloat16)
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(NO_CPP is not None, reason=str(NO_CPP)),
]

FUSED = ("llama", "qwen2", "qwen3", "mistral", "phi3", "smollm3")
NOT_FUSED = {
    "gpt_neox": "last norm is missing",
    "starcoder2": "LayerNorm",
    "olmo2": "post_feedforward_layernorm",
    "gemma": "ScaledWordEmbedding",
    "granite": "between its last layer and its logits",
    "gpt2": "no rotary embedding",
    "olmo": "OlmoLayerNorm",
    "qwen3_moe": "experts",
    "mixtral": "MixtralTopKRouter",
}
PROMPTS = [[5], [7, 200], list(range(3, 40)), [(11 * i) % 256 for i in range(70)]]


def watched(folder, **options):
    return WatchedEngine(folder, num_blocks=64, max_model_len=128, **options)


def layer_notes(engine) -> str:
    (note,) = [n for n in engine.llm.bill.notes if "layers fused" in n]
    return note


def logits_of(engine, prompt, rows):
    """Logits of some rows of a prompt, by what the engine runs."""
    seen = []
    runner = engine.llm.runner
    forward = runner._forward

    def spy(context, wanted=None, num_layers=None):
        out = forward(context, torch.tensor(rows), num_layers)
        seen.append(out.clone())
        return out[-1:]

    runner._forward = spy
    try:
        engine.generate([prompt], 1)
    finally:
        runner._forward = forward
    return seen[0]


@pytest.mark.parametrize("family", FUSED)
def test_families_that_are_fused(tiny_folder, family):
    assert layer_notes(watched(tiny_folder(family))).startswith("2 of 2 layers fused")


@pytest.mark.parametrize("family", NOT_FUSED)
def test_families_that_are_not_and_why(tiny_folder, family):
    note = layer_notes(watched(tiny_folder(family), dtype="bfloat16"))
    assert note.startswith("0 of 2 layers fused")
    assert NOT_FUSED[family] in note
    assert "linear layers packed" in note


@pytest.mark.parametrize("family", FUSED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_those_of_the_modules(tiny_folder, family, dtype):
    """In fp32 the same but for the order of sums; in bf16 as near to fp32 as the modules are."""
    folder, prompt, rows = tiny_folder(family), PROMPTS[2], [0, 20, 36]
    fused = logits_of(watched(folder, dtype=dtype), prompt, rows)
    modules = logits_of(watched(folder, dtype=dtype, kernels="reference"), prompt, rows)
    exact = logits_of(watched(folder, kernels="reference"), prompt, rows)
    assert fused.dtype == modules.dtype == torch.float32
    if dtype == "float32":
        assert torch.allclose(fused, exact, rtol=1e-4, atol=1e-4)
    else:
        assert (fused - exact).norm() <= 1.5 * (modules - exact).norm() + 0.01 * exact.norm()


@pytest.mark.parametrize("family", ["llama", "gemma"])
@pytest.mark.parametrize("kernels", ["auto", "torch", "reference"])
def test_logits_are_not_rounded(tiny_folder, family, kernels):
    """Sums of bf16 products in fp32 hardly ever fit into bf16; rounded ones always do."""
    engine = watched(tiny_folder(family), dtype="bfloat16", kernels=kernels)
    logits = logits_of(engine, PROMPTS[2], [30, 36])
    assert (logits.to(torch.bfloat16).float() != logits).float().mean() > 0.9


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma", "gpt2"])
def test_rounded_weights_stay_near(tiny_folder, family, weights):
    """Random weights of every size lose most; this much and no more than rounding can explain."""
    folder, rows = tiny_folder(family), [10, 36]
    near = logits_of(watched(folder, weights=weights), PROMPTS[2], rows)
    exact = logits_of(watched(folder), PROMPTS[2], rows)
    error = (near - exact).norm() / exact.norm()
    assert 0 < error <= {"int8": 0.1, "int4": 1.0}[weights]


def test_an_embedding_that_is_the_head_stays_one_copy(tmp_path):
    folder = tiny_model("llama", tmp_path / "tied", tie_word_embeddings=True)
    engine = watched(folder)
    layer = 64 * (64 + 32 + 32 + 64 + 3 * 96) + 2 * 64
    expected = 4 * (288 * 64 + 2 * layer + 64)  # 261 outputs in panels of 32
    assert abs(engine.llm.bill.weights_bytes - expected) <= 1024
    for prompt in PROMPTS:
        assert engine.generate([prompt], 8) == [GreedyReference(folder).generate(prompt, 8)]


def test_the_original_weights_go(tiny_folder):
    """Of a fused model nothing is left that has the size of a matrix but what is packed."""
    engine = watched(tiny_folder("llama"), dtype="bfloat16")
    left = [n for n, p in engine.llm.runner.model.named_parameters() if p.ndim > 1]
    assert left == ["model.embed_tokens.weight"]
    gc.collect()
    matrices = {(64, 64), (96, 64), (64, 96)}
    alive = [o for o in gc.get_objects() if type(o) is torch.nn.Parameter]
    assert not [p for p in alive if tuple(p.shape) in matrices and p.dtype == torch.bfloat16]


def test_packed_weights_need_the_kernels(tiny_folder):
    with pytest.raises(ConfigError, match=r"--weights=int8 needs the C\+\+ kernels.*was asked for"):
        watched(tiny_folder("llama"), weights="int8", kernels="torch")
    with pytest.raises(ConfigError, match="float16"):
        watched(tiny_folder("llama"), weights="int4", dtype="float16")
    notes = watched(tiny_folder("llama"), kernels="torch").llm.bill.notes
    assert "no layers fused: --kernels=torch was asked for" in notes


def test_blocks_of_rounded_weights_have_keys_of_their_own(tiny_folder):
    def first_key(**options):
        engine = watched(tiny_folder("llama"), **options)
        seen = []
        engine.engine.events.subscribe(seen.append)
        engine.generate([PROMPTS[2]], 1)
        return next(e.key for e in seen if type(e).__name__ == "BlockStored")

    keys = {first_key(weights=weights) for weights in ("auto", "int8", "int4")}
    assert len(keys) == 3
    assert first_key(kernels="reference") in keys


class TestRecognition:
    @pytest.fixture
    def layer(self, tiny_folder):
        model = AutoModelForCausalLM.from_pretrained(tiny_folder("qwen3"), dtype=torch.float32)
        return model.model.layers[0]

    def test_a_layer_as_it_should_be(self, layer):
        parts = recognise_layer(layer)
        assert parts.shape == (64, 4, 2, 32, 96)
        assert parts.query_norm is not None

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda x: setattr(x, "residual_multiplier", 0.5), "it has residual_multiplier"),
            (lambda x: setattr(x.self_attn, "softcap", 30.0), "self_attn has softcap"),
            (lambda x: setattr(x.mlp, "act_fn", torch.nn.GELU()), "GELU and not SiLU"),
            (lambda x: setattr(x, "mlp", None), "no mlp"),
            (lambda x: delattr(x, "input_layernorm"), "input_layernorm is missing"),
            (
                lambda x: setattr(x, "input_layernorm", torch.nn.LayerNorm(64)),
                "LayerNorm and not an RMS norm",
            ),
            (lambda x: setattr(x, "extra", torch.nn.Linear(2, 2)), "has a part extra"),
            (
                lambda x: setattr(x.self_attn, "k_proj", torch.nn.Linear(64, 64, bias=True)),
                "only some of|different widths",
            ),
            (
                lambda x: x.self_attn.register_parameter("gain", torch.nn.Parameter(torch.ones(1))),
                "parameters of its own",
            ),
        ],
    )
    def test_a_layer_that_is_something_else(self, layer, change, words):
        change(layer)
        with pytest.raises(NotRecognisedError, match=words):
            recognise_layer(layer)


def test_a_layer_that_only_looks_alike_stays_a_module(tiny_folder, monkeypatch):
    """Its code does something that no attribute tells; text must still be the model's own."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    plain = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: plain(self, x) * 1.5)
    folder = tiny_folder("llama")
    engine = watched(folder)
    assert "computes something else" in layer_notes(engine)
    for prompt in PROMPTS:
        assert engine.generate([prompt], 8) == [GreedyReference(folder).generate(prompt, 8)]


@pytest.mark.parametrize("odd", [0, 1])
def test_one_odd_layer_runs_between_fused_ones(tiny_folder, monkeypatch, odd):
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    plain = LlamaDecoderLayer.forward

    def forward(self, hidden_states, *args, **kwargs):
        out = plain(self, hidden_states, *args, **kwargs)
        return out * 1.25 if self.self_attn.layer_idx == odd else out

    monkeypatch.setattr(LlamaDecoderLayer, "forward", forward)
    folder = tiny_folder("llama")
    engine = watched(folder)
    assert layer_notes(engine).startswith("1 of 2 layers fused")
    for prompt in PROMPTS:
        assert engine.generate([prompt], 8) == [GreedyReference(folder).generate(prompt, 8)]
    assert engine.generate(PROMPTS, 8) == [GreedyReference(folder).generate(p, 8) for p in PROMPTS]
