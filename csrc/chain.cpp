#include "chain.hpp"

#include <cmath>

#include "rows.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
// gcc 12 calls the undefined operands of its own intrinsics uninitialized.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#define KVIST_CHAIN __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
#define KVIST_CHAIN_INLINE \
    static inline __attribute__((always_inline, target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))

namespace kvist {
namespace {

// Both sides of a bf16 number: sixteen of them, in memory and as fp32.
KVIST_CHAIN_INLINE __m512 widened(__m256i halves) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

KVIST_CHAIN_INLINE __m512 load(const void* from) {
    return widened(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
}

KVIST_CHAIN_INLINE __m256i narrowed(__m512 values) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(values)); }

KVIST_CHAIN_INLINE void store(void* to, __m512 values) {
    _mm256_storeu_si256(static_cast<__m256i*>(to), narrowed(values));
}

KVIST_CHAIN_INLINE __m512 rounded(__m512 values) { return widened(narrowed(values)); }

// exp of what is not above zero; the same polynomial as scalar.hpp's.
KVIST_CHAIN_INLINE __m512 exp_below_zero(__m512 x) {
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
    __m512 p = _mm512_fmadd_ps(r, _mm512_set1_ps(1.0f / 5040.0f), _mm512_set1_ps(1.0f / 720.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

KVIST_CHAIN_INLINE __m512 silu_of(__m512 x) {
    const __m512 magnitude = _mm512_abs_ps(x), one = _mm512_set1_ps(1.0f);
    const __m512 e = exp_below_zero(_mm512_sub_ps(_mm512_setzero_ps(), magnitude));
    const __mmask16 below = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    return _mm512_mul_ps(x, _mm512_div_ps(_mm512_mask_mov_ps(one, below, e), _mm512_add_ps(one, e)));
}

// Of sixteen gates and their ups.
KVIST_CHAIN_INLINE __m512 activated(const float* sums) {
    const __m512 gate = rounded(_mm512_load_ps(sums)), up = rounded(_mm512_load_ps(sums + 16));
    return _mm512_mul_ps(rounded(silu_of(gate)), up);
}

}  // namespace

KVIST_CHAIN void tile_rows(const char* rows, std::int64_t stride_bytes, const Tiled& tiled) {
    for (std::int64_t row = 0; row < tiled.count; ++row, rows += stride_bytes) {
        char* to = tiled.at(row, 0);
        for (std::int64_t k = 0; k < tiled.inputs; k += 32, to += 1024) {
            _mm512_storeu_si512(to, _mm512_loadu_si512(rows + k * 2));
        }
    }
}

KVIST_CHAIN void tile_normed(const char* rows, const void* weight, float epsilon, const Tiled& tiled) {
    const auto* const factor = static_cast<const char*>(weight);
    for (std::int64_t row = 0; row < tiled.count; ++row, rows += tiled.inputs * 2) {
        __m512 squares = _mm512_setzero_ps();
        for (std::int64_t k = 0; k < tiled.inputs; k += 16) {
            const __m512 x = load(rows + k * 2);
            squares = _mm512_fmadd_ps(x, x, squares);
        }
        // Lanes in the order of rows.cpp, so that a row's norm is the same by either way.
        alignas(64) float lanes[16];
        _mm512_store_ps(lanes, squares);
        for (int half = 8; half > 0; half /= 2) {
            for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
        }
        const __m512 scale =
            _mm512_set1_ps(1.0f / std::sqrt(lanes[0] / static_cast<float>(tiled.inputs) + epsilon));
        for (std::int64_t k = 0; k < tiled.inputs; k += 16) {
            const __m512 x = rounded(_mm512_mul_ps(load(rows + k * 2), scale));
            store(tiled.at(row, k), _mm512_mul_ps(load(factor + k * 2), x));
        }
    }
}

KVIST_CHAIN void turn_row(char* head, const char* cos, const char* sin, std::int64_t rotary) {
    const std::int64_t half = rotary / 2;
    if (half % 16 != 0) return rotate_row(Element::bf16, head, cos, sin, rotary);
    for (std::int64_t n = 0; n < half; n += 16) {
        char *const low = head + n * 2, *const high = head + (half + n) * 2;
        const __m512 a = load(low), b = load(high);
        const __m512 minus_b = _mm512_sub_ps(_mm512_setzero_ps(), b);
        store(low, _mm512_add_ps(rounded(_mm512_mul_ps(a, load(cos + n * 2))),
                                 rounded(_mm512_mul_ps(minus_b, load(sin + n * 2)))));
        store(high, _mm512_add_ps(rounded(_mm512_mul_ps(b, load(cos + (half + n) * 2))),
                                  rounded(_mm512_mul_ps(a, load(sin + (half + n) * 2)))));
    }
}

KVIST_CHAIN void AddRows::take(std::int64_t row, std::int64_t count, std::int64_t panel, float* sums) const {
    char* to = out + (row * width + panel * kPanel) * 2;
    for (std::int64_t r = 0; r < count; ++r, to += width * 2, sums += kPanel) {
        store(to, _mm512_add_ps(load(to), rounded(_mm512_load_ps(sums))));
        store(to + 32, _mm512_add_ps(load(to + 32), rounded(_mm512_load_ps(sums + 16))));
    }
}

KVIST_CHAIN void SplitRows::take(std::int64_t row, std::int64_t count, std::int64_t panel, float* sums) const {
    std::int64_t column = panel * kPanel, part = 0;
    while (part < 2 && column >= width[part]) column -= width[part++];
    char* to = out[part] + (row * width[part] + column) * 2;
    for (std::int64_t r = 0; r < count; ++r, to += width[part] * 2, sums += kPanel) {
        store(to, _mm512_load_ps(sums));
        store(to + 32, _mm512_load_ps(sums + 16));
    }
}

KVIST_CHAIN void SiluTiled::take(std::int64_t row, std::int64_t count, std::int64_t panel, float* sums) const {
    for (std::int64_t r = 0; r < count; ++r, sums += kPanel) store(out.at(row + r, panel * 16), activated(sums));
}

KVIST_CHAIN void SiluRows::take(std::int64_t row, std::int64_t count, std::int64_t panel, float* sums) const {
    char* to = out + (row * width + panel * 16) * 2;
    for (std::int64_t r = 0; r < count; ++r, to += width * 2, sums += kPanel) store(to, activated(sums));
}

}  // namespace kvist

#else

namespace kvist {
// Never called: where there are no tiles, stack.cpp takes rows.hpp's way.
void tile_rows(const char*, std::int64_t, const Tiled&) {}
void tile_normed(const char*, const void*, float, const Tiled&) {}
void multiply_tiled(const Panels&, const Tiled&, char*, const char*, const Sink&) {}
void turn_row(char* head, const char* cos, const char* sin, std::int64_t rotary) {
    rotate_row(Element::bf16, head, cos, sin, rotary);
}
void AddRows::take(std::int64_t, std::int64_t, std::int64_t, float*) const {}
void SplitRows::take(std::int64_t, std::int64_t, std::int64_t, float*) const {}
void SiluTiled::take(std::int64_t, std::int64_t, std::int64_t, float*) const {}
void SiluRows::take(std::int64_t, std::int64_t, std::int64_t, float*) const {}
}  // namespace kvist

#endif
