"""Symptoms in a log of requests.

Owns thresholds over what prompts share (`compare_prompts`), how far apart in time they come again
(`measure_reuse`) and, where somebody noted it, what a server found of it.

::

    attainable   what an endless cache would find
    expected     what one of the server's size would find
    measured     what it did find

    expected << attainable: too small, or hot prefixes pushed out     measured << expected: they do
    not have the same name
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvist.lab.doctor.finding import SYMPTOMS, Finding, by_gain
from kvist.lab.doctor.prompts import ORDER, Sharing, compare_prompts, words
from kvist.lab.doctor.records import Record
from kvist.lab.doctor.reuse import Reuse, measure_reuse
from kvist.lab.doctor.server import is_roomy
from kvist.lab.doctor.slope import examine_decode
from kvist.lab.doctor.thresholds import DEFAULT_THRESHOLDS, Thresholds

TOKENS_A_WORD = 1.3
EARLY_SHARE = 0.5
"""A difference is early if it stands in the first half of what could be shared."""

_MOVABLE = 0.2
_WORTH = 0.1
"""Less reuse than this is not worth a cache's trouble."""

_SOME_WORDS = 4
"""Fewer than these are the name of a role, not a prefix."""

_POOR = 0.7
"""Less than this of what could be found is poor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What is known of the server that the requests went to.

    Attributes
    ----------
    block_size : int
        What is shared below one block is never found.
    pool_tokens, max_model_len : int or None
    hit_rate : float or None
        Measured.
    """

    block_size: int = 16
    pool_tokens: int | None = None
    max_model_len: int | None = None
    hit_rate: float | None = None


DEFAULT_SERVER = ServerFacts()


def chains_of(records: Sequence[Record], block_size: int) -> list[list[int]]:
    """Cut prompts into blocks whose id stands for them and everything before, within a scope."""
    step = max(1, round(block_size / TOKENS_A_WORD))
    chains: list[list[int]] = []
    for record in records:
        cut = words(record.prompt)
        parent = hash(record.scope)
        chain = []
        for end in range(step, len(cut) + 1, step):
            parent = hash((parent, *cut[end - step : end]))
            chain.append(parent)
        chains.append(chain)
    return chains


