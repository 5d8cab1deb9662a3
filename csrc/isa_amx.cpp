// The kernels for processors with matrix tiles (AMX_BF16): prefill in bf16; see CMakeLists.txt.
//
// A tile is sixteen rows of 64 bytes. Queries and weights lie as the instruction wants its left side,
// K and V of the packing "lhkv-2" as it wants its right side, so nothing is turned:
//
//     scores [32 rows][32 slots] += query [32][32 dims]    x  K [16 pairs of dims][16 slots][2], twice
//     sums   [32 rows][32 dims]  += weights [32][32 slots] x  V [16 pairs of slots][16 dims][2], twice
#include "prefill.hpp"

namespace kvist {
namespace {

constexpr std::int64_t kRowBytes = 64;

// Numbers of tile registers; macros, for the intrinsics paste them into names.
#define KVIST_SUMS00 0
#define KVIST_SUMS01 1
#define KVIST_SUMS10 2
#define KVIST_SUMS11 3
#define KVIST_LEFT0 4
#define KVIST_LEFT1 5
#define KVIST_RIGHT0 6
#define KVIST_RIGHT1 7

// The intrinsics do not tell the compiler which memory they touch.
KVIST_INLINE void settle() { __asm__ volatile("" : : : "memory"); }

struct InTiles : Dot {
    static constexpr std::int64_t kChunk = 32;

    // K where it lies, unless its dims do not fill tiles: then padded with zeros.
    static const char* key(const Geometry& g, const Tile& tile, std::int64_t head, char* room) {
        const char* const stored = key_of(g, tile, head);
        if (g.key_pad == g.key_dim) return stored;
        std::memcpy(room, stored, (std::size_t)(g.key_dim * kTileSlots * 2));
        std::memset(room + g.key_dim * kTileSlots * 2, 0, (std::size_t)((g.key_pad - g.key_dim) * kTileSlots * 2));
        return room;
    }

    // V of a step side by side, for a tile takes the slots of two; zeros behind the last.
    static void values(const Geometry& g, const Tile* tile, std::int64_t tiles, std::int64_t head,
                       const Step<Word>& step) {
        const std::int64_t bytes = g.value_pad * kTileSlots * 2;
        char* const room = step.room + kPrefillTiles * tile_bytes(g.key_pad, g.value_pad);
        for (std::int64_t t = 0; t < tiles; ++t) {
            const char* const stored = value_of(g, tile[t], head);
            if (tile[t].mask == 0xffff && g.value_pad == g.value_dim) {
                std::memcpy(room + t * bytes, stored, (std::size_t)bytes);
            } else {
                copy_value(g, tile[t], stored, room + t * bytes);
            }
        }
        if (tiles % 2 != 0) std::memset(room + tiles * bytes, 0, (std::size_t)bytes);
        step.value[0] = room;
    }

    static std::int64_t tile_bytes(std::int64_t key_pad, std::int64_t value_pad) {
        return most(key_pad, value_pad) * kTileSlots * 2;
    }

    static void score_chunk(std::int64_t rows, const Geometry& g, const Word* query, std::int64_t tiles,
                            const Step<Word>& step, float* scores) {
        settle();
        const bool both = rows > kTileSlots;
        const std::int64_t query_bytes = g.key_pad * 2, row = step.width * 4;
        const char* const upper = reinterpret_cast<const char*>(query);
        const char* const lower = upper + kTileSlots * query_bytes;
        for (std::int64_t t = 0; t < tiles; t += 2) {
            const bool pair = t + 1 < tiles;
            _tile_zero(KVIST_SUMS00);
            _tile_zero(KVIST_SUMS01);
            _tile_zero(KVIST_SUMS10);
            _tile_zero(KVIST_SUMS11);
            for (std::int64_t d = 0; d < query_bytes; d += kRowBytes) {
                _tile_loadd(KVIST_LEFT0, upper + d, query_bytes);
                _tile_loadd(KVIST_RIGHT0, step.key[t] + d * kTileSlots, kRowBytes);
                _tile_dpbf16ps(KVIST_SUMS00, KVIST_LEFT0, KVIST_RIGHT0);
                if (pair) {
                    _tile_loadd(KVIST_RIGHT1, step.key[t + 1] + d * kTileSlots, kRowBytes);
                    _tile_dpbf16ps(KVIST_SUMS01, KVIST_LEFT0, KVIST_RIGHT1);
                }
                if (both) {
                    _tile_loadd(KVIST_LEFT1, lower + d, query_bytes);
                    _tile_dpbf16ps(KVIST_SUMS10, KVIST_LEFT1, KVIST_RIGHT0);
                    if (pair) _tile_dpbf16ps(KVIST_SUMS11, KVIST_LEFT1, KVIST_RIGHT1);
                }
            }
            float* const out = scores + t * kTileSlots;
            _tile_stored(KVIST_SUMS00, out, row);
            if (pair) _tile_stored(KVIST_SUMS01, out + kTileSlots, row);
            if (both) {
                _tile_stored(KVIST_SUMS10, out + kTileSlots * step.width, row);
                if (pair) _tile_stored(KVIST_SUMS11, out + kTileSlots * step.width + kTileSlots, row);
            }
        }
        settle();
    }

