// Products of query rows with K and of weights with V, over tiles of sixteen slots, for each packing.
//
// A policy says what a query and a weight are kept as (`Word`), how a tile is made ready and how
// many rows share one pass over it:
//
//     packing "lhkv-2"   K  [Dk/2][16][2]   one vector: sixteen slots' dims 2i and 2i + 1
//                        V  [8][Dv][2]      one vector: sixteen dims of slots 2i and 2i + 1
//     packing "lhkv-1"   K  [16][Dk], V [16][Dv], widened to fp32 rows first
//
// See lanes.hpp for why nothing here has external linkage.
#pragma once

#include "isa.hpp"
#include "lanes.hpp"

namespace kvist {
namespace {

// How many rows, and sums of sixteen lanes, fit the registers: sixteen of a 256-bit processor hold less.
constexpr int kMostRows = kRegisterBytes == 64 ? 8 : 4, kMostSums = kRegisterBytes == 64 ? 16 : 4;

// Tiles walked side by side. Each lies on a page of its own, and the processor reads ahead within pages: a
// loop that only reads gets 0.7-0.8 of the memory's speed page after page, all of it with four to eight at once.
constexpr int kAbreast = 4;

KVIST_INLINE const char* key_of(const Geometry& g, const Tile& tile, std::int64_t head) {
    const std::int64_t part = tile.part * kTileSlots * g.key_dim * element_bytes(g.element);
    return g.pool + tile.block * g.block_bytes + head * g.head_bytes + part;
}

KVIST_INLINE const char* value_of(const Geometry& g, const Tile& tile, std::int64_t head) {
    const std::int64_t part = tile.part * kTileSlots * g.value_dim * element_bytes(g.element);
    return g.pool + tile.block * g.block_bytes + head * g.head_bytes + g.value_bytes + part;
}

KVIST_INLINE void fetch(const char* line) { __builtin_prefetch(line, 0, 2); }

// What both policies of packing "lhkv-2" share: tiles are read where they lie.
struct Paired {
    static constexpr bool kFetches = true;

    // Steps in which a query row is gone through.
    static std::int64_t depth(const Geometry& g) { return g.key_dim / 2; }

    static std::int64_t tile_bytes(std::int64_t, std::int64_t value_pad) { return value_pad * kTileSlots * 2; }

    static const char* key(const Geometry& g, const Tile& tile, std::int64_t head, char*) {
        return key_of(g, tile, head);
    }

    // A copy where a slot is masked, whose weight of zero would not silence a NaN, or where a row does
    // not fill its vectors.
    static const char* value(const Geometry& g, const Tile& tile, std::int64_t head, char* room) {
        const char* const stored = value_of(g, tile, head);
        if (tile.mask == 0xffff && g.value_pad == g.value_dim) return stored;
        copy_value(g, tile, stored, room);
        return room;
    }

    static void copy_value(const Geometry& g, const Tile& tile, const char* stored, char* room) {
        const auto row = (std::size_t)(g.value_dim * 4), pad = (std::size_t)(g.value_pad * 4);
        for (int pair = 0; pair < kTileSlots / 2; ++pair, stored += row, room += pad) {
            const std::uint32_t kept = (tile.mask >> 2 * pair & 1 ? 0xffffu : 0u) |
                                       (tile.mask >> (2 * pair + 1) & 1 ? 0xffff0000u : 0u);
            std::memset(room + row, 0, pad - row);
            for (std::int64_t d = 0; d < g.value_dim; ++d) {
                std::uint32_t both;
                std::memcpy(&both, stored + d * 4, 4);
                both &= kept;
                std::memcpy(room + d * 4, &both, 4);
            }
        }
    }
};

// Both elements of a pair in fp32.
template <Element E>
struct Wide : Paired {
    using Word = float;

    KVIST_INLINE Floats low(const Words& w) { return E == Element::bf16 ? low_bf16(w) : low_fp16(w); }
    KVIST_INLINE Floats high(const Words& w) { return E == Element::bf16 ? high_bf16(w) : high_fp16(w); }

