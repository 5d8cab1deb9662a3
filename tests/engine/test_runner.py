"""The runner refuses model code it would serve wrongly, leaves others' configs alone, and its
memory is what the bill says."""

from __future__ import annotations

import json
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from kvist.engine.asked import layer_windows
from kvist.engine.runner import ModelRunner
from kvist.engine.sampling import SamplingParams
from kvist.engine.step import SampleRow, Scheduled, StepPlan
from kvist.errors import CapacityError, IntegrityError, ModelError
from kvist.formats.registry import resolve_format
from kvist.kernels.dispatch import select
from kvist.spec import KVSpec
from kvist.testing.models import BEYOND_PLAIN, tiny_model
from kvist.tiers.device import DevicePool

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def layout_of(folder, block_size=16):
    return resolve_format("auto", "float32").layout(KVSpec.from_path(folder).groups[0], block_size)


def runner_of(model, folder, max_model_len=256):
    layout = layout_of(folder)
    kernels = select(CPU, torch.float32, layout, KVSpec.from_path(folder).num_query_heads)
    windows = layer_windows(KVSpec.from_path(folder))
    return ModelRunner(model, layout, kernels, max_model_len, windows=windows)


class DeafAttention(LlamaAttention):
    """Drops what it does not know, as model code outside the interface does."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        return hidden_states, None


class DroppingAttention(LlamaAttention):
    """Calls the interface, but does not hand the step down."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        return super().forward(hidden_states, position_embeddings, attention_mask)


class BiasAttention(LlamaAttention):
    """Asks attention for something that we do not do."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        kwargs["position_bias"] = 30.0
        return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)


class SoftcapAttention(LlamaAttention):
    """Asks for a cap of which the config knows nothing."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        kwargs["softcap"] = 30.0
        return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)


class TwiceAttention(LlamaAttention):
    def forward(self, *args, **kwargs):
        super().forward(*args, **kwargs)
        return super().forward(*args, **kwargs)


class MaskingAttention(LlamaAttention):
    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        mask = torch.zeros(1, 1, 1, 1)
        return super().forward(hidden_states, position_embeddings, mask, **kwargs)


class SinkAttention(LlamaAttention):
    """Has sinks, which only its own eager code would look at."""

    sinks = torch.zeros(4)


class NarrowAttention(LlamaAttention):
    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        kwargs["sliding_window"] = 255
        return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)


def test_a_model_that_follows_the_interface_passes(tiny_folder):
    runner_of(load(tiny_folder("llama")), tiny_folder("llama")).check_model()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (
            DeafAttention,
            r"ran 1 times over 1 layers, expected once in each of 2.*without it: \[1\]",
        ),
        (TwiceAttention, r"ran 3 times over 2 layers, expected once in each of 2"),
        (BiasAttention, "BiasAttention asks attention for position_bias"),
        (SoftcapAttention, "config caps attention scores at None, its code asks layer 1 for 30"),
        (SinkAttention, "has attention sinks and does not hand them down"),
        (MaskingAttention, "MaskingAttention passes a mask"),
        (NarrowAttention, "layer 1 no window, its code asks .* of 255 .*--max-model-len 255 makes"),
        (DroppingAttention, "DroppingAttention was not given the step.*cannot be served"),
    ],
)
def test_a_layer_that_would_be_served_wrongly_is_refused(tiny_folder, kind, reason):
    model = load(tiny_folder("llama"))
    model.model.layers[1].self_attn.__class__ = kind
    with pytest.raises(ModelError, match=reason):
        runner_of(model, tiny_folder("llama")).check_model()


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ("sliding_window", "layer 1 a window of 24 tokens, its code asks attention for no window"),
        (
            "attn_logit_softcapping",
            r"attention scores at 0\.5, its code asks layer 1 for None",
        ),
    ],
)
def test_what_the_config_says_and_the_code_keeps_to_itself_is_refused(tmp_path, field, reason):
    """A window that only a mask tells, a cap in eager code: gone without a word otherwise."""
    options = {**BEYOND_PLAIN["gemma2"], "layer_types": ["sliding_attention"] * 2}
    folder = tiny_model("gemma2", tmp_path / "gemma2", **options)
    model = load(folder)
    setattr(model.model.layers[1].self_attn, field, None)
    with pytest.raises(ModelError, match=reason):
        runner_of(model, folder).check_model()


def test_damaged_weights_are_refused(tiny_folder):
    model = load(tiny_folder("llama"))
    model.model.layers[0].mlp.down_proj.weight.data[3, 3] = float("nan")
    with pytest.raises(ModelError, match="not finite for a prompt of 3 tokens"):
        runner_of(model, tiny_folder("llama")).check_model()