    static void add_chunk(std::int64_t rows, const Geometry& g, const Word* weights, std::int64_t tiles,
                          const Step<Word>& step, const float* factors, float* sum) {
        for (std::int64_t r = 0; r < rows; ++r) {
            if (factors[r] == 1.0f) continue;
            for (std::int64_t d = 0; d < g.value_pad; d += kLanes) {
                float* const at = sum + r * g.value_pad + d;
                store(at, load<Floats>(at) * factors[r]);
            }
        }
        settle();
        const bool both = rows > kTileSlots;
        const std::int64_t weight_bytes = step.width * 2, sum_bytes = g.value_pad * 4;
        const char* const upper = reinterpret_cast<const char*>(weights);
        const char* const lower = upper + kTileSlots * weight_bytes;
        for (std::int64_t d = 0; d < g.value_pad; d += 2 * kLanes) {
            const bool pair = d + kLanes < g.value_pad;
            float* const out = sum + d;
            float* const out_lower = out + kTileSlots * g.value_pad;
            _tile_loadd(KVIST_SUMS00, out, sum_bytes);
            if (pair) _tile_loadd(KVIST_SUMS01, out + kLanes, sum_bytes);
            if (both) _tile_loadd(KVIST_SUMS10, out_lower, sum_bytes);
            if (both && pair) _tile_loadd(KVIST_SUMS11, out_lower + kLanes, sum_bytes);
            for (std::int64_t t = 0; t < tiles; t += 2) {
                // A row of V is a pair of slots: 4 bytes a dim.
                const char* const value = step.value[0] + t * g.value_pad * kTileSlots * 2 + d * 4;
                _tile_loadd(KVIST_LEFT0, upper + t * kTileSlots * 2, weight_bytes);
                _tile_loadd(KVIST_RIGHT0, value, sum_bytes);
                _tile_dpbf16ps(KVIST_SUMS00, KVIST_LEFT0, KVIST_RIGHT0);
                if (pair) {
                    _tile_loadd(KVIST_RIGHT1, value + kRowBytes, sum_bytes);
                    _tile_dpbf16ps(KVIST_SUMS01, KVIST_LEFT0, KVIST_RIGHT1);
                }
                if (both) {
                    _tile_loadd(KVIST_LEFT1, lower + t * kTileSlots * 2, weight_bytes);
                    _tile_dpbf16ps(KVIST_SUMS10, KVIST_LEFT1, KVIST_RIGHT0);
                    if (pair) _tile_dpbf16ps(KVIST_SUMS11, KVIST_LEFT1, KVIST_RIGHT1);
                }
            }
            _tile_stored(KVIST_SUMS00, out, sum_bytes);
            if (pair) _tile_stored(KVIST_SUMS01, out + kLanes, sum_bytes);
            if (both) _tile_stored(KVIST_SUMS10, out_lower, sum_bytes);
            if (both && pair) _tile_stored(KVIST_SUMS11, out_lower + kLanes, sum_bytes);
        }
        settle();
    }

