"""`kvist explain`: a real generation, token by token: which K and V were computed, which not.

Owns the walk and its record. Steps a real engine and looks at it from outside, through its events
and views; changes nothing in it. What the record means in words is `kvist.commands.explain`'s.

One text is generated more than once, each time with what the time before left behind::

    1  cold      nothing is there: all K and V are computed
    2  again     full blocks of the prompt are found on the device by their name
    3  restart   with a tier: the device has forgotten them, the tier has not

Sequences have one row a token. The last token that was sampled has no K and V at all: nothing comes
after it that would ask for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvist.engine.sampling import SamplingParams
from kvist.engine.views import SequenceView
from kvist.events import BlockStored, Event, PrefixLoaded, RequestScheduled
from kvist.spec import KVSpec

if TYPE_CHECKING:
    from kvist.engine.llm import LLM

SCHEMA = "kvist.explain.v1"
COMPUTED, NEVER = "computed", "never"
DEVICE = "device"
_KEY_DIGITS = 8
_SETTLE_S = 30.0


@dataclass(frozen=True, slots=True)
class TokenStory:
    """What happened to the K and V of one token.

    Attributes
    ----------
    position : int
    token_id : int
    text : str
    role : str
        ``"prompt"`` or ``"generated"``.
    source : str
        ``"computed"``, ``"never"``, or where they were taken from: ``"device"``, ``"host"``,
        ``"disk"``, ``"remote"``.
    step : int or None
        Of the engine, from 1 in each pass, in which they came.
    block, slot : int or None
        Where they lie.
    key : str or None
        First digits of the block's content address, once the block is full.
    asked : int
        Tokens whose K and V its query was held against; 0 where no query was computed.
    """

    position: int
    token_id: int
    text: str
    role: str
    source: str
    step: int | None
    block: int | None
    slot: int | None
    key: str | None
    asked: int


@dataclass(frozen=True, slots=True)
class Pass:
    """One generation of the text.

    Attributes
    ----------
    name : str
        ``"cold"``, ``"again"`` or ``"restart"``.
    num_steps : int
    tokens : tuple of TokenStory
    """

    name: str
    num_steps: int
    tokens: tuple[TokenStory, ...]

    @property
    def num_computed(self) -> int:
        """Tokens whose K and V were computed."""
        return sum(token.source == COMPUTED for token in self.tokens)

    @property
    def num_reused(self) -> int:
        """Tokens whose K and V were there."""
        return sum(token.source not in (COMPUTED, NEVER) for token in self.tokens)

    @property
    def num_without_cache(self) -> int:
        """K and V that would have been computed if nothing was kept between steps.

        Each generated token would read all tokens before it once more.
        """
        prompt = sum(token.role == "prompt" for token in self.tokens)
        return sum(range(prompt, len(self.tokens)))


@dataclass(frozen=True, slots=True)
class Explanation:
    """All passes, and the sizes behind them.

    Attributes
    ----------
    model : str
    block_size : int
    kv_bytes_per_token, query_bytes_per_token : int
        What is kept, and what queries of the same precision would take on top.
    num_layers, num_query_heads, num_kv_heads, head_dim : int
        Of the layers that keep K and V.
    passes : tuple of Pass
    """

    model: str
    block_size: int
    kv_bytes_per_token: int
    query_bytes_per_token: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    passes: tuple[Pass, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it for programs: schema `kvist.explain.v1`."""
        body = asdict(self)
        for fields, done in zip(body["passes"], self.passes, strict=True):
            fields["num_computed"] = done.num_computed
            fields["num_reused"] = done.num_reused
            fields["num_without_cache"] = done.num_without_cache
        return {"schema": SCHEMA, **body}


