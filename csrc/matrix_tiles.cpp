// Products by AMX tiles: 16 rows x 32 inputs times 32 inputs x 16 outputs an instruction.
//
//     rows  32 inputs        panel            sums
//     [ a0 ]          x  [ b0 | b1 ]   ->  [ c00 | c01 ]      16 rows each
//     [ a1 ]                               [ c10 | c11 ]
//
// The packing of bf16 weights is that of a tile; others are decoded a panel at a time.
#include <algorithm>
#include <cstring>

#include "chain.hpp"
#include "clones.hpp"
#include "matrix.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
// gcc 12 calls the undefined operands of its own intrinsics uninitialized.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#define KVIST_TILES \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16")))

namespace kvist {
namespace {

constexpr std::int64_t kTile = 16;

struct alignas(64) TileShapes {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    std::uint8_t rows[16] = {};
};

// gcc does not know how much memory tile instructions read.
static inline void memory_is_used(const void* address) { __asm__ volatile("" : : "r"(address) : "memory"); }

// Tiles 0-3 are sums, 4-5 rows, 6-7 weights; `upper` and `lower` rows of the block.
KVIST_TILES void shape_tiles(std::int64_t upper, std::int64_t lower) {
    TileShapes shapes;
    const std::int64_t rows[8] = {upper, upper, lower, lower, upper, lower, kTile, kTile};
    for (int tile = 0; tile < 8; ++tile) {
        shapes.row_bytes[tile] = rows[tile] > 0 ? 64 : 0;
        shapes.rows[tile] = static_cast<std::uint8_t>(rows[tile]);
    }
    memory_is_used(&shapes);
    _tile_loadconfig(&shapes);
}

// `Ahead`: weights come from memory, and only now; what follows them is fetched meanwhile.
constexpr std::int64_t kAhead = 8192;

template <bool Ahead>
KVIST_TILES void sum_two(const char* panel, const char* x, std::int64_t stride_bytes, std::int64_t inputs,
                         float* sums) {
    memory_is_used(x);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (std::int64_t k = 0; k < inputs; k += 32, panel += 2048, x += 64) {
        if (Ahead) {
            for (int line = 0; line < 32; line += 2) _mm_prefetch(panel + kAhead + line * 64, _MM_HINT_T1);
        }
        _tile_loadd(6, panel, 128);
        _tile_loadd(4, x, stride_bytes);
        _tile_dpbf16ps(0, 4, 6);
        if (Ahead) {
            for (int line = 1; line < 32; line += 2) _mm_prefetch(panel + kAhead + line * 64, _MM_HINT_T1);
        }
        _tile_loadd(7, panel + 64, 128);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, x + kTile * stride_bytes, stride_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + 16, 128);
    _tile_stored(2, sums + kTile * kPanel, 128);
    _tile_stored(3, sums + kTile * kPanel + 16, 128);
}

template <bool Ahead>
KVIST_TILES void sum_one(const char* panel, const char* x, std::int64_t stride_bytes, std::int64_t inputs,
                         float* sums) {
    memory_is_used(x);
    _tile_zero(0);
    _tile_zero(1);
    for (std::int64_t k = 0; k < inputs; k += 32, panel += 2048, x += 64) {
        if (Ahead) {
            for (int line = 0; line < 32; ++line) _mm_prefetch(panel + kAhead + line * 64, _MM_HINT_T1);
        }
        _tile_loadd(4, x, stride_bytes);
        _tile_loadd(6, panel, 128);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, panel + 64, 128);
        _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + 16, 128);
}

// The same for rows in tiles; the sums stay in the registers. `next` is fetched meanwhile, `lines` a step.
KVIST_TILES void sum_tiled(const char* panel, const char* x, std::int64_t inputs, const char* next,
                           std::int64_t lines) {
    const char* const lower = x + inputs * 32;
    memory_is_used(x);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (std::int64_t k = 0; k < inputs; k += 32, panel += 2048) {
        for (std::int64_t line = 0; line < lines; ++line, next += 64) _mm_prefetch(next, _MM_HINT_T1);
        // Rows pass by; the panel is what the first cache should keep.
        _tile_loadd(6, panel, 128);
        _tile_stream_loadd(4, x + k * 32, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, panel + 64, 128);
        _tile_dpbf16ps(1, 4, 7);
        _tile_stream_loadd(5, lower + k * 32, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

KVIST_TILES void take_sums(float* sums) {
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + 16, 128);
    _tile_stored(2, sums + kTile * kPanel, 128);
    _tile_stored(3, sums + kTile * kPanel + 16, 128);
    memory_is_used(sums);
}

// int8 levels as bf16, exactly; the scales wait for the sums.
KVIST_TILES void decode_i8(const char* packed, std::int64_t inputs, char* out) {
    for (std::int64_t i = 0; i < inputs; ++i, packed += 32, out += 64) {
        _mm_prefetch(packed + 4096, _MM_HINT_T0);
        const __m128i* const at = reinterpret_cast<const __m128i*>(packed);
        const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at)));
        const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at + 1)));
        _mm512_store_si512(out, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
    }
}

