// Attention of some query rows over a run of tiles, step by step: scores, softmax so far, sums.
//
//     tiles   | t0 t1 t2 t3 | t4 t5 t6 t7 | t8 ...          a step: its scores fit the first cache
//     row r     top, weight, sum[Dv]   <- rescaled when a step has a larger score
//
// The softmax that never sees all scores at once is FlashAttention's; ours keeps its steps at fixed
// places of the context, so that neither batch, threads nor chunks enter a result. A decode's rows are
// the query heads of a KV head; a prefill's, these of several tokens.
#pragma once

#include "policy.hpp"

namespace kvist {
namespace {

// What a step leaves behind for each of its rows.
template <typename Word>
struct Step {
    float* scores;         // [rows][width]
    Word* weights;         // [rows][width]
    float* factors;        // [rows], by which earlier sums shrink
    std::int64_t width;    // slots of a step
    const char** key;      // [tiles]
    const char** value;    // [tiles]
    const char** key_next; // [tiles], what is fetched meanwhile
    const char** value_next;
    char* room;            // copies of tiles
};

template <class P>
static std::int64_t step_bytes(const Geometry& g, std::int64_t rows, std::int64_t tiles) {
    const std::int64_t width = tiles * kTileSlots;
    return rows * width * (4 + (std::int64_t)sizeof(typename P::Word)) + whole(rows, kLanes) * 4 +
           2 * tiles * P::tile_bytes(g.key_pad, g.value_pad) + whole(4 * tiles * (std::int64_t)sizeof(char*), 64);
}

template <class P>
static Step<typename P::Word> lay_out(const Geometry& g, std::int64_t rows, std::int64_t tiles, char* scratch) {
    Step<typename P::Word> step;
    step.width = tiles * kTileSlots;
    const auto take = [&scratch](std::int64_t bytes) {
        char* const taken = scratch;
        scratch += bytes;
        return taken;
    };
    step.scores = reinterpret_cast<float*>(take(rows * step.width * 4));
    step.weights = reinterpret_cast<typename P::Word*>(
        take(rows * step.width * (std::int64_t)sizeof(typename P::Word)));
    step.factors = reinterpret_cast<float*>(take(whole(rows, kLanes) * 4));
    step.room = take(2 * tiles * P::tile_bytes(g.key_pad, g.value_pad));
    step.key = reinterpret_cast<const char**>(scratch);
    step.value = step.key + tiles;
    step.key_next = step.value + tiles;
    step.value_next = step.key_next + tiles;
    return step;
}

// ---- R rows at a time

// Of T tiles, side by side.
template <class P, int R, int T, bool Ahead>
KVIST_INLINE void score_tiles(const Geometry& g, const typename P::Word* query, std::int64_t first,
                              const Step<typename P::Word>& step, float* scores) {
    Floats found[R][T] = {};
    P::template score<R, T, Ahead>(query, g.key_pad, step.key + first, P::depth(g), step.key_next + first, found);
    for (int r = 0; r < R; ++r) {
        for (int t = 0; t < T; ++t) store(scores + r * step.width + (first + t) * kTileSlots, found[r][t]);
    }
}

template <class P, int R, bool Ahead>
static void score_rows(const Geometry& g, const typename P::Word* query, std::int64_t tiles,
                       const Step<typename P::Word>& step, float* scores) {
    constexpr int kFit = kMostSums / R, kSide = kFit >= kAbreast ? kAbreast : kFit >= 2 ? 2 : 1;
    std::int64_t t = 0;
    for (; t + kSide <= tiles; t += kSide) score_tiles<P, R, kSide, Ahead>(g, query, t, step, scores);
    if constexpr (kSide > 1) {
        for (; t < tiles; ++t) score_tiles<P, R, 1, Ahead>(g, query, t, step, scores);
    }
}

template <class P, int R, int V, bool Ahead>
KVIST_INLINE void add_columns(const Geometry& g, const typename P::Word* weights, std::int64_t tiles,
                              std::int64_t column, const Step<typename P::Word>& step, const float* factors,
                              float* sum) {
    Floats sums[R][V];
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < V; ++v) {
            sums[r][v] = load<Floats>(sum + r * g.value_pad + column + v * kLanes) * factors[r];
        }
    }
    std::int64_t t = 0;
    for (; t + kAbreast <= tiles; t += kAbreast) {
        P::template add<R, V, kAbreast, Ahead>(weights + t * kTileSlots, step.width, step.value + t, g.value_pad,
                                               column * 4, step.value_next + t, sums);
    }
    for (; t < tiles; ++t) {
        P::template add<R, V, 1, Ahead>(weights + t * kTileSlots, step.width, step.value + t, g.value_pad, column * 4,
                                        step.value_next + t, sums);
    }
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < V; ++v) store(sum + r * g.value_pad + column + v * kLanes, sums[r][v]);
    }
}