def explain(llm: LLM, spec: KVSpec, text: str, max_tokens: int) -> Explanation:
    """Generate `text` two or three times, greedily, and tell what was computed.

    Parameters
    ----------
    llm : LLM
        Freshly opened. The third pass is for one with tiers.
    spec : KVSpec
        Of its model.
    text : str
    max_tokens : int

    Raises
    ------
    RequestError
        If the text cannot be served.
    """
    walk = _Walk(llm)
    names = ["cold", "again"] + ["restart"] * (llm.engine.scheduler.loads is not None)
    passes = tuple(walk.run(name, text, max_tokens) for name in names)
    group = max(spec.kv_groups, key=lambda group: group.num_layers)
    layers = sum(group.num_layers for group in spec.kv_groups)
    kv_bytes = llm.bill.kv_token_bytes
    elements = sum(g.token_elements for g in spec.kv_groups)
    queries = layers * spec.num_query_heads * group.key_dim
    return Explanation(
        model=llm.bill.model,
        block_size=llm.bill.block_size,
        kv_bytes_per_token=kv_bytes,
        query_bytes_per_token=round(kv_bytes / elements * queries),
        num_layers=layers,
        num_query_heads=spec.num_query_heads,
        num_kv_heads=group.num_kv_heads,
        head_dim=group.key_dim,
        passes=passes,
    )


class _Walk:
    """Runs passes on one engine, and knows its blocks by name."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._keys: dict[int, str] = {}
        self._new: list[Event] = []
        llm.engine.events.subscribe(self._hear)

    def run(self, name: str, text: str, max_tokens: int) -> Pass:
        engine = self._llm.engine
        if name == "restart":
            engine.settle(_SETTLE_S)
            engine.scheduler.cache.reset_prefix_cache()
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        sources: list[tuple[str, int]] = []
        blocks: tuple[int, ...] = ()
        step = 0
        output = None
        for output in self._llm.stream(text, params):
            step += 1
            view = engine.scheduler.view(output.request_id)
            blocks = view.block_ids if view is not None and view.block_ids else blocks
            sources += self._sources(view, len(sources), step)
        assert output is not None
        engine.settle(_SETTLE_S)
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        # All but the last sampled one went through the model, also in the step that ended it.
        sources += [(COMPUTED, step)] * (len(ids) - 1 - len(sources))
        return Pass(
            name, step, tuple(self._rows(ids, len(output.prompt_token_ids), sources, blocks))
        )

    def _hear(self, event: Event) -> None:
        if isinstance(event, BlockStored):
            self._keys[event.block_id] = event.key.hex()[:_KEY_DIGITS]
        self._new.append(event)

    def _sources(
        self, view: SequenceView | None, known: int, step: int
    ) -> Iterator[tuple[str, int]]:
        """Where the K and V that a step added came from: device, then tiers, then the model."""
        found: list[str] = []
        for event in self._new:
            if isinstance(event, RequestScheduled):
                found += [DEVICE] * (event.num_cached_tokens - known - len(found))
            elif isinstance(event, PrefixLoaded):
                for medium, num_tokens in event.sources:
                    found += [medium] * num_tokens
        self._new.clear()
        if view is not None:
            found += [COMPUTED] * (view.num_computed_tokens - known - len(found))
        for source in found:
            yield source, step

    def _rows(
        self,
        ids: list[int],
        num_prompt: int,
        sources: list[tuple[str, int]],
        blocks: tuple[int, ...],
    ) -> Iterator[TokenStory]:
        size, tokenizer = self._llm.bill.block_size, self._llm.tokenizer
        for position, token_id in enumerate(ids):
            is_last = position >= len(sources)
            source, step = (NEVER, None) if is_last else sources[position]
            at = position // size
            block = blocks[at] if at < len(blocks) and not is_last else None
            full = (at + 1) * size <= len(sources)
            yield TokenStory(
                position=position,
                token_id=token_id,
                text=tokenizer.decode([token_id], skip_special_tokens=False),
                role="prompt" if position < num_prompt else "generated",
                source=source,
                step=step,
                block=block,
                slot=position % size if block is not None else None,
                key=self._keys.get(block) if block is not None and full else None,
                asked=position + 1 if source == COMPUTED else 0,
            )
