// Products by AMX tiles: 16 rows x 32 inputs times 32 inputs x 16 outputs an instruction.
// The packing of bf16 weights is that of a tile; int4 is decoded a panel at a time. int8: fixed.hpp.
#include <algorithm>
#include <cstring>

#include "chain.hpp"
#include "clones.hpp"
#include "matrix.hpp"
#include "tiles.hpp"

#ifdef KVIST_HAS_TILES

namespace kvist {
namespace {

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

}  // namespace

void multiply_tiles(const Matrix& matrix, const Input& rows, std::int64_t first, std::int64_t last,
                    const Sink& sink) {
    const std::int64_t padded = (rows.count + kTile - 1) / kTile * kTile;
    const FloatBuffer memory((padded + kPanel) * matrix.inputs / 2);
    const Tiled tiled{reinterpret_cast<char*>(memory.data), matrix.inputs, rows.count};
    tile_rows(static_cast<const char*>(rows.data), rows.stride * 2, tiled);
    multiply_tiled(Panels{matrix, first, last}, tiled, tiled.data + padded * matrix.inputs * 2, nullptr, sink);
}

void multiply_tiled(const Panels& panels, const Tiled& rows, char* decoded, const char* then, const Sink& sink) {
    const Matrix& matrix = panels.matrix;
    const std::int64_t groups = rows.padded() / kTile, steps = matrix.inputs / 32;
    // As many lines a step as bring the next panel while this one is used.
    const std::int64_t lines = (matrix.panel_bytes() / 64 + groups * steps - 1) / (groups * steps);
    // While the tiles work on one block of sums, the vectors finish the one before it.
    alignas(64) float sums[2][kTile * kPanel];
    std::int64_t waiting = -1, waiting_panel = 0;
    const auto finish = [&](float* block) {
        const std::int64_t count = std::min(kTile, rows.count - waiting);
        add_bias(matrix, waiting_panel, count, block);
        sink.take(waiting, count, waiting_panel, block);
    };
    int turn = 0;
    shape_tiles(groups > 1 ? kTile : rows.count);
    for (std::int64_t panel = panels.first; panel < panels.last; ++panel) {
        const char* weights = matrix.panel(panel);
        const char* const next = panel + 1 < panels.last ? matrix.panel(panel + 1) : then;
        if (matrix.weights == Weights::i4) {
            decode_i4(weights, matrix.inputs, decoded);
            weights = decoded;
        }
        for (std::int64_t group = 0; group < groups; ++group) {
            const char* const ahead = next == nullptr ? nullptr : next + group * steps * lines * 64;
            sum_tile<false>(weights, rows.data + group * kTile * matrix.inputs * 2, 1024, steps, ahead,
                     ahead == nullptr ? 0 : lines);
            if (waiting >= 0) finish(sums[turn ^ 1]);
            take_sums(sums[turn]);
            waiting = group * kTile, waiting_panel = panel, turn ^= 1;
        }
    }
    if (waiting >= 0) finish(sums[turn ^ 1]);
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