template <class P, int R, bool Ahead>
static void add_rows(const Geometry& g, const typename P::Word* weights, std::int64_t tiles,
                     const Step<typename P::Word>& step, const float* factors, float* sum) {
    constexpr int kFit = kMostSums / R, kColumns = kFit >= 4 ? 4 : kFit >= 2 ? 2 : 1;
    std::int64_t column = 0;
    for (; column + kColumns * kLanes <= g.value_pad; column += kColumns * kLanes) {
        add_columns<P, R, kColumns, Ahead>(g, weights, tiles, column, step, factors, sum);
    }
    for (; column < g.value_pad; column += kLanes) {
        add_columns<P, R, 1, Ahead>(g, weights, tiles, column, step, factors, sum);
    }
}

template <class P, bool Ahead, int R = kMostRows>
static void score_some(std::int64_t rows, const Geometry& g, const typename P::Word* query, std::int64_t tiles,
                       const Step<typename P::Word>& step, float* scores) {
    if constexpr (R > 1) {
        if (rows < R) return score_some<P, Ahead, R - 1>(rows, g, query, tiles, step, scores);
    }
    score_rows<P, R, Ahead>(g, query, tiles, step, scores);
}

template <class P, bool Ahead, int R = kMostRows>
static void add_some(std::int64_t rows, const Geometry& g, const typename P::Word* weights, std::int64_t tiles,
                     const Step<typename P::Word>& step, const float* factors, float* sum) {
    if constexpr (R > 1) {
        if (rows < R) return add_some<P, Ahead, R - 1>(rows, g, weights, tiles, step, factors, sum);
    }
    add_rows<P, R, Ahead>(g, weights, tiles, step, factors, sum);
}

// ---- softmax

// Which slots of a tile a query at `position` sees.
KVIST_INLINE std::uint32_t seen(const Tile& tile, std::int64_t position, std::int64_t window) {
    std::uint32_t mask = tile.mask;
    const std::int64_t last = position - tile.position;
    if (last < kTileSlots - 1) mask &= last < 0 ? 0u : (2u << last) - 1u;
    if (window > 0) {
        const std::int64_t first = position - window + 1 - tile.position;
        if (first > 0) mask &= first >= kTileSlots ? 0u : 0xffffu << first;
    }
    return mask;
}

static void cap(const Geometry& g, float* scores, std::int64_t tiles) {
    const float inward = g.scale / g.softcap, outward = g.softcap * kLog2e;
    for (std::int64_t t = 0; t < tiles; ++t) {
        store(scores + t * kTileSlots, tanh_of(load<Floats>(scores + t * kTileSlots) * inward) * outward);
    }
}

