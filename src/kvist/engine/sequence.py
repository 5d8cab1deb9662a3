"""One sequence: the tokens of a request and how far they are computed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvist.blocks.table import BlockTable
from kvist.cache import Allocation
from kvist.engine.grammar import GrammarSpec, Matcher
from kvist.engine.sampling import SamplingParams
from kvist.errors import RequestError
from kvist.keys import HashChain


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What the model thought of one position, by its raw logits.

    Attributes
    ----------
    token_id : int
        The token that stands there.
    logprob : float
    rank : int
        1 for the most likely token; equals share the best rank.
    top : tuple of (token id, log probability)
        The most likely ones, as many as were asked for; the lowest id first among equals.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A request as the engine takes it: ids, no text.

    Parameters
    ----------
    request_id : str
        Unique among the requests in the engine.
    prompt_token_ids : tuple of int
    params : SamplingParams
    eos_token_ids : tuple of int
        Ids that end the text, unless `params.ignore_eos`. The engine itself knows no vocabulary.
    priority : int
        Lower runs earlier, under ``--scheduling-policy priority``.
    adapter, salt : str
        Requests that differ in these never share blocks.
    allow_lossy : bool
        Whether copies that a lossy codec made may be read for it. Where a tier makes some, it
        shares blocks on the device with others of its kind only.
    grammar : GrammarSpec or None
        What every continuation must look like.
    timeout_s : float or None
        From arrival to the last token; what is not done by then ends as aborted.
    arrived_s : float or None
        When it reached the service, on the monotonic clock that all processes of a machine share.
        ``None``: when it reaches the engine.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0
    adapter: str = ""
    salt: str = ""
    allow_lossy: bool = False
    grammar: GrammarSpec | None = None
    timeout_s: float | None = None
    arrived_s: float | None = None

    def check(self, max_model_len: int, max_logprobs: int = 20) -> int:
        """Return how long the sequence may get, prompt and output, in a window of `max_model_len`.

        Raises
        ------
        RequestError
            If the prompt is empty, or leaves no room for one new token, or more than `max_logprobs`
            log probabilities a position are asked for, or the timeout is not above 0.
        """
        for param in ("logprobs", "prompt_logprobs"):
            asked = getattr(self.params, param)
            if asked is not None and asked > max_logprobs:
                raise RequestError(
                    f"{param}={asked} is more than --max-logprobs={max_logprobs}; ask for less or"
                    " raise it",
                    param,
                )
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise RequestError(
                f"timeout={self.timeout_s} leaves no time; give seconds above 0", "timeout"
            )
        length = len(self.prompt_token_ids)
        if length == 0:
            raise RequestError("the prompt is empty: there is nothing to continue", "prompt")
        if length >= max_model_len:
            raise RequestError(
                f"the prompt has {length} tokens; with max_model_len={max_model_len} it may have"
                f" at most {max_model_len - 1}, so that one new token fits. Shorten it by"
                f" {length - max_model_len + 1} tokens or raise --max-model-len",
                "prompt",
            )
        most = self.params.max_tokens
        return max_model_len if most is None else min(max_model_len, length + most)


class SequenceStatus(Enum):
    """Where a sequence stands.

    ::

        WAITING ⇄ FOLLOWING        another sequence is computing the same prefix
           │  ▲
        admit │ preempt
           ▼  │
        RUNNING ──▶ FINISHED
    """

    WAITING = "waiting"
    FOLLOWING = "following"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Tokens, table and progress of one request. The scheduler is its only writer.

    Three counts are kept apart, so that a plan can later be made one step ahead: *known* tokens
    (`num_tokens`), tokens *scheduled* in the plan in flight (`num_scheduled`), and tokens
    *computed* (`num_computed`, recorded by the cache).

    Parameters
    ----------
    request : EngineRequest
    arrival : int
        Order of arrival. Kept across preemptions.
    base_seed : int
        The draws of a request without a seed of its own depend on this and its arrival.
    max_num_tokens : int
        Prompt and output at most.
    chain : HashChain or None
        ``None`` when the blocks are never to be found.
    stored_chain : HashChain or None
        Names under which lower tiers know its blocks; `chain` unless it is approximate.
    table : BlockTable or None
        Held while RUNNING.

    Attributes
    ----------
    is_exact : bool
        Whether all that it has read is as if it had computed it.
    owner_id : str
        The request that its news belong to; its own unless it is one of several continuations.
    index : int
        Which of the request's continuations it is.
    matcher : Matcher or None
        Where its output stands in its grammar.
    counts : dict of token id to int, or None
        How often each token was generated, 0 for those of the prompt; where penalties ask for it.
    prompt_logprobs : list of TokenLogprobs, or None
        Those of prompt tokens 1, 2, … as far as they were computed; ``None`` if nobody asks.
    stop_ids : tuple of int
        Ids that end it.
    load_limit : int or None
        Tokens it may compute up to, while blocks behind them are being loaded.
    num_loading_blocks : int
        How many those are.
    num_seen : int
        Leading tokens it once had K and V of; what is computed below that is computed again.
    passes : int
        How many that came later were let in before it, because it found no room.
    output_at_preemption : int
        Generated tokens when it was last preempted; -1 if it never was.
    """

    __slots__ = (
        "abort_requested",
        "allocation",
        "arrival",
        "base_seed",
        "chain",
        "counts",
        "index",
        "is_exact",
        "load_limit",
        "matcher",
        "max_num_tokens",
        "num_cached_tokens",
        "num_loading_blocks",
        "num_prompt_tokens",
        "num_scheduled",
        "num_seen",
        "output_at_preemption",
        "owner_id",
        "params",
        "passes",
        "preemptions",
        "priority",
        "promised",
        "prompt_logprobs",
        "request",
        "request_id",
        "seed",
        "status",
        "stop_ids",
        "stored_chain",
        "table",
        "token_ids",
    )

    def __init__(
        self,
        request: EngineRequest,
        arrival: int,
        base_seed: int,
        max_num_tokens: int,
        chain: HashChain | None,
        stored_chain: HashChain | None = None,
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.params = request.params
        self.priority = request.priority
        self.arrival = arrival
        self.base_seed = base_seed
        self.seed = base_seed + arrival if self.params.seed is None else self.params.seed
        self.max_num_tokens = max_num_tokens
        self.stop_ids = self.params.stop_token_ids
        if not self.params.ignore_eos:
            self.stop_ids += request.eos_token_ids
        self.chain = chain
        self.stored_chain = stored_chain or chain
        self.is_exact = True
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.status = SequenceStatus.WAITING
        self.table: BlockTable | None = None
        self.allocation: Allocation | None = None
        self.num_scheduled = 0
        self.num_cached_tokens: int | None = None
        self.load_limit: int | None = None
        self.num_loading_blocks = 0
        self.num_seen = 0
        self.passes = 0
        self.preemptions = 0
        self.output_at_preemption = -1
        self.promised = range(0)
        self.abort_requested = False
        self.owner_id = self.request_id
        self.index = 0
        self.matcher: Matcher | None = None
        self.counts: dict[int, int] | None = None
        if self.params.has_penalties:
            self.counts = dict.fromkeys(self.token_ids, 0)
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = []

    def fork(self, request_id: str, arrival: int) -> Sequence:
        """Return a waiting sequence with the same request and tokens, and no table."""
        chain = self.chain.fork() if self.chain else None
        stored = self.stored_chain.fork() if self.stored_chain and self.is_approximate else None
        other = Sequence(self.request, arrival, self.base_seed, self.max_num_tokens, chain, stored)
        other.is_exact = self.is_exact
        other.request_id = other.owner_id = request_id
        other.token_ids = list(self.token_ids)
        other.num_cached_tokens = self.num_cached_tokens
        other.num_seen = self.num_seen
        other.matcher = self.matcher.fork() if self.matcher else None
        other.counts = dict(self.counts) if self.counts is not None else None
        other.prompt_logprobs = None
        return other

    def sample(self, index: int, arrival: int) -> Sequence:
        """Return another continuation of the same request: a fork that draws by its own index."""
        other = self.fork(f"{self.owner_id}#{index}", arrival)
        other.owner_id = self.owner_id
        other.index = index
        other.seed = self.seed
        return other

    def append(self, token_id: int) -> None:
        """Take a new token."""
        self.token_ids.append(token_id)
        if self.counts is not None:
            self.counts[token_id] = self.counts.get(token_id, 0) + 1

    @property
    def is_approximate(self) -> bool:
        """Whether its blocks have names of their own, that exact sequences never look for."""
        return self.stored_chain is not self.chain

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output so far."""
        return len(self.token_ids)

    @property
    def num_computed(self) -> int:
        """Tokens whose K and V are recorded as written."""
        return self.table.num_tokens if self.table is not None else 0

    @property
    def num_remaining(self) -> int:
        """Known tokens that are not yet computed; 1 while decoding."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_unread(self) -> int:
        """The same, but 0 while decoding: what must be computed before it says anything."""
        remaining = self.num_remaining
        return remaining if remaining > 1 else 0

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """Generated tokens, a copy."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def owes_a_token(self) -> bool:
        """Whether it was preempted and has said nothing since: it should not be again."""
        return self.num_output_tokens == self.output_at_preemption

    def see(self, num_tokens: int) -> tuple[int, int]:
        """Note that K and V of the tokens from `num_computed` up to `num_tokens` were computed.

        Returns
        -------
        tuple of int
            Prompt tokens among them that are new, and tokens of any kind that are not.
        """
        start, seen = self.num_computed, self.num_seen
        if start >= seen and start >= self.num_prompt_tokens:  # a decode: most calls, and no news
            self.num_seen = num_tokens
            return 0, 0
        again = max(0, min(num_tokens, seen) - start)
        prompt = max(0, min(num_tokens, self.num_prompt_tokens) - max(start, seen))
        self.num_seen = max(seen, num_tokens)
        return prompt, again

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether prompt positions are missing whose log probabilities were asked for."""
        held = self.prompt_logprobs
        return held is not None and len(held) < self.num_prompt_tokens - 1

    def stop_reason(self, token_id: int) -> str | None:
        """Return why the sequence ends with `token_id`, its newest token, or ``None``."""
        if token_id in self.stop_ids and self.num_output_tokens > self.params.min_tokens:
            return "stop"
        if self.matcher is not None and self.matcher.is_done:
            return "stop"
        return "length" if len(self.token_ids) >= self.max_num_tokens else None

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.request_id} {self.status.value}"
            f" {self.num_computed}/{self.num_tokens} tokens>"
        )
