"""Copies that a lossy codec made: read for those who allow it, never for others, and told of.

Real K and V of a tiny model, through real tiers with `kvist.testing.lossy_codec`.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("xxhash")

from kvist.config import EngineConfig
from kvist.engine.assemble import open_engine
from kvist.engine.sampling import SamplingParams
from kvist.engine.sequence import EngineRequest
from kvist.events import BlocksDemoted, BlocksPromoted
from kvist.policies.keeper import Keeper
from kvist.policies.registry import policy_factory
from kvist.testing.lossy_codec import HalvingCodec
from kvist.tiers.disk.tier import DiskTier
from kvist.tiers.host import HostTier

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = tuple((i * 7 + i // 13) % 250 for i in range(330))
HIT = 320  # whole blocks that leave a token to compute


def host(tmp_path, codec):
    return HostTier(16 << 20, lambda size: Keeper(size, policy_factory("lru")), codec=codec)


def disk(tmp_path, codec):
    return DiskTier(tmp_path / "kv", 16 << 20, codec=codec)


class Served:
    """An engine over given tiers, asked one prompt at a time."""

    def __init__(self, folder, *tiers):
        config = EngineConfig.resolve(
            {
                "model": str(folder),
                "dtype": "float32",
                "max_model_len": 512,
                "kv_cache_memory_bytes": "1MiB",
                "poison_fresh_blocks": True,
                "tier_load_policy": "always",
            }
        )
        self.opened = open_engine(config, tiers)
        self.engine = self.opened.engine
        self._count = 0

    def ask(self, **options):
        """Return the tokens, how many of the prompt's were cached, and whether all was exact."""
        self._count += 1
        request = EngineRequest(
            request_id=str(self._count), prompt_token_ids=PROMPT, params=PARAMS, **options
        )
        self.engine.add_request(request)
        updates = []
        while self.engine.has_work:
            updates += self.engine.step()
            self.engine.scheduler.check()
        tokens = [token for update in updates for token in update.token_ids]
        return tokens, updates[-1].num_cached_tokens, all(update.exact for update in updates)

    def forget(self):
        assert self.engine.scheduler.loads.tiers.drain(30)
        self.engine.scheduler.cache.reset_prefix_cache()


@contextmanager
def served(folder, *tiers):
    made = Served(folder, *tiers)
    try:
        yield made
    finally:
        made.opened.close()


@pytest.fixture(scope="module")
def folder(tiny_folder):
    return tiny_folder("llama")


@pytest.fixture(scope="module")
def expected(folder, one_thread):
    with served(folder) as engine:
        return engine.ask()[0]


@pytest.mark.parametrize("make", [host, disk])
def test_a_lossy_copy_is_read_for_those_who_allow_it_and_for_nobody_else(
    folder, expected, tmp_path, make
):
    with served(folder, make(tmp_path, HalvingCodec())) as engine:
        assert engine.ask() == (expected, 0, True)
        engine.forget()
        assert engine.ask() == (expected, 0, True), "a lossy copy was read unasked"
        assert engine.engine.events.counts[BlocksPromoted] == 0
        engine.forget()
        tokens, cached, exact = engine.ask(allow_lossy=True)
        assert (len(tokens), cached, exact) == (len(expected), HIT, False)


def test_what_comes_of_a_lossy_copy_is_found_by_no_exact_request(folder, expected, tmp_path):
    """On the device and below: the blocks it loaded, and those that it computed after them."""
    with served(folder, host(tmp_path, HalvingCodec())) as engine:
        engine.ask()
        engine.forget()
        tokens, _, _ = engine.ask(allow_lossy=True)
        assert engine.ask() == (expected, 0, True)
        # Others that allow it share the device's blocks with the first, and are told so too.
        assert engine.ask(allow_lossy=True)[1:] == (HIT, False)
        demoted = engine.engine.events.counts[BlocksDemoted]
        engine.forget()
        assert engine.ask(allow_lossy=True) == (tokens, HIT, False)
        engine.forget()
        assert engine.engine.events.counts[BlocksDemoted] == demoted, "an approximate block went"


def test_who_allows_it_and_read_nothing_lossy_is_exact(folder, expected, tmp_path):
    with served(folder, host(tmp_path, HalvingCodec())) as engine:
        assert engine.ask(allow_lossy=True) == (expected, 0, True)


def test_without_lossy_tiers_all_share_everything(folder, expected, tmp_path):
    with served(folder, host(tmp_path, None)) as engine:
        assert engine.ask() == (expected, 0, True)
        assert engine.ask(allow_lossy=True) == (expected, HIT, True)
        engine.forget()
        assert engine.ask(allow_lossy=True) == (expected, HIT, True)


def test_tenants_share_no_lossy_copies(folder, tmp_path):
    with served(folder, host(tmp_path, HalvingCodec())) as engine:
        engine.ask()
        engine.forget()
        assert engine.ask(allow_lossy=True, salt="mine")[1] == 0


def test_lossy_copies_of_yesterday_are_not_believed_by_a_lossless_tier_of_today(
    folder, expected, tmp_path
):
    with served(folder, disk(tmp_path, HalvingCodec())) as engine:
        engine.ask()
        engine.forget()
    with served(folder, disk(tmp_path, None)) as engine:
        assert engine.ask() == (expected, 0, True)