    static void query(const char* from, Element element, std::int64_t dim, Word* to, std::int64_t pad) {
        widen(from, element, dim, to, pad);
    }

    KVIST_INLINE void weights(Word* to, const Floats& first, const Floats& second) {
        store(to, first);
        store(to + kLanes, second);
    }

    // scores[r][t] = query r . each of the sixteen keys of tile t
    template <int R, int T, bool Ahead>
    KVIST_INLINE void score(const Word* query, std::int64_t row, const char* const* key, std::int64_t pairs,
                            const char* const* ahead, Floats (&scores)[R][T]) {
        for (std::int64_t i = 0; i < pairs; ++i) {
#pragma GCC unroll 4
            for (int t = 0; t < T; ++t) {
                if (Ahead) fetch(ahead[t] + i * 64);
                const Words both = load<Words>(key[t] + i * 64);
                const Floats first = low(both), second = high(both);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    scores[r][t] += query[r * row + 2 * i] * first;
                    scores[r][t] += query[r * row + 2 * i + 1] * second;
                }
            }
        }
    }

    // sums[r][v] += over the slots of T tiles: weight r * vector v from `column` bytes on of each slot's value
    template <int R, int V, int T, bool Ahead>
    KVIST_INLINE void add(const Word* weight, std::int64_t row, const char* const* value, std::int64_t value_row,
                          std::int64_t column, const char* const* ahead, Floats (&sums)[R][V]) {
        for (int i = 0; i < kTileSlots / 2; ++i) {
            const std::int64_t line = i * value_row * 4 + column;
#pragma GCC unroll 4
            for (int t = 0; t < T; ++t) {
                const Word* const pair = weight + t * kTileSlots + 2 * i;
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) {
                    if (Ahead) fetch(ahead[t] + line + v * 64);
                    const Words both = load<Words>(value[t] + line + v * 64);
                    const Floats first = low(both), second = high(both);
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) {
                        sums[r][v] += pair[r * row] * first;
                        sums[r][v] += pair[r * row + 1] * second;
                    }
                }
            }
        }
    }
};

// Packing "lhkv-1": a tile becomes fp32 rows, zeros where a slot is masked or a row ends.
struct Widened {
    using Word = float;
    static constexpr bool kFetches = false;

    static std::int64_t depth(const Geometry& g) { return g.key_pad; }

    static std::int64_t tile_bytes(std::int64_t key_pad, std::int64_t value_pad) {
        return most(key_pad, value_pad) * kTileSlots * 4;
    }

    static void query(const char* from, Element element, std::int64_t dim, Word* to, std::int64_t pad) {
        widen(from, element, dim, to, pad);
    }

    KVIST_INLINE void weights(Word* to, const Floats& first, const Floats& second) {
        store(to, first);
        store(to + kLanes, second);
    }

    static const char* rows(const Geometry& g, const Tile& tile, const char* stored, std::int64_t dim,
                            std::int64_t pad, char* room) {
        if (tile.mask == 0xffff && g.element == Element::f32 && pad == dim) return stored;
        auto* const out = reinterpret_cast<float*>(room);
        for (int slot = 0; slot < kTileSlots; ++slot) {
            if (tile.mask >> slot & 1) {
                widen(stored + slot * dim * element_bytes(g.element), g.element, dim, out + slot * pad, pad);
            } else {
                std::memset(out + slot * pad, 0, (std::size_t)(pad * 4));
            }
        }
        return room;
    }

    static const char* key(const Geometry& g, const Tile& tile, std::int64_t head, char* room) {
        return rows(g, tile, key_of(g, tile, head), g.key_dim, g.key_pad, room);
    }

    static const char* value(const Geometry& g, const Tile& tile, std::int64_t head, char* room) {
        return rows(g, tile, value_of(g, tile, head), g.value_dim, g.value_pad, room);
    }

