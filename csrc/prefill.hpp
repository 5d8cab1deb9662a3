// Many query tokens of one sequence over its tiles: the rows of a KV head's whole group together, so
// that K and V are read once for them.
//
//     positions    |  step 0 (16 tiles)  |  step 1 ...      always from multiples of a step
//     rows         token 0: g0 g1 g2 | token 1: g0 g1 g2 | ...
//     chunk        so many rows as the registers take; tiles above its diagonal are skipped
//
// A row sees the same steps in the same order whatever rows are beside it.
#pragma once

#include "attend.hpp"
#include "read.hpp"
#include "rotary.hpp"

namespace kvist {
namespace {

constexpr std::int64_t kPrefillTiles = 16;

// How a policy goes through the rows of a prefill: here, a few at a time in registers.
template <class P>
struct InRegisters : P {
    using Base = P;
    using Word = typename P::Word;
    static constexpr std::int64_t kChunk = kMostRows;

    // V of a step; `value` has room for all of its tiles.
    static void values(const Geometry& g, const Tile* tile, std::int64_t tiles, std::int64_t head,
                       const Step<Word>& step) {
        const std::int64_t room = P::tile_bytes(g.key_pad, g.value_pad);
        for (std::int64_t t = 0; t < tiles; ++t) {
            step.value[t] = P::value(g, tile[t], head, step.room + (kPrefillTiles + t) * room);
        }
    }

    static void score_chunk(std::int64_t rows, const Geometry& g, const Word* query, std::int64_t tiles,
                            const Step<Word>& step, float* scores) {
        score_some<P, false>(rows, g, query, tiles, step, scores);
    }

    static void add_chunk(std::int64_t rows, const Geometry& g, const Word* weights, std::int64_t tiles,
                          const Step<Word>& step, const float* factors, float* sum) {
        add_some<P, false>(rows, g, weights, tiles, step, factors, sum);
    }

    static void soften_chunk(std::int64_t rows, const Geometry& g, std::int64_t tiles, const Step<Word>& step,
                             float* top, float* weight) {
        soften<P>(g, rows, tiles, step, step.scores, step.weights, top, weight, step.factors);
    }

