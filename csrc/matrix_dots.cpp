// Products by AVX-512's bf16 dot product: two inputs of sixteen outputs an instruction. Not of int8 weights.
//
// Weights are decoded in registers on their way from memory. A row's sums are added up pair by pair in
// the order of the inputs, whatever the number of rows.
#include <algorithm>
#include <cstring>

#include "clones.hpp"
#include "matrix.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
// gcc 12 calls the undefined operands of its own intrinsics uninitialized.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#define KVIST_DOTS __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
#define KVIST_DOTS_INLINE static inline __attribute__((always_inline, target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))

namespace kvist {
namespace {

KVIST_DOTS_INLINE __m512 dot(__m512 sum, __m512i x, __m512i w) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(w));
}

// Inputs k and k + 1 of a row, in every lane.
KVIST_DOTS_INLINE __m512i pair_of(const std::uint16_t* x) {
    std::int32_t pair;
    std::memcpy(&pair, x, sizeof(pair));
    return _mm512_set1_epi32(pair);
}

// bf16 of 0 … 15, twice: an index of five bits whose highest does not matter.
KVIST_DOTS_INLINE __m512i levels() {
    const __m256i once = _mm256_setr_epi16(0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100,
                                           0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170);
    return _mm512_inserti64x4(_mm512_castsi256_si512(once), once, 1);
}

// Far enough ahead that memory answers in time, near enough that it is not pushed out again.
constexpr std::int64_t kAhead = 4096;

template <int R>
KVIST_DOTS void sum_rows_bf16(const char* panel, const std::uint16_t* x, std::int64_t stride, std::int64_t inputs,
                              float* sums) {
    __m512 sum[R][2];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (std::int64_t k = 0; k < inputs; k += 2, panel += 128) {
        const __m512i low = _mm512_loadu_si512(panel), high = _mm512_loadu_si512(panel + 64);
        _mm_prefetch(panel + kAhead, _MM_HINT_T0);
        _mm_prefetch(panel + kAhead + 64, _MM_HINT_T0);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const __m512i pair = pair_of(x + r * stride + k);
            sum[r][0] = dot(sum[r][0], pair, low);
            sum[r][1] = dot(sum[r][1], pair, high);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        _mm512_storeu_ps(sums + r * kPanel, sum[r][0]);
        _mm512_storeu_ps(sums + r * kPanel + 16, sum[r][1]);
    }
}

// `totals` [R][groups]: what each row's inputs of a group add up to, which `least` multiplies.
template <int R>
KVIST_DOTS void sum_rows_i4(const char* panel, const std::uint16_t* x, std::int64_t stride, std::int64_t inputs,
                            const float* totals, std::int64_t groups, float* sums) {
    const __m512i table = levels();
    __m512 sum[R][2];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (std::int64_t g = 0; g < inputs / kGroup; ++g, panel += kGroupBytes, x += kGroup) {
        __m512 part[R][2];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) part[r][0] = part[r][1] = _mm512_setzero_ps();
        for (int line = 0; line < 10; ++line) _mm_prefetch(panel + kAhead + line * 64, _MM_HINT_T0);
#pragma GCC unroll 4
        for (int row = 0; row < 4; ++row) {
            __m512i low = _mm512_loadu_si512(panel + row * 128), high = _mm512_loadu_si512(panel + row * 128 + 64);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                const __m512i a = _mm512_permutexvar_epi16(low, table), b = _mm512_permutexvar_epi16(high, table);
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) {
                    const __m512i pair = pair_of(x + r * stride + (row * 4 + i) * 2);
                    part[r][0] = dot(part[r][0], pair, a);
                    part[r][1] = dot(part[r][1], pair, b);
                }
                low = _mm512_srli_epi16(low, 4);
                high = _mm512_srli_epi16(high, 4);
            }
        }
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const char* const at = panel + 512 + half * 32;
            const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
            const __m512 least = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + 64)));
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                sum[r][half] = _mm512_fmadd_ps(part[r][half], scale, sum[r][half]);
                sum[r][half] = _mm512_fmadd_ps(least, _mm512_set1_ps(totals[r * groups + g]), sum[r][half]);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        _mm512_storeu_ps(sums + r * kPanel, sum[r][0]);
        _mm512_storeu_ps(sums + r * kPanel + 16, sum[r][1]);
    }
}