def measured_hit_rate(records: Sequence[Record]) -> tuple[float, int] | None:
    """Return the share of prompt tokens that answers say were cached, and of how many tokens."""
    told = [r for r in records if r.cached_tokens is not None and r.prompt_tokens]
    if len(told) < max(2, len(records) // 2):
        return None
    tokens = sum(r.prompt_tokens or 0 for r in told)
    return sum(r.cached_tokens or 0 for r in told) / tokens, tokens


def examine_requests(
    records: Sequence[Record],
    sharing: Sharing | None = None,
    reuse: Reuse | None = None,
    server: ServerFacts = DEFAULT_SERVER,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
) -> list[Finding]:
    """Return what a request log tells, by expected gain.

    `sharing` and `reuse` are computed if they are not given.
    """
    if len(records) < 2:
        return []
    sharing = sharing or compare_prompts([record.prompt for record in records])
    reuse = reuse or measure_reuse(chains_of(records, server.block_size), server.block_size)
    found = _scopes(records, sharing, reuse)
    found += _shape(sharing, server, thresholds)
    found += examine_reuse(reuse, server)
    found += _context(records, server, thresholds)
    found += examine_decode(
        [
            (r.prompt_tokens + r.output_tokens / 2, 1e3 * r.duration_s / r.output_tokens)
            for r in records
            if r.prompt_tokens and r.output_tokens and r.output_tokens >= 16 and r.duration_s
        ]
    )
    return by_gain(found)


def examine_reuse(reuse: Reuse, server: ServerFacts) -> list[Finding]:
    """Return what a server of a known size, or with a known hit rate, makes of what comes again."""
    attainable, pool = reuse.attainable, server.pool_tokens
    if attainable < _WORTH:
        return []
    enough = reuse.enough_tokens()
    expected = attainable if pool is None else reuse.rate(pool)
    if pool is not None and expected < _POOR * attainable:
        hot = reuse.hot_blocks * reuse.block_tokens
        if hot and hot <= pool / 2 and reuse.hot_rate(pool) < _POOR:
            return [
                Finding(
                    SYMPTOMS["hot-prefixes-evicted"],
                    f"{reuse.hot_blocks:,} blocks come again and again and need {hot:,.0f} of the"
                    f" pool's {pool:,} tokens, yet LRU keeps them for only"
                    f" {reuse.hot_rate(pool):.0%} of their uses",
                    "prompts that come once push them out between two uses",
                    "kvist: --protected-share 0.25; elsewhere a lower tier (--tier host:…,"
                    f" --kv-offloading-size) that holds {enough:,} tokens",
                )
            ]
        return [
            Finding(
                SYMPTOMS["cache-too-small"],
                f"{attainable:.0%} of all prompt tokens came before, a pool of {pool:,} tokens"
                f" finds {expected:.0%}",
                "prefixes leave before they come again",
                f"KV memory and tiers for {enough:,} tokens find 90 % of it (kvist plan says the"
                " bytes)",
            )
        ]
    if server.hit_rate is not None and server.hit_rate < expected / 4:
        where = "any size" if pool is None else f"{pool:,} tokens"
        return [
            Finding(
                SYMPTOMS["salt-or-hash-differs"],
                f"{expected:.0%} of all prompt tokens came before and fit a cache of {where}, the"
                f" server found {server.hit_rate:.1%}",
                "equal text does not get equal names: a salt or user id that a proxy adds, another"
                " chat template or adapter, an image, or several replicas that share no requests;"
                " or prefix caching is off",
                "one cache_salt for all who may share, requests of a prefix to one replica; never"
                " drop position or parent from the hash",
            )
        ]
    if server.hit_rate is not None and server.hit_rate < _POOR * expected:
        return [
            Finding(
                SYMPTOMS["hit-rate-low"],
                f"{expected:.0%} of all prompt tokens came before, the server found"
                f" {server.hit_rate:.0%}",
                "some left before they came again, went to another replica, or came at the same"
                " time as the first",
                f"KV memory and tiers for {enough:,} tokens; requests of a prefix to one replica",
            )
        ]
    return []


def _scopes(records: Sequence[Record], sharing: Sharing, reuse: Reuse) -> list[Finding]:
    """Prompts share, and salts (or models, or adapters) keep them apart."""
    scopes = Counter(record.scope for record in records)
    if len(scopes) < 2 or sharing.rate < _MOVABLE or reuse.attainable > sharing.rate / 2:
        return []
    salts = {record.salt for record in records}
    what = "salt" if len(salts) > 1 else "model or adapter"
    return [
        Finding(
            SYMPTOMS["salt-or-hash-differs"],
            f"{len(records)} requests have {len(scopes)} different names of {what}; their prompts"
            f" share {sharing.rate:.0%} of all words, within one {what} {reuse.attainable:.0%}",
            f"K and V are only shared within one {what}: it is part of a block's address",
            f"one {what} for all who may see each other's prompts (a tenant, not a request)",
        )
    ]


def _shape(sharing: Sharing, server: ServerFacts, thresholds: Thresholds) -> list[Finding]:
    if sharing.num_words == 0:
        return []
    movable = sharing.movable_words / sharing.num_words
    if sharing.differences and movable > _MOVABLE and movable > EARLY_SHARE * sharing.rate:
        return [_early(sharing, movable)]
    median = sharing.quartiles[1] * TOKENS_A_WORD
    if sharing.quartiles[1] >= _SOME_WORDS and median < server.block_size:
        return [
            Finding(
                SYMPTOMS["block-larger-than-prefix"],
                f"half of the prompts share at most about {median:.0f} tokens, a block has"
                f" {server.block_size}",
                "only whole blocks are found again",
                "a smaller --block-size (8 or 16), or a longer common beginning",
            )
        ]
    if sharing.rate < thresholds.min_shared:
        return [
            Finding(
                SYMPTOMS["prompts-share-nothing"],
                f"{sharing.num_prompts} prompts share {sharing.rate:.1%} of their words",
                "each prompt is new from its first words on",
                "no cache helps here; save memory with a shorter --max-model-len instead",
            )
        ]
    return []


def _early(sharing: Sharing, movable: float) -> Finding:
    top = sharing.differences[0]
    token = round(top.position * TOKENS_A_WORD)
    one, other = top.example
    more = "; also " * bool(sharing.differences[1:]) + ", ".join(
        f"{d.kind} at about token {round(d.position * TOKENS_A_WORD)} ({d.count} times)"
        for d in sharing.differences[1:3]
    )
    remedy = (
        f"put {top.kind} at the end of the prompt, or into the last message; a date without the"
        " time of day is enough for most"
    )
    if top.kind == ORDER:
        remedy = "send tools and documents in one fixed order, as by name"
    return Finding(
        SYMPTOMS["prefix-differs-early"],
        f"{top.kind} at about token {token} differs in {top.count} of"
        f" {sharing.num_prompts - 1} neighbouring prompts ({one!r} / {other!r}){more}; behind it"
        f" {movable:.0%} of all words are the same again, {sharing.rate:.0%} are shared now",
        "what stands behind the first difference has another name in the cache, however equal",
        remedy,
    )


def _context(
    records: Sequence[Record], server: ServerFacts, thresholds: Thresholds
) -> list[Finding]:
    most = server.max_model_len
    if most is None or len(records) < thresholds.min_requests:
        return []
    lengths = sorted(
        (r.prompt_tokens or len(words(r.prompt)) * TOKENS_A_WORD) + (r.output_tokens or 0)
        for r in records
    )
    need = lengths[int(0.99 * (len(lengths) - 1))]
    if most <= thresholds.max_model_len_over_need * need or is_roomy(server.pool_tokens, most):
        return []
    return [
        Finding(
            SYMPTOMS["max-model-len-too-long"],
            f"99 % of {len(records):,} requests need at most {need:,.0f} tokens, the context length"
            f" is {most:,}",
            "the model's own maximum was taken over",
            f"--max-model-len {int(need * 1.2)} to {int(need * 1.5)}",
        )
    ]