// Levels as weights: level * scale + least, rounded to bf16. Lanes are pairs of inputs of eight outputs.
KVIST_TILES void decode_i4(const char* packed, std::int64_t inputs, char* out) {
    const __m512 levels = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i first = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    for (std::int64_t g = 0; g < inputs / kGroup; ++g, packed += kGroupBytes) {
        for (int line = 0; line < 10; ++line) _mm_prefetch(packed + 4096 + line * 64, _MM_HINT_T0);
        for (int half = 0; half < 2; ++half) {
            const char* const at = packed + 512 + half * 32;
            const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
            const __m512 least = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + 64)));
            const __m512 low_scale = _mm512_permutexvar_ps(first, scale), low_least = _mm512_permutexvar_ps(first, least);
            const __m512 high_scale = _mm512_permutexvar_ps(second, scale);
            const __m512 high_least = _mm512_permutexvar_ps(second, least);
            for (int row = 0; row < 4; ++row) {
                const auto* const words = reinterpret_cast<const __m256i*>(packed + row * 128 + half * 64);
                __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(words));
                __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(words + 1));
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) {
                    // An index takes the four lowest bits of its lane and no others.
                    const __m512 a = _mm512_fmadd_ps(_mm512_permutexvar_ps(low, levels), low_scale, low_least);
                    const __m512 b = _mm512_fmadd_ps(_mm512_permutexvar_ps(high, levels), high_scale, high_least);
                    char* const to = out + (g * 16 + row * 4 + i) * 128 + half * 64;
                    _mm512_store_si512(to, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a)));
                    low = _mm512_srli_epi32(low, 4);
                    high = _mm512_srli_epi32(high, 4);
                }
            }
        }
    }
}

KVIST_TILES void release_tiles() { _tile_release(); }

}  // namespace

void multiply_tiles(const Matrix& matrix, const Input& rows, std::int64_t first, std::int64_t last,
                    const Sink& sink) {
    const std::int64_t stride_bytes = rows.stride * 2, rest = rows.count % kSumRows, whole = rows.count - rest;
    const auto* const x = static_cast<const char*>(rows.data);
    const bool plain = matrix.weights == Weights::bf16;
    const FloatBuffer decoded(plain ? 0 : matrix.inputs * kPanel / 2);
    auto* const scratch = reinterpret_cast<char*>(decoded.data);
    alignas(64) float sums[kSumRows * kPanel];
    std::int64_t shaped = -1;  // for how many rows
    const auto shape_for = [&](std::int64_t count) {
        if (shaped != count) shape_tiles(std::min(count, kTile), std::max<std::int64_t>(count - kTile, 0));
        shaped = count;
    };
    for (std::int64_t panel = first; panel < last; ++panel) {
        const char* weights = matrix.panel(panel);
        if (matrix.weights == Weights::i8) decode_i8(weights, matrix.inputs, scratch);
        if (matrix.weights == Weights::i4) decode_i4(weights, matrix.inputs, scratch);
        if (!plain) weights = scratch;
        for (std::int64_t row = 0; row < rows.count; row += kSumRows) {
            const std::int64_t count = row < whole ? kSumRows : rest;
            shape_for(count);
            const auto sum = plain && row == 0 ? (count > kTile ? sum_two<true> : sum_one<true>)
                                               : (count > kTile ? sum_two<false> : sum_one<false>);
            sum(weights, x + row * stride_bytes, stride_bytes, matrix.inputs, sums);
            finish_sums(matrix, panel, count, sums);
            sink.take(row, count, panel, sums);
        }
    }
    release_tiles();
}

void multiply_tiled(const Matrix& matrix, const Tiled& rows, char* decoded, const Sink& sink) {
    const bool plain = matrix.weights == Weights::bf16;
    const std::int64_t groups = rows.padded() / kSumRows, panels = matrix.panels();
    const std::int64_t lines = plain ? (kSumRows + groups - 1) / groups : 0;
    const std::int64_t share = lines * 64 * (matrix.inputs / 32);
    // While the tiles work on one block of sums, the vectors finish the one before it.
    alignas(64) float sums[2][kSumRows * kPanel];
    std::int64_t waiting = -1, waiting_panel = 0;
    const auto finish = [&](float* block) {
        const std::int64_t count = std::min(kSumRows, rows.count - waiting);
        finish_sums(matrix, waiting_panel, count, block);
        sink.take(waiting, count, waiting_panel, block);
    };
    int turn = 0;
    shape_tiles(kTile, kTile);
    for (std::int64_t panel = 0; panel < panels; ++panel) {
        const char* weights = matrix.panel(panel);
        const char* const next = panel + 1 < panels ? matrix.panel(panel + 1) : matrix.packed;
        if (matrix.weights == Weights::i8) decode_i8(weights, matrix.inputs, decoded);
        if (matrix.weights == Weights::i4) decode_i4(weights, matrix.inputs, decoded);
        if (!plain) weights = decoded;
        for (std::int64_t group = 0; group < groups; ++group) {
            const std::int64_t row = group * kSumRows;
            sum_tiled(weights, rows.data + row * matrix.inputs * 2, matrix.inputs, next + group * share, lines);
            if (waiting >= 0) finish(sums[turn ^ 1]);
            take_sums(sums[turn]);
            waiting = row, waiting_panel = panel, turn ^= 1;
        }
    }
    finish(sums[turn ^ 1]);
    release_tiles();
}

}  // namespace kvist

#else

namespace kvist {
void multiply_tiles(const Matrix& matrix, const Input& rows, std::int64_t first, std::int64_t last,
                    const Sink& sink) {
    multiply_portable(matrix, rows, first, last, sink);
}
}  // namespace kvist

#endif