// Scores [rows][width] of a step, masked already -> weights; top, weight and factors brought up to
// date. `tiles` is what the weights are made for; behind it they are zero up to a whole pair of tiles.
template <class P>
static void soften(const Geometry& g, std::int64_t rows, std::int64_t tiles, const Step<typename P::Word>& step,
                   float* scores, typename P::Word* weights, float* top, float* weight, float* factors) {
    const float scale = g.softcap > 0.0f ? 1.0f : g.scale * kLog2e;
    for (std::int64_t begin = 0; begin < rows; begin += kLanes) {
        const std::int64_t some = least(kLanes, rows - begin);
        alignas(64) float before[kLanes] = {}, after[kLanes] = {};
        for (std::int64_t r = 0; r < some; ++r) {
            const float* const row = scores + (begin + r) * step.width;
            Floats highest = load<Floats>(row);
            for (std::int64_t t = 1; t < tiles; ++t) highest = larger(highest, load<Floats>(row + t * kTileSlots));
            const float found = largest_across(highest) * scale;
            before[r] = top[begin + r];
            after[r] = found > before[r] ? found : before[r];
        }
        store(factors + begin, exp2_of(load<Floats>(before) - load<Floats>(after)));
        for (std::int64_t r = 0; r < some; ++r) {
            const float* const row = scores + (begin + r) * step.width;
            typename P::Word* const out = weights + (begin + r) * step.width;
            const Floats negative = splat(-after[r]);
            Floats total = {};
            std::int64_t t = 0;
            for (; t + 2 <= tiles; t += 2) {
                const Floats first = exp2_of(load<Floats>(row + t * kTileSlots) * scale + negative);
                const Floats second = exp2_of(load<Floats>(row + (t + 1) * kTileSlots) * scale + negative);
                total += first + second;
                P::weights(out + t * kTileSlots, first, second);
            }
            if (t < tiles) {
                const Floats last = exp2_of(load<Floats>(row + t * kTileSlots) * scale + negative);
                total += last;
                P::weights(out + t * kTileSlots, last, Floats{});
            }
            top[begin + r] = after[r];
            weight[begin + r] = weight[begin + r] * factors[begin + r] + sum_across(total);
        }
    }
}

// ---- one token against a split of its context

template <class P>
static void decode_step(const Geometry& g, std::int64_t rows, const typename P::Word* query, const Tile* tile,
                        std::int64_t tiles, const Step<typename P::Word>& step, bool ahead, float* sum, float* top,
                        float* weight) {
    if (P::kFetches && ahead) {
        score_some<P, true>(rows, g, query, tiles, step, step.scores);
    } else {
        score_some<P, false>(rows, g, query, tiles, step, step.scores);
    }
    for (std::int64_t r = 0; r < rows; ++r) {
        float* const row = step.scores + r * step.width;
        if (g.softcap > 0.0f) cap(g, row, tiles);
        for (std::int64_t t = 0; t < tiles; ++t) {
            if (tile[t].mask == 0xffff) continue;
            store(row + t * kTileSlots, masked(load<Floats>(row + t * kTileSlots), tile[t].mask));
        }
    }
    soften<P>(g, rows, tiles, step, step.scores, step.weights, top, weight, step.factors);
    if (P::kFetches && ahead) {
        add_some<P, true>(rows, g, step.weights, tiles, step, step.factors, sum);
    } else {
        add_some<P, false>(rows, g, step.weights, tiles, step, step.factors, sum);
    }
}

constexpr std::int64_t kDecodeTiles = kAbreast;

template <class P>
static std::int64_t decode_scratch(const Geometry& g) {
    const std::int64_t queries = whole(g.heads * g.group * g.key_pad * (std::int64_t)sizeof(typename P::Word), 64);
    return queries + step_bytes<P>(g, kMostRows, kDecodeTiles);
}

