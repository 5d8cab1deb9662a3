// Products by AVX-512's bf16 dot product: two inputs of sixteen outputs an instruction.
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

KVIST_DOTS_INLINE __m512 from_i8(const char* stored) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(stored))));
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

// Widening int8 to fp32 costs less than to bf16. `x` is fp32 [R][inputs]; lanes are pairs of inputs of
// eight outputs, which are added in the end.
template <int R>
KVIST_DOTS void sum_rows_i8(const char* panel, const float* x, std::int64_t inputs, float* sums) {
    __m512 sum[R][4];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = sum[r][2] = sum[r][3] = _mm512_setzero_ps();
    for (std::int64_t k = 0; k < inputs; k += 2, panel += 64) {
        const __m512 a = from_i8(panel), b = from_i8(panel + 16), c = from_i8(panel + 32), d = from_i8(panel + 48);
        _mm_prefetch(panel + kAhead, _MM_HINT_T0);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            double both;
            std::memcpy(&both, x + r * inputs + k, sizeof(both));
            const __m512 pair = _mm512_castpd_ps(_mm512_set1_pd(both));
            sum[r][0] = _mm512_fmadd_ps(pair, a, sum[r][0]);
            sum[r][1] = _mm512_fmadd_ps(pair, b, sum[r][1]);
            sum[r][2] = _mm512_fmadd_ps(pair, c, sum[r][2]);
            sum[r][3] = _mm512_fmadd_ps(pair, d, sum[r][3]);
        }
    }
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        for (int half = 0; half < 2; ++half) {
            const __m512 low = sum[r][2 * half], high = sum[r][2 * half + 1];
            _mm512_storeu_ps(sums + r * kPanel + half * 16, _mm512_add_ps(_mm512_permutex2var_ps(low, even, high),
                                                                          _mm512_permutex2var_ps(low, odd, high)));
        }
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

KVIST_DOTS void widen_rows(const Input& rows, std::int64_t inputs, float* wide) {
    const auto* x = static_cast<const std::uint16_t*>(rows.data);
    for (std::int64_t r = 0; r < rows.count; ++r, x += rows.stride, wide += inputs) {
        for (std::int64_t k = 0; k < inputs; k += 16) {
            const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + k));
            const __m512i words = _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
            _mm512_storeu_ps(wide + k, _mm512_castsi512_ps(words));
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

void sum_block_i8(const char* panel, const float* x, std::int64_t inputs, std::int64_t count, float* sums) {
    while (count >= 4) {
        sum_rows_i8<4>(panel, x, inputs, sums);
        count -= 4, x += 4 * inputs, sums += 4 * kPanel;
    }
    switch (count) {
        case 3: return sum_rows_i8<3>(panel, x, inputs, sums);
        case 2: return sum_rows_i8<2>(panel, x, inputs, sums);
        case 1: return sum_rows_i8<1>(panel, x, inputs, sums);
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
    const bool i4 = matrix.weights == Weights::i4, i8 = matrix.weights == Weights::i8;
    const FloatBuffer totals(i4 ? rows.count * groups : 0), wide(i8 ? rows.count * matrix.inputs : 0);
    if (i4) add_up_groups(rows, matrix.inputs, totals.data);
    if (i8) widen_rows(rows, matrix.inputs, wide.data);
    alignas(64) float sums[kSumRows * kPanel];
    for (std::int64_t panel = first; panel < last; ++panel) {
        const char* const weights = matrix.panel(panel);
        for (std::int64_t row = 0; row < rows.count; row += kSumRows) {
            const std::int64_t count = std::min(kSumRows, rows.count - row);
            const std::uint16_t* const some = x + row * rows.stride;
            if (i4) {
                sum_block_i4(weights, some, rows.stride, matrix.inputs, count, totals.data + row * groups, sums);
            } else if (i8) {
                sum_block_i8(weights, wide.data + row * matrix.inputs, matrix.inputs, count, sums);
            } else {
                sum_block_bf16(weights, some, rows.stride, matrix.inputs, count, sums);
            }
            finish_sums(matrix, panel, count, sums);
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
