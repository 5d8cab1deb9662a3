"""A runner without a model: the whole control plane in seconds, and in virtual time.

Its "model" is a hash: the state after a token mixes the state before it with the token, and the
next token is a function of the state. The state of every token is kept *in the slot the block table
gives it*, in a paged memory of plain integers, and is read back from there. So the output depends
on every block of the context being the right one, exactly as with a real model: a wrong table, a
block reused too early, a missed copy-on-write or a false hit changes the tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from kvist.engine.sequence import TokenLogprobs
from kvist.engine.step import Scheduled, StepPlan, StepResult
from kvist.errors import IntegrityError

_MULTIPLIER = 6364136223846793005
_MASK = (1 << 64) - 1
_START = 0x9E3779B97F4A7C15


def next_state(state: int, token_id: int) -> int:
    """Mix one token into the state of the tokens before it."""
    state = ((state ^ (token_id + 1)) * _MULTIPLIER + 1442695040888963407) & _MASK
    return state ^ (state >> 29)


def null_generate(prompt: Sequence[int], num_tokens: int, vocab_size: int) -> list[int]:
    """Return what the null model says after `prompt`: the plain definition, without any memory."""
    state = _START
    for token_id in prompt:
        state = next_state(state, token_id)
    output: list[int] = []
    while len(output) < num_tokens:
        output.append(state % vocab_size)
        state = next_state(state, output[-1])
    return output


class SlotMemory:
    """A paged memory of integers: a token and the state after it, a slot.

    The bytes of a block are one run, so that transfers reach them as they reach a real device's.

    Parameters
    ----------
    num_blocks, block_size : int
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_bytes = 16 * block_size
        self._block_size = block_size
        self._words = array("Q", bytes(num_blocks * self.block_bytes))
        self._bytes = memoryview(self._words).cast("B")

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self._block_bytes

    def wipe(self, block_id: int) -> None:
        """Forget what is in a block."""
        self.landing(block_id)[:] = bytes(self.block_bytes)

    def copy(self, source: int, target: int) -> None:
        """Copy a whole block."""
        self.landing(target)[:] = self.landing(source)

    def write(self, slot: int, token_id: int, state: int) -> None:
        """Write one slot."""
        self._words[2 * slot] = token_id + 1
        self._words[2 * slot + 1] = state

    def at(self, slot: int) -> tuple[int, int] | None:
        """Return token and state of a slot; ``None`` if nobody wrote it since it was wiped."""
        token = self._words[2 * slot]
        return (token - 1, self._words[2 * slot + 1]) if token else None

    def read(self, block_id: int, out: memoryview) -> None:
        """See `kvist.tiers.promotion.DeviceBytes`."""
        out[:] = self.landing(block_id)

    def landing(self, block_id: int) -> memoryview:
        """See `kvist.tiers.promotion.DeviceBytes`: the block itself."""
        return self._bytes[block_id * self.block_bytes : (block_id + 1) * self.block_bytes]

    def land(self, block_id: int, landing: memoryview) -> None:
        """See `kvist.tiers.promotion.DeviceBytes`: it is there."""


class NullRunner:
    """Runs plans over a paged memory of integers.

    Parameters
    ----------
    num_blocks, block_size, vocab_size : int
    verify : bool
        Recompute the state of the whole context from its slots at every run: O(context) a run,
        and an `IntegrityError` if any slot of it is not what the sequence wrote.
    step_seconds : callable, optional
        Cost model: seconds of virtual time that a plan takes. Added up in `now_s`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int = 1000,
        *,
        verify: bool = False,
        step_seconds: Callable[[StepPlan], float] | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.now_s = 0.0
        self.num_computed_tokens = 0
        self._block_size = block_size
        self._verify = verify
        self._step_seconds = step_seconds
        self.memory = SlotMemory(num_blocks, block_size)

    def run(self, plan: StepPlan) -> StepResult:
        """Do the copies, "compute" every run, and say the next token where one is due."""
        for block_id in plan.fresh:
            self.memory.wipe(block_id)
        for copy in plan.copies:
            self.memory.copy(copy.source, copy.target)
        tokens = {}
        prompt_logprobs = {}
        for item in plan.scheduled:
            state = self._run_one(item)
            if item.sample is not None:
                tokens[item.request_id] = state % self.vocab_size
            if item.prompt_rows is not None:
                # It is always sure of everything.
                found = (TokenLogprobs(token_id, 0.0, 1) for token_id in item.prompt_rows.targets)
                prompt_logprobs[item.request_id] = tuple(found)
        if self._step_seconds is not None:
            self.now_s += self._step_seconds(plan)
        return StepResult(tokens, prompt_logprobs=prompt_logprobs)

    def _run_one(self, item: Scheduled) -> int:
        state = self._read_state(item) if item.position else _START
        for offset, token_id in enumerate(item.token_ids):
            state = next_state(state, token_id)
            self.memory.write(self._slot(item, item.position + offset), token_id, state)
        self.num_computed_tokens += len(item.token_ids)
        return state

    def _slot(self, item: Scheduled, position: int) -> int:
        block, slot = divmod(position, self._block_size)
        return item.block_ids[block] * self._block_size + slot

    def _read_state(self, item: Scheduled) -> int:
        """Read the state of the context back from the slots that the table names."""
        first = 0 if self._verify else item.position - 1
        state = _START
        for position in range(first, item.position):
            held = self.memory.at(self._slot(item, position))
            if held is None:
                raise IntegrityError(f"{item.request_id} reads slot {position}, which nobody wrote")
            if self._verify and held[1] != next_state(state, held[0]):
                raise IntegrityError(f"{item.request_id} reads another's token at {position}")
            state = held[1]
        return state
