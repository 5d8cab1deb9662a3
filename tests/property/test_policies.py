"""Every policy, with and without a protected share, holds to the contract; so does `Keeper`.

Guards: a parent that leaves before its child, a block that can never leave, a budget exceeded, a
pinned block evicted, a tenant that takes another's room.
"""

from __future__ import annotations

from hypothesis import settings

from kvist.testing.policy_machine import KeeperMachine, PolicyMachine

TestPolicies = PolicyMachine.TestCase
TestPolicies.settings = settings(max_examples=60, stateful_step_count=30)

TestKeeper = KeeperMachine.TestCase
TestKeeper.settings = settings(max_examples=60, stateful_step_count=30)