template <class P>
static void decode(const Geometry& g, const DecodeJob& job, char* scratch) {
    using Word = typename P::Word;
    auto* const queries = reinterpret_cast<Word*>(scratch);
    const std::int64_t first = job.head * g.group, last = job.head_end * g.group;
    for (std::int64_t q = first; q < last; ++q) {
        P::query(job.query.data + q * job.query.head_bytes, job.query.element, g.key_dim, queries + q * g.key_pad,
                 g.key_pad);
        job.top[q] = kNothing;
        job.weight[q] = 0.0f;
    }
    std::memset(job.sum + first * g.value_pad, 0, (std::size_t)((last - first) * g.value_pad * 4));
    const Step<Word> step =
        lay_out<P>(g, kMostRows, kDecodeTiles, scratch + whole(g.heads * g.group * g.key_pad * (std::int64_t)sizeof(Word), 64));
    const std::int64_t room = P::tile_bytes(g.key_pad, g.value_pad);
    // All heads of a step before the next step: the heads of a block lie side by side.
    for (const Tile* tile = job.tiles; tile < job.end; tile += kDecodeTiles) {
        const std::int64_t tiles = least(kDecodeTiles, job.end - tile);
        for (std::int64_t head = job.head; head < job.head_end; ++head) {
            // Meanwhile the same tiles of the next head are fetched, or the next tiles of the first: line by
            // line, each beside one that is used. A burst of fetches a block, and more than so far ahead, was slower.
            const bool last_head = head + 1 == job.head_end;
            const std::int64_t next_head = last_head ? job.head : head + 1;
            for (std::int64_t t = 0; t < tiles; ++t) {
                step.key[t] = P::key(g, tile[t], head, step.room + t * room);
                step.value[t] = P::value(g, tile[t], head, step.room + (kDecodeTiles + t) * room);
                const Tile& next = tile[last_head ? least(kDecodeTiles + t, job.known - tile - 1) : t];
                step.key_next[t] = key_of(g, next, next_head);
                step.value_next[t] = value_of(g, next, next_head);
            }
            for (std::int64_t begin = 0; begin < g.group; begin += kMostRows) {
                const std::int64_t q = head * g.group + begin;
                decode_step<P>(g, least(kMostRows, g.group - begin), queries + q * g.key_pad, tile, tiles, step,
                               begin == 0, job.sum + q * g.value_pad, job.top + q, job.weight + q);
            }
        }
    }
}

// ---- splits into one

// With a weight of zero there was nothing to attend to: zeros, and a log-sum-exp of minus infinity.
KVIST_INLINE void finish(const float* sum, float top, float weight, const float* sink, std::int64_t value_dim,
                         char* out, Element element, float* lse) {
    if (sink != nullptr) {
        const float logit = *sink * kLog2e, higher = logit > top ? logit : top;
        const float shrink = exp2_of(top - higher);
        weight = weight * shrink + exp2_of(logit - higher);
        narrow(sum, weight == 0.0f ? 0.0f : shrink / weight, value_dim, out, element);
        top = higher;
    } else {
        narrow(sum, weight == 0.0f ? 0.0f : 1.0f / weight, value_dim, out, element);
    }
    if (lse != nullptr) {
        *lse = weight == 0.0f ? -__builtin_inff() : top * kLn2 + __builtin_logf(weight);
    }
}

static void merge(const MergeJob& job) {
    if (job.splits == 1) {
        return finish(job.sum, *job.top, *job.weight, job.sink, job.value_dim, job.out, job.element, job.lse);
    }
    float highest = job.top[0];
    for (std::int64_t s = 1; s < job.splits; ++s) {
        if (job.top[s * job.stride] > highest) highest = job.top[s * job.stride];
    }
    constexpr std::int64_t kColumns = 64;
    alignas(64) float sums[kColumns], factors[kLanes] = {};
    float total = 0.0f;
    for (std::int64_t column = 0; column < job.value_dim; column += kColumns) {
        Floats some[kColumns / kLanes] = {};
        const std::int64_t wide = least(kColumns, job.value_pad - column) / kLanes;
        for (std::int64_t first = 0; first < job.splits; first += kLanes) {
            const std::int64_t splits = least(kLanes, job.splits - first);
            for (std::int64_t s = 0; s < splits; ++s) factors[s] = job.top[(first + s) * job.stride] - highest;
            store(factors, exp2_of(load<Floats>(factors)));
            for (std::int64_t s = 0; s < splits; ++s) {
                const std::int64_t at = (first + s) * job.stride;
                const float* const part = job.sum + at * job.value_pad + column;
                for (std::int64_t v = 0; v < wide; ++v) some[v] += load<Floats>(part + v * kLanes) * factors[s];
                if (column == 0) total += factors[s] * job.weight[at];
            }
        }
        for (std::int64_t v = 0; v < wide; ++v) store(sums + v * kLanes, some[v]);
        finish(sums, highest, total, job.sink, least(kColumns, job.value_dim - column),
               job.out + column * element_bytes(job.element), job.element, column == 0 ? job.lse : nullptr);
    }
}

}  // namespace
}  // namespace kvist
