"""One sequence: the tokens of a request and how far they are computed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvist.blocks.table import BlockTable
from kvist.cache import Allocation
from kvist.engine.sampling import SamplingParams
from kvist.errors import RequestError
from kvist.keys import HashChain


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
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0
    adapter: str = ""
    salt: str = ""

    def check(self, max_model_len: int) -> int:
        """Return how long the sequence may get, prompt and output, in a window of `max_model_len`.

        Raises
        ------
        RequestError
            If the prompt is empty, or leaves no room for one new token.
        """
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
    table : BlockTable or None
        Held while RUNNING.
    """

    __slots__ = (
        "abort_requested",
        "allocation",
        "arrival",
        "base_seed",
        "chain",
        "max_num_tokens",
        "num_cached_tokens",
        "num_prompt_tokens",
        "num_scheduled",
        "params",
        "preemptions",
        "priority",
        "promised",
        "request",
        "request_id",
        "seed",
        "status",
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
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.params = request.params
        self.priority = request.priority
        self.arrival = arrival
        self.base_seed = base_seed
        self.seed = base_seed + arrival if self.params.seed is None else self.params.seed
        self.max_num_tokens = max_num_tokens
        self.chain = chain
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.status = SequenceStatus.WAITING
        self.table: BlockTable | None = None
        self.allocation: Allocation | None = None
        self.num_scheduled = 0
        self.num_cached_tokens: int | None = None
        self.preemptions = 0
        self.promised = range(0)
        self.abort_requested = False

    def fork(self, request_id: str, arrival: int) -> Sequence:
        """Return a waiting sequence with the same request and tokens, and no table."""
        chain = self.chain.fork() if self.chain else None
        other = Sequence(self.request, arrival, self.base_seed, self.max_num_tokens, chain)
        other.request_id = request_id
        other.token_ids = list(self.token_ids)
        other.num_cached_tokens = self.num_cached_tokens
        return other

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
    def num_output_tokens(self) -> int:
        """Generated tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """Generated tokens, a copy."""
        return self.token_ids[self.num_prompt_tokens :]

    def stop_reason(self, token_id: int) -> str | None:
        """Return why the sequence ends with `token_id`, its newest token, or ``None``."""
        params = self.params
        if token_id in params.stop_token_ids:
            return "stop"
        if token_id in self.request.eos_token_ids and not params.ignore_eos:
            return "stop"
        return "length" if self.num_tokens >= self.max_num_tokens else None

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.request_id} {self.status.value}"
            f" {self.num_computed}/{self.num_tokens} tokens>"
        )
