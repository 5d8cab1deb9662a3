"""The waiting room: order, and who waits for whose block."""

from __future__ import annotations

import pytest

from kvist.engine.queue import OrderedSequences, WaitingQueue
from kvist.engine.sequence import EngineRequest, Sequence, SequenceStatus
from kvist.errors import IntegrityError
from kvist.keys import HashChain, RootKey, lane_key

ROOT = RootKey(bytes(32))


def sequence(
    name: str, arrival: int, *, priority: int = 0, prompt: tuple[int, ...] = (1, 2, 3)
) -> Sequence:
    chain = HashChain(ROOT, lane_key(ROOT), 2)
    chain.extend(prompt)
    request = EngineRequest(request_id=name, prompt_token_ids=prompt, priority=priority)
    return Sequence(request, arrival, 0, 99, chain)


def names(sequences: WaitingQueue | OrderedSequences) -> str:
    return "".join(seq.request_id for seq in sequences)


@pytest.mark.parametrize(("by_priority", "order"), [(False, "abcd"), (True, "bdac")])
def test_order(by_priority: bool, order: str):
    sequences = OrderedSequences(by_priority=by_priority)
    all_of_them = [
        sequence("a", 1, priority=2),
        sequence("b", 2, priority=0),
        sequence("c", 3, priority=2),
        sequence("d", 4, priority=1),
    ]
    for seq in reversed(all_of_them):
        sequences.add(seq)
    assert names(sequences) == order
    assert list(sequences)[-1].request_id == order[-1]
    sequences.check()


def test_a_sequence_that_returns_takes_its_old_place():
    queue = WaitingQueue(by_priority=False)
    a, b, c = (sequence(n, i) for i, n in enumerate("abc"))
    for seq in (a, b, c):
        queue.push(seq)
    queue.remove(a)
    assert names(queue) == "bc"
    queue.push(a)
    assert names(queue) == "abc"


def test_removing_who_is_not_there_is_an_error_that_names_them():
    queue = WaitingQueue(by_priority=False)
    queue.push(sequence("a", 1))
    with pytest.raises(IntegrityError, match="Sequence b"):
        queue.remove(sequence("b", 2))
    with pytest.raises(IntegrityError, match="Sequence twin"):
        queue.remove(sequence("twin", 1))


def test_iterating_is_over_a_snapshot():
    queue = WaitingQueue(by_priority=False)
    for i, name in enumerate("abc"):
        queue.push(sequence(name, i))
    for seq in queue:
        queue.remove(seq)
    assert len(queue) == 0


# ------------------------------------------------------------------------------------- following

PROMPT = (1, 2, 3, 4, 5, 6, 7)


@pytest.fixture
def led() -> tuple[WaitingQueue, Sequence, Sequence]:
    """A queue, a leader that promised blocks 0 to 2, and one with the same prompt that waits."""
    queue = WaitingQueue(by_priority=False)
    leader, follower = sequence("l", 1, prompt=PROMPT), sequence("f", 2, prompt=PROMPT)
    queue.push(follower)
    queue.promise(leader, 0, 3)
    return queue, leader, follower


def test_the_leader_key_is_the_end_of_the_promised_run(
    led: tuple[WaitingQueue, Sequence, Sequence],
):
    queue, leader, _ = led
    assert leader.chain is not None
    keys = leader.chain.keys
    assert queue.leader_key(keys, 0, 3) == keys[2]
    assert queue.leader_key(keys, 0, 2) == keys[1]
    assert queue.leader_key(keys, 2, 2) is None
    other = sequence("o", 3, prompt=(1, 2, 9, 9, 9)).chain
    assert other is not None
    assert queue.leader_key(other.keys, 0, 2) == keys[0]
    assert queue.leader_key(other.keys, 1, 2) is None


def follow(queue: WaitingQueue, follower: Sequence, block: int) -> None:
    assert follower.chain is not None
    queue.follow(follower, follower.chain.keys[block])


def test_a_follower_is_not_looked_at_but_counted(led: tuple[WaitingQueue, Sequence, Sequence]):
    queue, leader, follower = led
    follow(queue, follower, 2)
    assert follower.status is SequenceStatus.FOLLOWING
    assert names(queue) == ""
    assert len(queue) == 1
    queue.check([leader])


def test_it_is_woken_by_its_block_and_not_before(led: tuple[WaitingQueue, Sequence, Sequence]):
    queue, leader, follower = led
    follow(queue, follower, 2)
    queue.fulfil(leader, 2)
    assert names(queue) == ""
    queue.fulfil(leader, 3)
    assert names(queue) == "f"
    assert follower.status is SequenceStatus.WAITING
    queue.check([])


def test_it_is_woken_when_the_leader_gives_up(led: tuple[WaitingQueue, Sequence, Sequence]):
    queue, leader, follower = led
    follow(queue, follower, 2)
    queue.fulfil(leader, 1)
    queue.break_promises(leader)
    assert names(queue) == "f"
    assert leader.promised == range(0)
    queue.check([])


def test_a_follower_can_leave(led: tuple[WaitingQueue, Sequence, Sequence]):
    queue, leader, follower = led
    follow(queue, follower, 2)
    queue.remove(follower)
    assert len(queue) == 0
    queue.break_promises(leader)
    assert len(queue) == 0
    queue.check([])


def test_one_who_leaves_does_not_take_the_others_along(
    led: tuple[WaitingQueue, Sequence, Sequence],
):
    queue, leader, follower = led
    second = sequence("s", 3, prompt=PROMPT)
    queue.push(second)
    follow(queue, follower, 2)
    follow(queue, second, 2)
    queue.remove(follower)
    queue.check([leader])
    queue.fulfil(leader, 3)
    assert names(queue) == "s"


def test_a_promise_stays_with_who_made_it_first(led: tuple[WaitingQueue, Sequence, Sequence]):
    queue, leader, follower = led
    second = sequence("s", 3, prompt=PROMPT)
    queue.promise(second, 0, 3)
    follow(queue, follower, 2)
    queue.break_promises(second)
    assert names(queue) == "", "the leader still computes it"
    queue.break_promises(leader)
    assert names(queue) == "f"


def test_one_that_cannot_be_found_promises_nothing():
    queue = WaitingQueue(by_priority=False)
    request = EngineRequest(request_id="a", prompt_token_ids=PROMPT)
    hidden = Sequence(request, 1, 0, 99, None)
    queue.promise(hidden, 0, 3)
    chain = sequence("b", 2, prompt=PROMPT).chain
    assert chain is not None
    assert queue.leader_key(chain.keys, 0, 3) is None
    queue.break_promises(hidden)


@pytest.mark.parametrize("damage", ["order", "parked", "promise", "status", "leader gone"])
def test_check_finds(damage: str, led: tuple[WaitingQueue, Sequence, Sequence]):
    queue, leader, follower = led
    running = [leader]
    if damage == "order":
        queue.push(sequence("z", 3))
        queue._queue._list.reverse()
    elif damage == "status":
        follower.status = SequenceStatus.RUNNING
    elif damage == "leader gone":
        running = []
    else:
        follow(queue, follower, 2)
        if damage == "parked":
            queue._parked.clear()
        else:
            queue._promises.clear()
    with pytest.raises(IntegrityError):
        queue.check(running)
