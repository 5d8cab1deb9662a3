"""`LLM.generate` with all that sampling offers, on a tiny model in fp32.

Guards against draws that depend on who else is in the batch, on preemption or on chunks; log
probabilities of the wrong position; continuations mixed up; text after a stop string; blocks kept.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvist.engine.sampling import SamplingParams
from kvist.errors import RequestError
from kvist.testing.parity import GreedyReference, WatchedEngine

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tiny_folder):
    return tiny_folder("llama")


@pytest.fixture(scope="module")
def reference(folder):
    return GreedyReference(folder)


@pytest.fixture(scope="module")
def roomy(folder):
    return WatchedEngine(folder, 200, max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64)


@pytest.fixture(scope="module")
def cramped(folder):
    """Room for little more than one request: everybody is preempted, and reads in small chunks."""
    return WatchedEngine(folder, 18, max_model_len=256, max_num_seqs=6, max_num_batched_tokens=19)


def prompts_of(rng, count):
    return [[rng.randrange(250) for _ in range(rng.randrange(5, 90))] for _ in range(count)]


def ask(watched, prompts, params):
    outputs = watched.llm.generate(prompts, params, use_tqdm=False)
    assert watched.num_used_blocks == 0
    return outputs


def true_logprobs(reference, token_ids):
    """Log probability of every next token after each position, by transformers alone."""
    with torch.inference_mode():
        logits = reference.model(input_ids=torch.tensor([token_ids])).logits[0]
    return torch.log_softmax(logits.double(), dim=-1)


def test_the_same_seed_gives_the_same_tokens_in_any_company(roomy, cramped, rng):
    prompts = prompts_of(rng, 6)
    kinds = [
        {},
        {"top_k": 9},
        {"top_p": 0.8, "temperature": 1.3},
        {"min_p": 0.05, "presence_penalty": 1.0},
        {"repetition_penalty": 1.3, "top_k": 30, "top_p": 0.9},
        {"n": 3, "frequency_penalty": 0.5},
    ]
    params = [
        SamplingParams(max_tokens=24, seed=40 + i, ignore_eos=True, **kind)
        for i, kind in enumerate(kinds)
    ]
    alone = []
    for prompt, p in zip(prompts, params, strict=True):
        roomy.scheduler.cache.reset_prefix_cache()
        alone += [[o.token_ids for o in ask(roomy, [prompt], p)[0].outputs]]
    before = cramped.counts["preemptions"]
    for watched in (roomy, cramped):
        for order in (range(6), reversed(range(6))):
            chosen = list(order)
            outputs = ask(watched, [prompts[i] for i in chosen], [params[i] for i in chosen])
            for i, output in zip(chosen, outputs, strict=True):
                assert [o.token_ids for o in output.outputs] == alone[i]
    assert cramped.counts["preemptions"] > before
    assert len({tuple(ids) for ids in alone[5]}) == 3


def test_log_probabilities_of_prompt_and_output(roomy, cramped, reference, rng):
    """Computed in chunks of any size, cached or not; of the model's own distribution."""
    prompt = [rng.randrange(250) for _ in range(150)]
    params = SamplingParams(
        max_tokens=6, temperature=0.7, seed=3, logprobs=3, prompt_logprobs=2, ignore_eos=True
    )
    for watched in (roomy, cramped, roomy):
        (output,) = ask(watched, [prompt], params)
        (completion,) = output.outputs
        truth = true_logprobs(reference, prompt + completion.token_ids)
        assert output.num_cached_tokens == 0
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        tokens = prompt + completion.token_ids
        found = output.prompt_logprobs[1:] + completion.logprobs
        for position, logprobs in enumerate(found):
            here, token_id = truth[position], tokens[position + 1]
            assert next(iter(logprobs)) == token_id
            for other, entry in logprobs.items():
                assert entry.logprob == pytest.approx(here[other].item(), abs=2e-4)
            top = 2 if position + 1 < len(prompt) else 3
            assert {int(t) for t in here.topk(top).indices} <= set(logprobs)
            assert len(logprobs) <= top + 1
        total = sum(truth[len(prompt) - 1 + i, t].item() for i, t in enumerate(tokens[150:]))
        assert completion.cumulative_logprob == pytest.approx(total, abs=1e-3)
    # Its blocks serve others.
    plain = SamplingParams(max_tokens=1, temperature=0.0)
    assert ask(roomy, [prompt], plain)[0].num_cached_tokens == 144


def test_a_prompt_of_one_token_has_no_log_probability(roomy):
    (output,) = ask(roomy, [[5]], SamplingParams(max_tokens=2, prompt_logprobs=0, seed=1))
    assert output.prompt_logprobs == [None]