def test_another_model_with_the_same_config_keeps_its_attention(tiny_folder):
    ours, folder = load(tiny_folder("llama")), tiny_folder("llama")
    other = type(ours)(ours.config).eval()
    other.load_state_dict(ours.state_dict())
    assert other.config is ours.config
    before = other.config._attn_implementation
    ids = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        logits = other(input_ids=ids).logits
        runner_of(ours, folder).check_model()
        assert other.config._attn_implementation == before != "kvist"
        assert ours.config._attn_implementation == "kvist"
        # Its attention would ask for a step if it were ours now.
        assert torch.equal(other(input_ids=ids).logits, logits)


def test_a_plan_before_the_pool_is_a_bug(tiny_folder):
    runner = runner_of(load(tiny_folder("llama")), tiny_folder("llama"))
    row = SampleRow(SamplingParams(), 0, 1)
    plan = StepPlan(1, (Scheduled("a", (1,), 0, array("i", [0]), row),))
    with pytest.raises(IntegrityError, match="before the pool"):
        runner.run(plan)


def test_workspace_grows_with_the_step(tiny_folder):
    runner = runner_of(load(tiny_folder("llama")), tiny_folder("llama"), max_model_len=4_000)
    small = runner.measure_workspace(64, 4)
    # Logits alone: 261 floats a row; one layer's activations of 8,192 tokens.
    assert runner.measure_workspace(8_192, 64) > max(small, 8_192 * 64 * 4)


# ---------------------------------------------------------------------------------- the pool


def pool_of(folder, num_bytes) -> DevicePool:
    layout = layout_of(folder)
    return DevicePool(layout, num_bytes // layout.block_bytes, torch.float32, CPU)


def test_a_pool_costs_nothing_until_it_is_written(tiny_folder):
    pool = pool_of(tiny_folder("llama"), 256 << 20)
    before = pool.residency()
    assert before.reserved_bytes == pool.nbytes
    assert before.resident_bytes < 4 << 20
    pool.tensor[: pool.num_blocks // 2].fill_(1.0)
    half = pool.residency().resident_bytes
    assert pool.nbytes // 2 <= half <= pool.nbytes // 2 + (4 << 20)


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(),
    reason="this kernel gives no transparent huge pages",
)
def test_a_pool_comes_in_huge_pages(tiny_folder):
    pool = pool_of(tiny_folder("llama"), 64 << 20)
    assert pool.tensor.data_ptr() % (2 << 20) == 0
    pool.tensor.fill_(1.0)
    # All would be the rule; one is enough to show that they were asked for and came.
    assert pool.residency().huge_bytes > 0


def test_blocks_lie_one_after_the_other(tiny_folder):
    pool = pool_of(tiny_folder("llama"), 1 << 20)
    assert pool.tensor.is_contiguous()
    assert pool.tensor.stride(0) * pool.tensor.element_size() == pool.layout.block_bytes


def test_poison_is_for_the_blocks_named(tiny_folder):
    pool = pool_of(tiny_folder("llama"), 1 << 20)
    pool.poison((1, 3))
    bad = pool.tensor.isnan().any(dim=1).nonzero()[:, 0].tolist()
    assert bad == [1, 3]
    assert bool(pool.tensor[[1, 3]].isnan().all())
    pool.poison(())


def test_a_pool_larger_than_address_space_is_refused(tiny_folder):
    with pytest.raises(CapacityError, match=r"does not fit on cpu.*--kv-cache-memory-bytes"):
        pool_of(tiny_folder("llama"), 1 << 50)


BILL = """
import json, sys
import torch
torch.set_num_threads(1)
import transformers
from kvist.process import proportional_bytes
from kvist import LLM

llm = LLM(sys.argv[1], dtype="float32", kv_cache_memory_bytes="512MiB", max_num_batched_tokens=2048)
bill = llm.bill.to_dict()
llm.generate([[1] * 2_000], use_tqdm=False)
llm.pool.tensor.fill_(0.0)
bill["resident"] = proportional_bytes()
bill["pool_resident"] = llm.pool.residency().resident_bytes
print(json.dumps(bill))
"""


def test_the_bill_adds_up_to_what_the_process_holds(tiny_folder, tmp_path):
    """A process of its own: in this one other tests have left their memory."""
    from kvist.testing.models import tiny_model

    # Wide enough that the weights count: about 67 MB of them.
    sizes = {"hidden_size": 512, "intermediate_size": 2_048, "num_hidden_layers": 4}
    folder = tiny_model("llama", tmp_path / "wide", **sizes)
    done = subprocess.run(
        [sys.executable, "-c", BILL, str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    bill = json.loads(done.stdout.splitlines()[-1])
    parts = ("process_bytes", "weights_bytes", "workspace_bytes", "kv_pool_bytes")
    total = sum(bill[part] for part in parts)
    assert bill["pool_resident"] == bill["kv_pool_bytes"]
    assert bill["weights_bytes"] > 60e6
    # A tenth, both ways: libraries go on loading code, allocators keep what they freed.
    assert 0.9 * total <= bill["resident"] <= 1.1 * total, {**bill, "total": total}
