"""The same model twice: plain transformers, and our engine under watch.

Owns `GreedyReference`, what a model says by itself, and `WatchedEngine`, one engine whose books are
checked after every step and whose events are counted, so that a test can demand that what it is
about did happen. Knows no test framework. Threads: one.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from kvist.engine.llm import LLM
from kvist.engine.sampling import SamplingParams
from kvist.engine.scheduler import Scheduler
from kvist.engine.sequence import EngineRequest
from kvist.engine.step import StepPlan, StepResult, Update
from kvist.events import Event, RequestPreempted, RequestScheduled, StepDone, StepFailed
from kvist.spec import KVSpec


class GreedyReference:
    """Greedy continuation by transformers alone: one prompt, one cache, one token at a time.

    Parameters
    ----------
    folder : Path
    dtype : torch.dtype
    """

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.model = loaded.eval()
        # Renamed in transformers 5.24; the old name warns there, the new one means nothing before.
        names = inspect.signature(self.model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._known: dict[tuple[int, ...], list[int]] = {}

    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Return the `num_tokens` most likely tokens, the lowest id among equals. Remembered."""
        key = tuple(prompt)
        known = self._known.get(key, [])
        if len(known) < num_tokens:
            known = self._known[key] = self._generate(key, num_tokens)
        return known[:num_tokens]

    def _generate(self, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
        kept = {self._cache_name: DynamicCache(config=self.model.config)}
        step = torch.tensor([prompt])
        tokens: list[int] = []
        with torch.inference_mode():
            for _ in range(num_tokens):
                output = self.model(input_ids=step, use_cache=True, **kept)
                tokens.append(int(output.logits[0, -1].float().argmax()))
                step = torch.tensor([tokens[-1:]])
        return tokens


class _WitnessRunner:
    """Passes plans on, and counts what is in them."""

    def __init__(self, inner: Any, counts: Counter[str]) -> None:
        self.vocab_size: int = inner.vocab_size
        self._inner = inner
        self._counts = counts

    def run(self, plan: StepPlan) -> StepResult:
        self._counts["steps"] += 1
        self._counts["copies"] += len(plan.copies)
        self._counts["chunks"] += sum(item.sample is None for item in plan.scheduled)
        if {len(item.token_ids) > 1 for item in plan.scheduled} == {True, False}:
            self._counts["mixed steps"] += 1
        result: StepResult = self._inner.run(plan)
        return result


class WatchedEngine:
    """An engine of a model folder, checked after every step.

    Parameters
    ----------
    folder : Path
    num_blocks : int, optional
        Size of the pool, instead of ``kv_cache_memory_bytes``.
    **options
        Of `kvist.config.EngineConfig`. The dtype is float32 and fresh blocks are poisoned, unless
        something else is asked for.

    Attributes
    ----------
    llm : LLM
        For tests of the public face.
    counts : Counter of str
        ``steps``, ``chunks`` (runs that did not reach the end of a prompt), ``copies`` (blocks
        copied on write), ``preemptions``, ``hits`` (tokens taken from the cache when a request
        first ran), ``hits after preemption``, ``forks``, ``failed steps``.
    outputs : dict of request id to list of int
        Tokens of the requests given to `add`; a fork has its parent's too.
    ends : dict of request id to finish reason
    watch_books : bool
        Check the books after every step; for long runs it may be switched off.
    """

    def __init__(self, folder: Path, num_blocks: int | None = None, **options: Any) -> None:
        merged: dict[str, Any] = {"dtype": "float32", "poison_fresh_blocks": True, **options}
        if num_blocks is not None:
            itemsize = 4 if merged["dtype"] == "float32" else 2
            token_bytes = KVSpec.from_path(folder).token_bytes(itemsize)
            merged["kv_cache_memory_bytes"] = (
                num_blocks * merged.get("block_size", 16) * token_bytes
            )
        self.llm = LLM(str(folder), **merged)
        self.watch_books = True
        self.engine = self.llm.engine
        self.counts: Counter[str] = Counter()
        self.outputs: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.engine.runner = _WitnessRunner(self.llm.runner, self.counts)
        self.engine.events.subscribe(self._witness)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler of the engine."""
        return self.engine.scheduler

    @property
    def num_used_blocks(self) -> int:
        """Blocks held by requests."""
        return self.scheduler.cache.num_used_blocks

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int | Sequence[int]
    ) -> list[list[int]]:
        """Continue all prompts side by side, greedily and past any end of text."""
        lengths = [num_tokens] * len(prompts) if isinstance(num_tokens, int) else num_tokens
        outputs = self.llm.generate(list(prompts), [greedy(n) for n in lengths], use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    def add(self, prompt: Sequence[int], num_tokens: int, **request: Any) -> str:
        """Put a greedy request in the queue; return its id."""
        request_id = f"w{len(self.outputs)}"
        self.engine.add_request(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=tuple(prompt),
                params=greedy(num_tokens),
                **request,
            )
        )
        self.prompts[request_id] = tuple(prompt)
        self.outputs[request_id] = []
        return request_id

    def fork(self, request_id: str) -> str:
        """Fork a request that was given to `add`; return the id of the new one."""
        child_id = f"w{len(self.outputs)}"
        self.engine.fork(request_id, child_id)
        self.prompts[child_id] = self.prompts[request_id]
        self.outputs[child_id] = list(self.outputs[request_id])
        self.counts["forks"] += 1
        return child_id

    def abort(self, request_id: str) -> None:
        """Abort a request that was given to `add`."""
        update = self.engine.abort_request(request_id)
        if update is not None:
            self._take(update)

    def step(self) -> None:
        """One step of the engine; its news go to `outputs` and `ends`."""
        for update in self.engine.step():
            self._take(update)

    def drain(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left to do.

        Raises
        ------
        AssertionError
            If that takes more than `max_steps`, or blocks are still held then.
        """
        for _ in range(max_steps):
            if not self.engine.has_work:
                break
            self.step()
        if self.engine.has_work:
            raise AssertionError(f"still working after {max_steps} steps")
        if self.num_used_blocks:
            raise AssertionError(f"nothing left to do, and {self.num_used_blocks} blocks in use")

    def _take(self, update: Update) -> None:
        if update.request_id in self.outputs:
            self.outputs[update.request_id].extend(update.token_ids)
            if update.finish_reason is not None:
                self.ends[update.request_id] = update.finish_reason

    def _witness(self, event: Event) -> None:
        if isinstance(event, StepDone):
            # The last thing a step says: its books must be in order.
            if self.watch_books:
                self.scheduler.check()
        elif isinstance(event, StepFailed):
            self.counts["failed steps"] += 1
        elif isinstance(event, RequestPreempted):
            self.counts["preemptions"] += 1
        elif isinstance(event, RequestScheduled):
            name = "hits after preemption" if event.resumed else "hits"
            self.counts[name] += event.num_cached_tokens


def greedy(num_tokens: int) -> SamplingParams:
    """Return parameters for exactly `num_tokens` of the most likely tokens."""
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