def test_the_best_of_several(roomy, reference, rng):
    prompt = [rng.randrange(250) for _ in range(20)]
    common = {"max_tokens": 8, "seed": 11, "ignore_eos": True, "temperature": 0.9}
    (every,) = ask(roomy, [prompt], SamplingParams(n=6, **common))
    (best,) = ask(roomy, [prompt], SamplingParams(n=2, best_of=6, **common))

    def likelihood(output):
        tokens = prompt + output.token_ids
        truth = true_logprobs(reference, tokens)
        return sum(truth[19 + i, t].item() for i, t in enumerate(output.token_ids))

    ranked = sorted(every.outputs, key=likelihood, reverse=True)
    assert [o.token_ids for o in best.outputs] == [o.token_ids for o in ranked[:2]]
    assert [o.index for o in best.outputs] == [0, 1]
    assert best.outputs[0].logprobs is None


def test_a_stop_string_ends_one_continuation_and_frees_its_blocks(roomy):
    """The null text side: every token of this model is one byte, so any text crosses tokens."""
    params = {"max_tokens": 40, "seed": 5, "n": 4, "ignore_eos": True, "temperature": 1.0}
    (whole,) = ask(roomy, ["some text to go on with"], SamplingParams(**params))
    longest = max(whole.outputs, key=lambda o: len(o.text))
    stop = longest.text[10:13]
    (cut,) = ask(roomy, ["some text to go on with"], SamplingParams(stop=stop, **params))
    stopped = 0
    for before, after in zip(whole.outputs, cut.outputs, strict=True):
        at = before.text.find(stop)
        if at < 0:
            assert (after.text, after.finish_reason) == (before.text, "length")
            continue
        stopped += 1
        assert after.text == before.text[:at]
        assert (after.finish_reason, after.stop_reason) == ("stop", stop)
        assert len(after.token_ids) < 40
    assert stopped >= 1


def test_bad_words_allowed_tokens_and_min_tokens(roomy, rng):
    prompt = [rng.randrange(250) for _ in range(20)]
    common = {"max_tokens": 30, "seed": 2, "temperature": 1.5}
    letters = tuple(range(60, 70))
    word = roomy.llm.tokenizer.decode(list(letters[:1]))
    (free,) = ask(
        roomy, [prompt], SamplingParams(allowed_token_ids=letters, ignore_eos=True, **common)
    )
    assert set(free.outputs[0].token_ids) == set(letters)
    (without,) = ask(
        roomy,
        [prompt],
        SamplingParams(allowed_token_ids=letters, bad_words=[word], ignore_eos=True, **common),
    )
    assert set(without.outputs[0].token_ids) == set(letters[1:])
    eos = roomy.llm.tokenizer.eos_token_ids[0]
    likely = {"logit_bias": {eos: 100.0}}
    (early,) = ask(roomy, [prompt], SamplingParams(**likely, **common))
    assert early.outputs[0].token_ids == [eos]
    assert early.outputs[0].text == ""
    (late,) = ask(roomy, [prompt], SamplingParams(min_tokens=9, **likely, **common))
    assert len(late.outputs[0].token_ids) == 10
    assert late.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "asked",
    [
        {"logprobs": 21},
        {"prompt_logprobs": 21},
        {"logit_bias": {100_000: 1.0}},
        {"allowed_token_ids": [100_000]},
        {"stop_token_ids": [3], "bad_words_token_ids": [[-1]]},
    ],
    ids=str,
)
def test_what_the_engine_cannot_do_is_refused_by_name(roomy, asked):
    *_, param = asked
    with pytest.raises(RequestError) as caught:
        roomy.llm.generate([[1, 2]], SamplingParams(**asked), use_tqdm=False)
    assert caught.value.param == param.removesuffix("_token_ids" if "bad" in param else "")
    assert not roomy.engine.has_work


def test_a_request_whose_constraints_leave_nothing_fails_alone(roomy, rng):
    prompt = [rng.randrange(250) for _ in range(20)]
    impossible = SamplingParams(
        allowed_token_ids=[5], bad_words_token_ids=[[5]], max_tokens=3, temperature=0.0
    )
    fine = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    failed, good = ask(roomy, [prompt, prompt], [impossible, fine])
    assert failed.outputs[0].finish_reason == "error"
    assert "no token is left" in failed.error
    assert len(good.outputs[0].token_ids) == 3


@pytest.mark.parametrize(
    "prompts", [None, 5, [1.5], ["a", None], [[1, "a"]], "a\ud800", {"prompt": 5}, [["a"], [1]]]
)
def test_what_is_no_prompt_is_refused_as_a_request(roomy, prompts):
    with pytest.raises(RequestError) as caught:
        roomy.llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
    assert caught.value.param == "prompt"
    assert not roomy.llm.engine.has_work


def test_arrays_of_ids_are_prompts(roomy):
    params = SamplingParams(max_tokens=3, temperature=0)
    ids = torch.tensor([5, 6, 7])
    wanted = ask(roomy, [[5, 6, 7]], params)
    for prompts in (ids, ids.numpy(), [ids], list(ids.numpy()), iter([ids]), torch.stack([ids])):
        (output,) = ask(roomy, prompts, params)
        assert output.outputs[0].token_ids == wanted[0].outputs[0].token_ids
