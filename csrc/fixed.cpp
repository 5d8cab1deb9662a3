#include "fixed.hpp"

#include <algorithm>
#include <cstring>

#include "tiles.hpp"

#ifdef KVIST_HAS_TILES

#define KVIST_FIXED __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))
#define KVIST_FIXED_INLINE \
    static inline __attribute__((always_inline, target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))

namespace kvist {
namespace {

KVIST_FIXED_INLINE __m512 widened(const char* from) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

// Whole numbers [count][32] as floats of the rows; `row` is the first's number.
KVIST_FIXED_INLINE void scale_sums(const Matrix& matrix, const Fixed& rows, std::int64_t panel, std::int64_t row,
                                   std::int64_t count, const std::int32_t* high, const std::int32_t* low,
                                   float* sums) {
    const std::int32_t* const total = matrix.total(panel);
    const __m512 bytes = _mm512_set1_ps(256.0f);
    for (int half = 0; half < 2; ++half) {
        const __m512i middle = _mm512_slli_epi32(_mm512_loadu_si512(total + half * 16), 7);
        const __m512 weight_scale = _mm512_loadu_ps(matrix.scale(panel) + half * 16);
        for (std::int64_t r = 0; r < count; ++r) {
            const std::int64_t at = r * kPanel + half * 16;
            const __m512 upper = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_loadu_si512(high + at), middle));
            const __m512 lower = _mm512_cvtepi32_ps(_mm512_loadu_si512(low + at));
            const __m512 sum = _mm512_fmadd_ps(upper, bytes, lower);
            _mm512_storeu_ps(sums + at, _mm512_mul_ps(_mm512_mul_ps(sum, _mm512_set1_ps(rows.scale[row + r])),
                                                      weight_scale));
        }
    }
}

// Four inputs of a row, in every lane.
KVIST_FIXED_INLINE __m512i four_of(const std::uint8_t* x) {
    std::int32_t four;
    std::memcpy(&four, x, sizeof(four));
    return _mm512_set1_epi32(four);
}

// Far enough ahead that memory answers in time, near enough that it is not pushed out again.
constexpr std::int64_t kAhead = 4096;

template <int R>
KVIST_FIXED void sum_fixed(const char* panel, const std::uint8_t* x, std::int64_t steps, std::int32_t* high,
                           std::int32_t* low) {
    __m512i upper[R][2], lower[R][2];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) upper[r][0] = upper[r][1] = lower[r][0] = lower[r][1] = _mm512_setzero_si512();
    for (std::int64_t step = 0; step < steps; ++step, x += 2048) {
        for (std::int64_t four = 0; four < 64; four += 4, panel += 128) {
            const __m512i a = _mm512_loadu_si512(panel), b = _mm512_loadu_si512(panel + 64);
            _mm_prefetch(panel + kAhead, _MM_HINT_T0);
            _mm_prefetch(panel + kAhead + 64, _MM_HINT_T0);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                const __m512i up = four_of(x + r * 64 + four), down = four_of(x + 1024 + r * 64 + four);
                upper[r][0] = _mm512_dpbusd_epi32(upper[r][0], up, a);
                upper[r][1] = _mm512_dpbusd_epi32(upper[r][1], up, b);
                lower[r][0] = _mm512_dpbusd_epi32(lower[r][0], down, a);
                lower[r][1] = _mm512_dpbusd_epi32(lower[r][1], down, b);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        for (int half = 0; half < 2; ++half) {
            _mm512_storeu_si512(high + r * kPanel + half * 16, upper[r][half]);
            _mm512_storeu_si512(low + r * kPanel + half * 16, lower[r][half]);
        }
    }
}

using Sums = void (*)(const char*, const std::uint8_t*, std::int64_t, std::int32_t*, std::int32_t*);

}  // namespace

KVIST_FIXED void fix_row(const char* row, std::int64_t number, const Fixed& fixed) {
    __m512 most = _mm512_setzero_ps();
    std::int64_t k = 0;
    for (; k < fixed.inputs; k += 16) most = _mm512_max_ps(most, _mm512_abs_ps(widened(row + k * 2)));
    const float greatest = _mm512_reduce_max_ps(most);
    fixed.scale[number] = greatest / 32767.0f;
    const __m512 inverse = _mm512_set1_ps(greatest > 0.0f ? 32767.0f / greatest : 0.0f);
    const __m512i middle = _mm512_set1_epi32(32768);
    for (k = 0; k < fixed.inputs; k += 16) {
        const __m512i whole =
            _mm512_add_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(widened(row + k * 2), inverse)), middle);
        std::uint8_t* const to = fixed.at(number, k / 64) + k % 64;
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_srli_epi32(whole, 8)));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 1024), _mm512_cvtepi32_epi8(whole));
    }
    // Weights behind the last input are zeros; what they meet does not matter, but must be something.
    for (; k % 64 != 0; k += 16) {
        std::memset(fixed.at(number, k / 64) + k % 64, 0, 16);
        std::memset(fixed.at(number, k / 64) + 1024 + k % 64, 0, 16);
    }
}