    template <int R, int T, bool Ahead>
    KVIST_INLINE void score(const Word* query, std::int64_t row, const char* const* key, std::int64_t depth,
                            const char* const*, Floats (&scores)[R][T]) {
        for (int t = 0; t < T; ++t) {
            const auto* const rows = reinterpret_cast<const float*>(key[t]);
            for (int r = 0; r < R; ++r) {
                Floats products[kLanes] = {};
                for (int first = 0; first < kLanes; first += kMostSums) {
                    for (std::int64_t d = 0; d < depth; d += kLanes) {
                        const Floats asked = load<Floats>(query + r * row + d);
#pragma GCC unroll 16
                        for (int i = first; i < first + kMostSums; ++i) {
                            products[i] += asked * load<Floats>(rows + i * row + d);
                        }
                    }
                }
                scores[r][t] = sums_of(products);
            }
        }
    }

    template <int R, int V, int T, bool Ahead>
    KVIST_INLINE void add(const Word* weight, std::int64_t row, const char* const* value, std::int64_t value_row,
                          std::int64_t column, const char* const*, Floats (&sums)[R][V]) {
        for (int t = 0; t < T; ++t) {
            const auto* const rows = reinterpret_cast<const float*>(value[t] + column);
            for (int slot = 0; slot < kTileSlots; ++slot) {
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) {
                    const Floats line = load<Floats>(rows + slot * value_row + v * kLanes);
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) sums[r][v] += weight[r * row + t * kTileSlots + slot] * line;
                }
            }
        }
    }
};

#ifdef __AVX512BF16__
// Packing "lhkv-2" of bf16 and bf16 queries: one instruction multiplies both of sixteen pairs, without
// rounding, and adds them up in fp32. Weights are rounded to bf16.
struct Dot : Paired {
    using Word = std::uint16_t;

    static void query(const char* from, Element, std::int64_t dim, Word* to, std::int64_t pad) {
        std::memcpy(to, from, (std::size_t)(dim * 2));
        std::memset(to + dim, 0, (std::size_t)((pad - dim) * 2));
    }

    KVIST_INLINE void weights(Word* to, const Floats& first, const Floats& second) {
        store(to, (Words)(__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
    }

    KVIST_INLINE __m512bh both(const Word* pair) {
        std::int32_t bits;
        std::memcpy(&bits, pair, 4);
        return (__m512bh)_mm512_set1_epi32(bits);
    }

    template <int R, int T, bool Ahead>
    KVIST_INLINE void score(const Word* query, std::int64_t row, const char* const* key, std::int64_t pairs,
                            const char* const* ahead, Floats (&scores)[R][T]) {
        for (std::int64_t i = 0; i < pairs; ++i) {
            __m512bh asked[R];
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) asked[r] = both(query + r * row + 2 * i);
#pragma GCC unroll 4
            for (int t = 0; t < T; ++t) {
                if (Ahead) fetch(ahead[t] + i * 64);
                const auto keys = (__m512bh)_mm512_loadu_si512(key[t] + i * 64);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    scores[r][t] = (Floats)_mm512_dpbf16_ps((__m512)scores[r][t], keys, asked[r]);
                }
            }
        }
    }

    template <int R, int V, int T, bool Ahead>
    KVIST_INLINE void add(const Word* weight, std::int64_t row, const char* const* value, std::int64_t value_row,
                          std::int64_t column, const char* const* ahead, Floats (&sums)[R][V]) {
        for (int i = 0; i < kTileSlots / 2; ++i) {
            const std::int64_t line = i * value_row * 4 + column;
#pragma GCC unroll 4
            for (int t = 0; t < T; ++t) {
                __m512bh pair[R];
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) pair[r] = both(weight + r * row + t * kTileSlots + 2 * i);
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) {
                    if (Ahead) fetch(ahead[t] + line + v * 64);
                    const auto values = (__m512bh)_mm512_loadu_si512(value[t] + line + v * 64);
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) {
                        sums[r][v] = (Floats)_mm512_dpbf16_ps((__m512)sums[r][v], values, pair[r]);
                    }
                }
            }
        }
    }
};
#endif

}  // namespace
}  // namespace kvist
