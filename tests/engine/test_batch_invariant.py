"""``--batch-invariant``: in bf16, the same bits alone, in company, in chunks and after a hit.

Logits are compared, not tokens: a difference in the last bit shows at once.
"""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvist.engine.llm import LLM
from kvist.engine.sampling import SamplingParams
from kvist.errors import ConfigError, ModelError

NEW_TOKENS = 4
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)


class Bits:
    """An engine whose logits are kept, by prompt and position."""

    def __init__(self, folder, budget, **options):
        self.llm = LLM(
            str(folder),
            **{
                "dtype": "bfloat16",
                "batch_invariant": True,
                "max_model_len": 256,
                "max_num_seqs": 9,
                "max_num_batched_tokens": budget,
                "kv_cache_memory_bytes": "64MiB",
                **options,
            },
        )
        forward = self.llm.runner._forward

        def watched(context, rows=None):
            logits = forward(context, rows)
            for (request_id, row), values in zip(context.batch.samples, logits, strict=False):
                self._seen[request_id, row.position] = values.clone()
            return logits

        self._seen = {}
        self.llm.runner._forward = watched

    def of(self, prompts, *, warm=False):
        """Logits [NEW_TOKENS, V] for each prompt, and how many tokens came from the cache."""
        if not warm:
            self.llm.engine.scheduler.cache.reset_prefix_cache()
        outputs = self.llm.generate(prompts, GREEDY, use_tqdm=False)
        found = [
            torch.stack([self._seen[o.request_id, len(p) + i] for i in range(NEW_TOKENS)])
            for p, o in zip(prompts, outputs, strict=True)
        ]
        return found, sum(o.num_cached_tokens for o in outputs)


def compare(folder, prompts, sizes, **options):
    """Number of prompts whose bits differ from those that they have alone, over all ways."""
    whole, chunked = (Bits(folder, budget, **options) for budget in (256, 37))
    alone = [whole.of([prompt])[0][0] for prompt in prompts]
    runs = [whole.of(prompts[:size])[0] for size in sizes]
    runs += [chunked.of(prompts[:size])[0] for size in (1, sizes[-1])]
    warm, num_cached = whole.of(prompts[: sizes[0]], warm=False)
    hit, num_hit = whole.of(prompts[: sizes[-1]], warm=True)
    assert (num_cached, num_hit > 0) == (0, True)
    runs += [warm, hit]
    pairs = [pair for run in runs for pair in zip(run, alone, strict=False)]
    return sum(not torch.equal(found, true) for found, true in pairs)


def prompts_of(seed, lengths):
    rng = random.Random(seed)
    return [[rng.randrange(250) for _ in range(length)] for length in lengths]


LENGTHS = (120, 3, 50, 17, 90, 33, 64, 5, 200)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "qwen3", "gemma"])
def test_the_same_bits_in_any_batch_and_any_chunks(tiny_folder, family):
    assert compare(tiny_folder(family), prompts_of(1, LENGTHS), range(2, 10)) == 0


def test_without_the_option_the_bits_do_differ(tiny_folder):
    """Else the comparison above would say nothing. Our compiled attention is the same in any batch
    and any chunks even so, and a tiny model's products may be; torch's attention is not.
    """
    prompts = prompts_of(1, LENGTHS)
    options = {"batch_invariant": False, "kernels": "torch"}
    assert compare(tiny_folder("llama"), prompts, (2, 9), **options) > 0


def test_the_reference_kernels_serve_where_the_compiled_ones_do_not(tiny_folder):
    prompts = prompts_of(2, LENGTHS[:4])
    assert compare(tiny_folder("llama"), prompts, (2, 4), kernels="reference") == 0


def test_its_blocks_are_not_those_of_the_fast_engine(tiny_folder):
    """Other bits under the same name would be a wrong hit."""
    keys = []
    for invariant in (True, False):
        bits = Bits(tiny_folder("llama"), 64, batch_invariant=invariant)
        keys.append(bits.llm.engine.scheduler._requests._root)
    assert keys[0] != keys[1]


def test_what_cannot_be_invariant_is_refused(tiny_folder):
    with pytest.raises(ConfigError, match="--kernels=torch"):
        Bits(tiny_folder("llama"), 64, kernels="torch")
    with pytest.raises(ModelError, match="--batch-invariant"):
        Bits(tiny_folder("mixtral"), 64)


@pytest.mark.slow
def test_the_same_bits_of_smollm2(smollm2_folder):
    assert compare(smollm2_folder, prompts_of(3, (3, 45, 17, 60)), (2, 4)) == 0