void fix_rows(const char* rows, std::int64_t stride_bytes, const Fixed& fixed) {
    for (std::int64_t row = 0; row < fixed.count; ++row) fix_row(rows + row * stride_bytes, row, fixed);
}

KVIST_FIXED void multiply_fixed_dots(const Panels& panels, const Fixed& rows, const Sink& sink) {
    static constexpr Sums kSums[4] = {&sum_fixed<1>, &sum_fixed<2>, &sum_fixed<3>, &sum_fixed<4>};
    const Matrix& matrix = panels.matrix;
    alignas(64) std::int32_t high[kTile * kPanel], low[kTile * kPanel];
    alignas(64) float sums[kTile * kPanel];
    for (std::int64_t panel = panels.first; panel < panels.last; ++panel) {
        for (std::int64_t row = 0; row < rows.count; row += kTile) {
            const std::int64_t count = std::min(kTile, rows.count - row);
            for (std::int64_t r = 0; r < count; r += 4) {
                kSums[std::min<std::int64_t>(4, count - r) - 1](matrix.panel(panel), rows.at(row + r, 0),
                                                                Fixed::steps(rows.inputs), high + r * kPanel,
                                                                low + r * kPanel);
            }
            scale_sums(matrix, rows, panel, row, count, high, low, sums);
            add_bias(matrix, panel, count, sums);
            sink.take(row, count, panel, sums);
        }
    }
}

KVIST_FIXED void multiply_fixed_tiles(const Panels& panels, const Fixed& rows, const char* then, const Sink& sink) {
    const Matrix& matrix = panels.matrix;
    const std::int64_t steps = Fixed::steps(rows.inputs), passes = Fixed::padded(rows.count) / kTile * 2;
    // As many lines a step as bring the next panel while this one is used.
    const std::int64_t lines = (matrix.panel_bytes() / 64 + passes * steps - 1) / (passes * steps);
    // While the tiles work on one block of sums, the vectors finish the one before it.
    alignas(64) std::int32_t whole[2][2][kTile * kPanel];
    alignas(64) float sums[kTile * kPanel];
    std::int64_t waiting = -1, waiting_panel = 0;
    const auto finish = [&](int turn) KVIST_FIXED {
        const std::int64_t count = std::min(kTile, rows.count - waiting);
        scale_sums(matrix, rows, waiting_panel, waiting, count, whole[turn][0], whole[turn][1], sums);
        add_bias(matrix, waiting_panel, count, sums);
        sink.take(waiting, count, waiting_panel, sums);
    };
    int turn = 0;
    shape_tiles(passes > 2 ? kTile : rows.count);
    for (std::int64_t panel = panels.first; panel < panels.last; ++panel) {
        const char* const weights = matrix.panel(panel);
        const char* const next = panel + 1 < panels.last ? matrix.panel(panel + 1) : then;
        for (std::int64_t pass = 0; pass < passes; ++pass) {
            const std::int64_t row = pass / 2 * kTile, part = pass % 2;
            const char* const ahead = next == nullptr ? nullptr : next + pass * steps * lines * 64;
            sum_tile<true>(weights, rows.at(row, 0) + part * 1024, 2048, steps, ahead, ahead == nullptr ? 0 : lines);
            if (part == 0 && waiting >= 0) finish(turn ^ 1);
            take_sums(whole[turn][part]);
            if (part == 1) waiting = row, waiting_panel = panel, turn ^= 1;
        }
    }
    if (waiting >= 0) finish(turn ^ 1);
    release_tiles();
}

}  // namespace kvist

#else

namespace kvist {
// Never called: where there are no such instructions, rows meet int8 in matrix_portable.cpp.
void fix_row(const char*, std::int64_t, const Fixed&) {}
void fix_rows(const char*, std::int64_t, const Fixed&) {}
void multiply_fixed_dots(const Panels&, const Fixed&, const Sink&) {}
void multiply_fixed_tiles(const Panels&, const Fixed&, const char*, const Sink&) {}
}  // namespace kvist

#endif
