// What products by AMX tiles have in common: five tiles and their shapes.
//
//     left            right             sums
//     [ 2 ]     x   [ 3 | 4 ]   ->    [ 0 | 1 ]
//
// Left: sixteen rows of 64 bytes of inputs. Right: sixteen rows of 64 bytes, each the weights of sixteen
// outputs for as many inputs as four bytes hold. A panel has both halves of a right row side by side.
//
// Five tiles, not all eight: beside a hyperthread that multiplies too a core has few registers to rename
// tiles with, and two by two sums in eight tiles took 1.4 times as long there (as long where the core is
// free).
#pragma once

#include "matrix.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
#define KVIST_HAS_TILES
// gcc 12 calls the undefined operands of its own intrinsics uninitialized.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#define KVIST_TILES                                                                                             \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,amx-tile,amx-bf16,amx-int8")))

namespace kvist {

struct alignas(64) TileShapes {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    std::uint8_t rows[16] = {};
};

// gcc does not know how much memory tile instructions read.
static inline void memory_is_used(const void* address) { __asm__ volatile("" : : "r"(address) : "memory"); }

// For so many rows on the left.
KVIST_TILES static inline void shape_tiles(std::int64_t rows) {
    TileShapes shapes;
    for (int tile = 0; tile < 5; ++tile) {
        shapes.row_bytes[tile] = 64;
        shapes.rows[tile] = static_cast<std::uint8_t>(tile < 3 ? rows : kTile);
    }
    memory_is_used(&shapes);
    _tile_loadconfig(&shapes);
}

KVIST_TILES static inline void release_tiles() { _tile_release(); }

// A panel times a tile's rows, whose steps lie `stride` bytes apart; the sums stay in the registers. `ahead` is
// fetched meanwhile, `lines` a step. Each tile is loaded again as soon as it was used, for the step to come.
// `Bytes`: whole numbers, 64 inputs a step; else bf16, 32.
template <bool Bytes>
KVIST_TILES inline void sum_tile(const char* panel, const void* rows, std::int64_t stride, std::int64_t steps,
                                 const char* ahead, std::int64_t lines) {
    const char* x = static_cast<const char*>(rows);
    memory_is_used(x);
    _tile_zero(0);
    _tile_zero(1);
    _tile_loadd(2, x, 64);
    _tile_loadd(3, panel, 128);
    _tile_loadd(4, panel + 64, 128);
    for (std::int64_t step = 1; step < steps; ++step) {
        panel += 2048, x += stride;
        for (std::int64_t line = 0; line < lines; ++line, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
        if (Bytes) {
            _tile_dpbusd(0, 2, 3);
        } else {
            _tile_dpbf16ps(0, 2, 3);
        }
        _tile_loadd(3, panel, 128);
        if (Bytes) {
            _tile_dpbusd(1, 2, 4);
        } else {
            _tile_dpbf16ps(1, 2, 4);
        }
        _tile_loadd(2, x, 64);
        _tile_loadd(4, panel + 64, 128);
    }
    if (Bytes) {
        _tile_dpbusd(0, 2, 3);
        _tile_dpbusd(1, 2, 4);
    } else {
        _tile_dpbf16ps(0, 2, 3);
        _tile_dpbf16ps(1, 2, 4);
    }
}

// Both sums of a tile's rows, [16][32].
KVIST_TILES static inline void take_sums(void* sums) {
    _tile_stored(0, sums, 128);
    _tile_stored(1, static_cast<char*>(sums) + 64, 128);
    memory_is_used(sums);
}

}  // namespace kvist
#endif