KVIST_DOTS void add_up_groups(const Input& rows, std::int64_t inputs, float* totals) {
    const __m512i ones = _mm512_set1_epi16(0x3f80);
    const auto* x = static_cast<const std::uint16_t*>(rows.data);
    for (std::int64_t r = 0; r < rows.count; ++r, x += rows.stride) {
        for (std::int64_t k = 0; k < inputs; k += kGroup) {
            *totals++ = _mm512_reduce_add_ps(dot(_mm512_setzero_ps(), _mm512_loadu_si512(x + k), ones));
        }
    }
}

void sum_block_bf16(const char* panel, const std::uint16_t* x, std::int64_t stride, std::int64_t inputs,
                    std::int64_t count, float* sums) {
    while (count >= 8) {
        sum_rows_bf16<8>(panel, x, stride, inputs, sums);
        count -= 8, x += 8 * stride, sums += 8 * kPanel;
    }
    if (count >= 4) {
        sum_rows_bf16<4>(panel, x, stride, inputs, sums);
        count -= 4, x += 4 * stride, sums += 4 * kPanel;
    }
    switch (count) {
        case 3: return sum_rows_bf16<3>(panel, x, stride, inputs, sums);
        case 2: return sum_rows_bf16<2>(panel, x, stride, inputs, sums);
        case 1: return sum_rows_bf16<1>(panel, x, stride, inputs, sums);
        default: return;
    }
}

void sum_block_i4(const char* panel, const std::uint16_t* x, std::int64_t stride, std::int64_t inputs,
                  std::int64_t count, const float* totals, float* sums) {
    const std::int64_t groups = inputs / kGroup;
    while (count >= 4) {
        sum_rows_i4<4>(panel, x, stride, inputs, totals, groups, sums);
        count -= 4, x += 4 * stride, sums += 4 * kPanel, totals += 4 * groups;
    }
    switch (count) {
        case 3: return sum_rows_i4<3>(panel, x, stride, inputs, totals, groups, sums);
        case 2: return sum_rows_i4<2>(panel, x, stride, inputs, totals, groups, sums);
        case 1: return sum_rows_i4<1>(panel, x, stride, inputs, totals, groups, sums);
        default: return;
    }
}

}  // namespace

void multiply_dots(const Matrix& matrix, const Input& rows, std::int64_t first, std::int64_t last,
                   const Sink& sink) {
    const auto* const x = static_cast<const std::uint16_t*>(rows.data);
    const std::int64_t groups = matrix.inputs / kGroup;
    const bool i4 = matrix.weights == Weights::i4;
    const FloatBuffer totals(i4 ? rows.count * groups : 0);
    if (i4) add_up_groups(rows, matrix.inputs, totals.data);
    alignas(64) float sums[kSumRows * kPanel];
    for (std::int64_t panel = first; panel < last; ++panel) {
        const char* const weights = matrix.panel(panel);
        for (std::int64_t row = 0; row < rows.count; row += kSumRows) {
            const std::int64_t count = std::min(kSumRows, rows.count - row);
            const std::uint16_t* const some = x + row * rows.stride;
            if (i4) {
                sum_block_i4(weights, some, rows.stride, matrix.inputs, count, totals.data + row * groups, sums);
            } else {
                sum_block_bf16(weights, some, rows.stride, matrix.inputs, count, sums);
            }
            add_bias(matrix, panel, count, sums);
            sink.take(row, count, panel, sums);
        }
    }
}

}  // namespace kvist

#else

namespace kvist {
void multiply_dots(const Matrix& matrix, const Input& rows, std::int64_t first, std::int64_t last,
                   const Sink& sink) {
    multiply_portable(matrix, rows, first, last, sink);
}
}  // namespace kvist

#endif