    // The softmax of many rows over many slots: `soften` beside the matrix unit's pace. Sixteen rows'
    // maxima and totals are found by one tree each, and 2^t only as near as bf16 weights can tell.
    static void soften_chunk(std::int64_t rows, const Geometry& g, std::int64_t tiles, const Step<Word>& step,
                             float* top, float* weight) {
        const float scale = g.softcap > 0.0f ? 1.0f : g.scale * kLog2e;
        for (std::int64_t begin = 0; begin < rows; begin += kLanes) {
            const float* const scores = step.scores + begin * step.width;
            Word* const weights = step.weights + begin * step.width;
            Floats found[kLanes];
            for (std::int64_t r = 0; r < kLanes; ++r) found[r] = highest(scores + r * step.width, tiles);
            const Floats before = load<Floats>(top + begin);
            const Floats after = larger(largest_of(found) * scale, before);
            const Floats factors = exp2_of(before - after);
            store(top + begin, after);
            store(step.factors + begin, factors);
            alignas(64) float negative[kLanes];
            store(negative, -after);
            for (std::int64_t r = 0; r < kLanes; ++r) {
                found[r] = weigh(scores + r * step.width, tiles, scale, negative[r], weights + r * step.width);
            }
            store(weight + begin, load<Floats>(weight + begin) * factors + sums_of(found));
        }
    }

    KVIST_INLINE Floats highest(const float* row, std::int64_t tiles) {
        Floats even = load<Floats>(row), odd = even;
        std::int64_t t = 1;
        for (; t + 2 <= tiles; t += 2) {
            even = larger(even, load<Floats>(row + t * kTileSlots));
            odd = larger(odd, load<Floats>(row + (t + 1) * kTileSlots));
        }
        if (t < tiles) even = larger(even, load<Floats>(row + t * kTileSlots));
        return larger(even, odd);
    }

    // Scores of a row -> its weights; gives their sum, lane by lane.
    KVIST_INLINE Floats weigh(const float* row, std::int64_t tiles, float scale, float negative, Word* out) {
        Floats even = {}, odd = {};
        std::int64_t t = 0;
        for (; t + 2 <= tiles; t += 2) {
            const Floats first = near_exp2(load<Floats>(row + t * kTileSlots) * scale + negative);
            const Floats second = near_exp2(load<Floats>(row + (t + 1) * kTileSlots) * scale + negative);
            even += first;
            odd += second;
            Dot::weights(out + t * kTileSlots, first, second);
        }
        if (t < tiles) {
            const Floats last = near_exp2(load<Floats>(row + t * kTileSlots) * scale + negative);
            even += last;
            Dot::weights(out + t * kTileSlots, last, Floats{});
        }
        return even + odd;
    }

    // 2^t for t <= 0 to four parts in a million: rounding to bf16 hides a thousand times that.
    KVIST_INLINE Floats near_exp2(const Floats& t) {
        const Floats f = (Floats)_mm512_reduce_ps((__m512)t, 1);
        Floats p = f * 0.0135341622f + 0.0520114824f;
        p = p * f + 0.24144274f;
        p = p * f + 0.693003833f;
        p = p * f + 1.00000262f;
        return (Floats)_mm512_scalef_ps((__m512)p, (__m512)t);
    }

    // Eight tiles of full size. The registers are given back at the end: while they hold something,
    // every switch of threads saves eight kilobytes.
    static void begin() {
        struct alignas(64) {
            std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
            std::uint16_t row_bytes[16] = {};
            std::uint8_t rows[16] = {};
        } config;
        for (int i = 0; i < 8; ++i) {
            config.row_bytes[i] = kRowBytes;
            config.rows[i] = kTileSlots;
        }
        settle();
        _tile_loadconfig(&config);
    }

    static void end() { _tile_release(); }
};

}  // namespace

const Kernels* amx_kernels(Arithmetic arithmetic) {
    static constexpr Kernels kTable{decode_scratch<Dot>, prefill_scratch<InTiles>,
                                    decode<Dot>,         prefill<InTiles>,
                                    merge,               rotate,
                                    widen_whole,         read,
                                    InTiles::begin,      InTiles::end};
    return arithmetic == Arithmetic::dot ? &kTable : nullptr;
}

}  // namespace kvist