    static void begin() {}
    static void end() {}
};

// Bytes of what lives through all steps of a job: queries, sums, tops and weights of its rows.
template <class M>
static std::int64_t rows_bytes(const Geometry& g, std::int64_t rows) {
    return whole(rows * g.key_pad * (std::int64_t)sizeof(typename M::Word), 64) + rows * g.value_pad * 4 +
           2 * whole(rows, kLanes) * 4;
}

template <class M>
static std::int64_t prefill_scratch(const Geometry& g, std::int64_t tokens) {
    return rows_bytes<M>(g, whole(tokens * g.group, M::kChunk)) + step_bytes<M>(g, M::kChunk, kPrefillTiles);
}

// Slots that a row may not see become minus infinity.
static void mask_row(const Geometry& g, float* scores, const Tile* tile, std::int64_t tiles, std::int64_t position,
                     std::int64_t window) {
    if (g.softcap > 0.0f) cap(g, scores, tiles);
    for (std::int64_t t = 0; t < tiles; ++t) {
        const std::uint32_t mask = seen(tile[t], position, window);
        if (mask != 0xffff) store(scores + t * kTileSlots, masked(load<Floats>(scores + t * kTileSlots), mask));
    }
}

// K and V of the next step, a few tiles beside each chunk: blocks lie anywhere, which no prefetcher of
// the processor guesses.
template <class M>
KVIST_INLINE void fetch_tile(const Geometry& g, const Tile& tile, std::int64_t head) {
    if (!M::kFetches) return;
    const char *const key = key_of(g, tile, head), *const value = value_of(g, tile, head);
    for (std::int64_t at = 0; at < g.key_dim * kTileSlots * 2; at += 64) fetch(key + at);
    for (std::int64_t at = 0; at < g.value_dim * kTileSlots * 2; at += 64) fetch(value + at);
}

template <class M>
static void prefill(const Geometry& g, const PrefillJob& job, char* scratch) {
    using Word = typename M::Word;
    const std::int64_t rows = job.tokens * g.group, padded = whole(rows, M::kChunk);
    auto* const queries = reinterpret_cast<Word*>(scratch);
    auto* const sums = reinterpret_cast<float*>(scratch + whole(padded * g.key_pad * (std::int64_t)sizeof(Word), 64));
    float* const tops = sums + padded * g.value_pad;
    float* const weights = tops + whole(padded, kLanes);
    const Step<Word> step = lay_out<M>(g, M::kChunk, kPrefillTiles, scratch + rows_bytes<M>(g, padded));
    const std::int64_t room = M::tile_bytes(g.key_pad, g.value_pad);

    for (std::int64_t r = 0; r < rows; ++r) {
        const std::int64_t q = job.head * g.group + r % g.group;
        M::query(job.query.data + r / g.group * job.query.token_bytes + q * job.query.head_bytes, job.query.element,
                 g.key_dim, queries + r * g.key_pad, g.key_pad);
    }
    std::memset(queries + rows * g.key_pad, 0, (std::size_t)((padded - rows) * g.key_pad) * sizeof(Word));
    std::memset(sums, 0, (std::size_t)(padded * g.value_pad * 4));
    for (std::int64_t r = 0; r < padded; ++r) {
        tops[r] = kNothing;
        weights[r] = 0.0f;
    }

    const std::int64_t last = job.position + job.tokens - 1;
    for (const Tile* tile = job.tiles; tile < job.end; tile += kPrefillTiles) {
        if (tile->position > last) break;
        const std::int64_t all = least(kPrefillTiles, job.end - tile);
        if (job.window > 0 && tile[all - 1].position + kTileSlots <= job.position - job.window + 1) continue;
        std::int64_t tiles = 0;
        while (tiles < all && tile[tiles].position <= last) ++tiles;
        bool clear = g.softcap == 0.0f && job.window == 0;
        for (std::int64_t t = 0; t < tiles; ++t) {
            step.key[t] = M::key(g, tile[t], job.head, step.room + t * room);
            clear = clear && tile[t].mask == 0xffff;
        }
        M::values(g, tile, tiles, job.head, step);
        std::int64_t fetched = all;
        const std::int64_t known = least(2 * kPrefillTiles, job.end - tile);
        const std::int64_t fetches = whole(kPrefillTiles * M::kChunk, rows) / rows;
        for (std::int64_t begin = 0; begin < rows; begin += M::kChunk) {
            for (const std::int64_t end = least(fetched + fetches, known); fetched < end; ++fetched) {
                fetch_tile<M>(g, tile[fetched], job.head);
            }
            const std::int64_t some = least(M::kChunk, rows - begin);
            const std::int64_t lowest = job.position + begin / g.group;
            const std::int64_t highest = job.position + (begin + some - 1) / g.group;
            std::int64_t visible = tiles;
            while (visible > 0 && tile[visible - 1].position > highest) --visible;
            if (visible == 0) continue;
            if (job.window > 0 && tile[visible - 1].position + kTileSlots <= lowest - job.window + 1) continue;
            M::score_chunk(some, g, queries + begin * g.key_pad, visible, step, step.scores);
            if (!clear || tile[visible - 1].position + kTileSlots - 1 > lowest) {
                for (std::int64_t r = 0; r < some; ++r) {
                    mask_row(g, step.scores + r * step.width, tile, visible, job.position + (begin + r) / g.group,
                             job.window);
                }
            }
            M::soften_chunk(some, g, visible, step, tops + begin, weights + begin);
            M::add_chunk(some, g, step.weights, visible, step, step.factors, sums + begin * g.value_pad);
        }
    }
    for (std::int64_t r = 0; r < rows; ++r) {
        const std::int64_t token = r / g.group, q = job.head * g.group + r % g.group;
        finish(sums + r * g.value_pad, tops[r], weights[r], job.sinks ? job.sinks + q : nullptr, g.value_dim,
               job.out.data + token * job.out.token_bytes + q * job.out.head_bytes, job.out.element,
               job.lse ? job.lse + token * g.heads * g.group + q : nullptr);
    }
}

static void nothing() {}

static void widen_whole(const char* from, Element element, std::int64_t dim, float* to) {
    widen(from, element, dim, to, whole(dim, kLanes));
}

template <class P>
static const Kernels* table() {
    static constexpr Kernels kTable{decode_scratch<P>,
                                    prefill_scratch<InRegisters<P>>,
                                    decode<P>,
                                    prefill<InRegisters<P>>,
                                    merge,
                                    rotate,
                                    widen_whole,
                                    read,
                                    nothing,
                                    nothing};
    return &kTable;
}

// What can be had from any instruction set.
[[maybe_unused]] static const Kernels* in_fp32(Arithmetic arithmetic) {
    switch (arithmetic) {
        case Arithmetic::rows: return table<Widened>();
        case Arithmetic::wide_bf16: return table<Wide<Element::bf16>>();
        case Arithmetic::wide_fp16: return table<Wide<Element::f16>>();
        case Arithmetic::dot: break;
    }
    return nullptr;
}

}  // namespace
}  // namespace kvist
