"""`kvist.LLM`: a model in this process, in the calling thread.

Owns the text side of offline use: prompts to ids, ids to text, one output a prompt. The engine
below it knows ids only.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, cast

from rich.progress import Progress

from kvist.config import EngineConfig
from kvist.engine.answer import Answer
from kvist.engine.assemble import open_engine
from kvist.engine.bad_words import spell_bad_words
from kvist.engine.bill import StartupBill
from kvist.engine.defaults import generation_defaults
from kvist.engine.grammar import GrammarSpec
from kvist.engine.grammar_compiler import check_grammar
from kvist.engine.outputs import RequestOutput
from kvist.engine.sampling import SamplingParams
from kvist.engine.sequence import EngineRequest
from kvist.engine.step import Update
from kvist.engine.tokenizer import Tokenizer
from kvist.errors import RequestError

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or ``{"prompt": text}`` / ``{"prompt_token_ids": ids}`` as in vLLM."""

_SETTLE_S = 2.0
"""That copies of what was computed get to be on their way to the tiers below, at most."""

Message = Mapping[str, Any]


class LLM:
    """Generate text with a model over paged, prefix-shared KV memory.

    Parameters
    ----------
    model : str
        Registry name (``smollm2-135m-instruct``), local directory, ``.gguf`` file, or hub id.
    **engine_args
        Options of `kvist.config.EngineConfig`, by the names that vLLM uses too:
        ``max_model_len=4096``, ``kv_cache_memory_bytes="2GiB"``, ``dtype="float32"`` …

    Raises
    ------
    ConfigError, ModelError
        If the model or the options cannot be used; the message says what to do.

    Examples
    --------
    >>> import kvist
    >>> llm = kvist.LLM("smollm2-135m-instruct")                            # doctest: +SKIP
    >>> llm.generate(["Gravity is"], kvist.SamplingParams(max_tokens=8))    # doctest: +SKIP

    Notes
    -----
    Not thread-safe: one thread makes all calls.
    """

    def __init__(self, model: str, **engine_args: Any) -> None:
        config = EngineConfig.resolve({"model": model, **engine_args})
        opened = open_engine(config)
        self._opened = opened
        self.engine = opened.engine
        self.runner = opened.runner
        self.pool = opened.pool
        self.bill: StartupBill = opened.bill
        self.max_model_len = opened.max_model_len
        self.model_path = opened.source.path
        self.tokenizer = Tokenizer(self.model_path)
        self._answers: dict[str, Answer] = {}
        self._num_requests = 0

    # ------------------------------------------------------------------ faces

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        grammar: GrammarSpec | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt; all of them run side by side.

        Parameters
        ----------
        prompts : prompt or sequence of prompts
            Each text, token ids, or a mapping; see `Prompt`.
        sampling_params : SamplingParams or sequence of them, optional
            One for all, or one each.
        use_tqdm : bool
            Show a progress bar on a terminal. The name is vLLM's.
        priority : sequence of int, optional
            One each, lower first; with ``scheduling_policy="priority"``.
        grammar : GrammarSpec, optional
            What every output must look like.

        Returns
        -------
        list of RequestOutput
            In the order of the prompts.

        Raises
        ------
        RequestError
            If a prompt cannot be served. Then none of them runs.
        """
        each = _as_prompts(prompts)
        params = _one_each(sampling_params, len(each))
        priorities = list(priority) if priority is not None else [0] * len(each)
        if len(priorities) != len(each):
            raise RequestError(f"{len(priorities)} priorities for {len(each)} prompts", "priority")
        encoded = [self._encode(prompt) for prompt in each]
        answers: list[Answer] = []
        try:
            for (text, ids), p, rank in zip(encoded, params, priorities, strict=True):
                answers.append(self._submit(text, ids, p, rank, grammar))
            self._run(answers, show=use_tqdm)
        finally:
            self._abort(answers)
        return [answer.output for answer in answers]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template_args: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, by the model's own chat template.

        `template_args` go to `Tokenizer.encode_chat`.
        """
        several = bool(messages) and not isinstance(messages[0], Mapping)
        chats = cast(Sequence[Sequence[Message]], messages if several else [messages])
        prompts = [self.tokenizer.encode_chat(chat, **template_args) for chat in chats]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Continue one prompt, and yield its output whenever it has grown.

        The same object every time. Closing the iterator aborts the request and frees its blocks.
        """
        text, ids = self._encode(prompt)
        answer = self._submit(text, ids, sampling_params or SamplingParams(), 0, None)
        try:
            while not answer.output.finished:
                self._step()
                yield answer.output
        finally:
            self._abort([answer])

    def default_sampling_params(self) -> SamplingParams:
        """Return what the model's own ``generation_config.json`` asks for."""
        return SamplingParams(**generation_defaults(self.model_path))

    def close(self) -> None:
        """Abort what is still running and close the tiers, which get a while to take what is new.

        Nothing can be generated after it. The memory goes when the object does.
        """
        self._abort(list(self._answers.values()))
        self._opened.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ inside

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            inner = prompt.get("prompt_token_ids", prompt.get("prompt"))
            if inner is None or isinstance(inner, Mapping):
                raise RequestError(
                    f"a prompt mapping needs 'prompt' or 'prompt_token_ids', not {sorted(prompt)}",
                    "prompt",
                )
            return self._encode(inner)
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        try:
            return None, [operator.index(token_id) for token_id in prompt]
        except TypeError as error:
            raise RequestError(
                f"a prompt is a text, token ids or a mapping, not {prompt!r:.80}", "prompt"
            ) from error

    def _submit(
        self,
        text: str | None,
        ids: list[int],
        params: SamplingParams,
        priority: int,
        grammar: GrammarSpec | None,
    ) -> Answer:
        if grammar is not None:
            check_grammar(grammar)
        params = spell_bad_words(params, self.tokenizer)
        request_id = str(self._num_requests)
        self._num_requests += 1
        self.engine.add_request(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=tuple(ids),
                params=params,
                eos_token_ids=self.tokenizer.eos_token_ids,
                priority=priority,
                grammar=grammar,
            )
        )
        answer = Answer(RequestOutput(request_id, text, ids, []), params, self.tokenizer)
        self._answers[request_id] = answer
        return answer

    def _step(self) -> None:
        for update in self.engine.step():
            self._deal(update)

    def _deal(self, update: Update) -> None:
        answer = self._answers.get(update.request_id)
        if answer is None:
            return
        text_ended = answer.take(update)
        if update.is_last:
            del self._answers[update.request_id]
        elif text_ended:
            end = self.engine.abort_request(update.request_id, update.index)
            if end is not None:
                self._deal(end)

    def _run(self, answers: Sequence[Answer], *, show: bool) -> None:
        bar = Progress(transient=True) if show and sys.stderr.isatty() else None
        context: AbstractContextManager[Any] = bar if bar is not None else nullcontext()
        with context:
            task = bar.add_task("prompts", total=len(answers)) if bar is not None else None
            while not all(answer.output.finished for answer in answers):
                self._step()
                if bar is not None and task is not None:
                    bar.update(task, completed=sum(a.output.finished for a in answers))
        self.engine.settle(_SETTLE_S)

    def _abort(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            if self._answers.pop(answer.output.request_id, None) is not None:
                self.engine.abort_request(answer.output.request_id)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Tell one prompt from several: ints in a row are one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    try:
        each = list(prompts)
    except TypeError as error:
        raise RequestError(
            f"prompts are texts, token ids or mappings, not {prompts!r:.80}", "prompt"
        ) from error
    if each and all(_is_id(item) for item in each):
        return [cast(Sequence[int], each)]
    return cast(list[Prompt], each)


def _is_id(item: object) -> bool:
    """Whether this is one number: also of an array, where it is no int."""
    if isinstance(item, int):
        return True
    return hasattr(item, "__index__") and getattr(item, "ndim", None) == 0


def _one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(
            f"{len(params)} sampling params for {count} prompts; give one, or one each",
            "sampling_params",
        )
    return list(params)
