// Sixteen lanes of fp32, as the compiler's vector types: the order of every sum stands in the source
// and does not depend on what a vectoriser makes of a loop.
//
// Included by the isa_*.cpp only, each compiled for other instructions; see vectors.hpp for why all of it
// has internal linkage.
#pragma once

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

#include "element.hpp"
#include "vectors.hpp"

namespace kvist {
namespace {

#if defined(__AVX512F__)
constexpr int kRegisterBytes = 64;
#elif defined(__AVX2__)
constexpr int kRegisterBytes = 32;
#else
constexpr int kRegisterBytes = 16;
#endif

typedef Sixteen<kRegisterBytes>::Floats Floats;
typedef Sixteen<kRegisterBytes>::Ints Ints;
typedef Sixteen<kRegisterBytes>::Words Words;
typedef Sixteen<kRegisterBytes>::Halves Halves;

constexpr std::int64_t kLanes = 16;
// A maximum of nothing. Finite, so that what is masked (minus infinity) stays below it.
constexpr float kNothing = -1e30f;
constexpr float kLog2e = 1.44269504088896341f, kLn2 = 0.693147180559945309f;

KVIST_INLINE std::int64_t least(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
KVIST_INLINE std::int64_t most(std::int64_t a, std::int64_t b) { return a > b ? a : b; }
KVIST_INLINE std::int64_t whole(std::int64_t n, std::int64_t unit) { return (n + unit - 1) / unit * unit; }

KVIST_INLINE Floats splat(float value) { return Floats{} + value; }

template <typename V>
KVIST_INLINE V larger(const V& a, const V& b) {
    return pick(a > b, a, b);
}

#ifdef __AVX512F__
KVIST_INLINE Float16 larger(const Float16& a, const Float16& b) {
    return (Float16)_mm512_max_ps((__m512)a, (__m512)b);
}
#elif defined(__AVX2__)
KVIST_INLINE Float8 larger(const Float8& a, const Float8& b) { return (Float8)_mm256_max_ps((__m256)a, (__m256)b); }

KVIST_INLINE Twice<Float8> larger(const Twice<Float8>& a, const Twice<Float8>& b) {
    return {larger(a.low, b.low), larger(a.high, b.high)};
}
#endif

// Lanes of a and b in turn, joined with those of their sources that lie eight apart.
template <typename Join>
KVIST_INLINE Float16 fold(const Float16& a, const Float16& b, Join join) {
    constexpr Int16 kLow = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    constexpr Int16 kHigh = {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return join(__builtin_shuffle(a, b, kLow), __builtin_shuffle(a, b, kHigh));
}

KVIST_INLINE Twice<Float8> in_turn(const Float8& a, const Float8& b) {
    constexpr Int8 kLow = {0, 8, 1, 9, 2, 10, 3, 11}, kHigh = {4, 12, 5, 13, 6, 14, 7, 15};
    return {__builtin_shuffle(a, b, kLow), __builtin_shuffle(a, b, kHigh)};
}

KVIST_INLINE Twice<Float4> in_turn(const Float4& a, const Float4& b) {
    constexpr Int4 kLow = {0, 4, 1, 5}, kHigh = {2, 6, 3, 7};
    return {__builtin_shuffle(a, b, kLow), __builtin_shuffle(a, b, kHigh)};
}

template <typename V>
KVIST_INLINE Twice<Twice<V>> in_turn(const Twice<V>& a, const Twice<V>& b) {
    return {in_turn(a.low, b.low), in_turn(a.high, b.high)};
}

template <typename V, typename Join>
KVIST_INLINE Twice<V> fold(const Twice<V>& a, const Twice<V>& b, Join join) {
    return in_turn(join(a.low, a.high), join(b.low, b.high));
}

// Lane t of the result is all lanes of v[t] joined; v is used up.
template <typename Join>
KVIST_INLINE Floats joined(Floats (&v)[kLanes], Join join) {
#pragma GCC unroll 4
    for (int half = kLanes / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < half; ++i) v[i] = fold(v[i], v[i + half], join);
    }
    return v[0];
}

template <typename Join>
KVIST_INLINE float across(Float4 v, Join join) {
    constexpr Int4 kTwo = {2, 3, 0, 1}, kOne = {1, 0, 3, 2};
    v = join(v, __builtin_shuffle(v, kTwo));
    v = join(v, __builtin_shuffle(v, kOne));
    return v[0];
}

template <typename Join>
KVIST_INLINE float across(Float8 v, Join join) {
    constexpr Int8 kFour = {4, 5, 6, 7, 0, 1, 2, 3}, kTwo = {2, 3, 0, 1, 6, 7, 4, 5}, kOne = {1, 0, 3, 2, 5, 4, 7, 6};
    v = join(v, __builtin_shuffle(v, kFour));
    v = join(v, __builtin_shuffle(v, kTwo));
    v = join(v, __builtin_shuffle(v, kOne));
    return v[0];
}

template <typename Join>
KVIST_INLINE float across(Float16 v, Join join) {
    constexpr Int16 kEight = {8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7};
    constexpr Int16 kFour = {4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11};
    constexpr Int16 kTwo = {2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13};
    constexpr Int16 kOne = {1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14};
    v = join(v, __builtin_shuffle(v, kEight));
    v = join(v, __builtin_shuffle(v, kFour));
    v = join(v, __builtin_shuffle(v, kTwo));
    v = join(v, __builtin_shuffle(v, kOne));
    return v[0];
}

template <typename V, typename Join>
KVIST_INLINE float across(const Twice<V>& v, Join join) {
    return across(join(v.low, v.high), join);
}

struct Sum {
    template <typename V>
    KVIST_MEMBER V operator()(const V& a, const V& b) const {
        return a + b;
    }
};

struct Largest {
    template <typename V>
    KVIST_MEMBER V operator()(const V& a, const V& b) const {
        return larger(a, b);
    }
};

KVIST_INLINE Floats sums_of(Floats (&v)[kLanes]) { return joined(v, Sum()); }
KVIST_INLINE Floats largest_of(Floats (&v)[kLanes]) { return joined(v, Largest()); }
KVIST_INLINE float sum_across(const Floats& v) { return across(v, Sum()); }
KVIST_INLINE float largest_across(const Floats& v) { return across(v, Largest()); }

// Lanes whose bit is clear become minus infinity.
KVIST_INLINE Floats masked(const Floats& v, std::uint32_t mask) {
#ifdef __AVX512F__
    return (Floats)_mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), (__mmask16)mask, (__m512)v);
#else
    alignas(64) static constexpr std::uint32_t kLane[kLanes] = {1u << 0,  1u << 1,  1u << 2,  1u << 3,
                                                                1u << 4,  1u << 5,  1u << 6,  1u << 7,
                                                                1u << 8,  1u << 9,  1u << 10, 1u << 11,
                                                                1u << 12, 1u << 13, 1u << 14, 1u << 15};
    return pick((load<Words>(kLane) & mask) != 0u, v, splat(-__builtin_inff()));
#endif
}

// 2^t for t <= 0, to about one unit in the last place; 0 where the result would be subnormal.
KVIST_INLINE Floats exp2_of(const Floats& t) {
#ifdef __AVX512DQ__
    // scalef multiplies by 2^floor(t), reduce leaves t - floor(t).
    const Floats f = (Floats)_mm512_reduce_ps((__m512)t, 1);
    Floats p = f * 0.00186713011f + 0.00901703021f;
    p = p * f + 0.0557999132f;
    p = p * f + 0.24016445f;
    p = p * f + 0.693151312f;
    p = p * f + 1.0f;
    return (Floats)_mm512_scalef_ps((__m512)p, (__m512)t);
#else
    const Floats low = splat(-126.0f);
    const Floats x = pick(t < low, low - 1.0f, t);
    const Floats shifted = x + 12582912.0f;  // 1.5 * 2^23: rounds to an integer
    const Floats n = shifted - 12582912.0f, f = x - n;
    Floats p = f * 1.52527338e-5f + 1.54035304e-4f;  // ln(2)^k / k!
    p = p * f + 1.33335581e-3f;
    p = p * f + 9.61812911e-3f;
    p = p * f + 5.55041087e-2f;
    p = p * f + 2.40226507e-1f;
    p = p * f + 6.93147181e-1f;
    p = p * f + 1.0f;
    const Ints exponent = convert<Ints>(n) << 23;
    const Floats scaled = (Floats)((Ints)p + exponent);
    return pick(t < low, Floats{}, scaled);
#endif
}

KVIST_INLINE float exp2_of(float t) { return first_of(exp2_of(splat(t))); }

// (1 - e) / (1 + e) with e = exp(-2 |x|), and the sign of x.
KVIST_INLINE Floats tanh_of(const Floats& x) {
    const Words bits = (Words)x;
    const Floats magnitude = (Floats)(bits & 0x7fffffffu);
    const Floats e = exp2_of(magnitude * (-2.0f * kLog2e));
    const Floats t = (1.0f - e) / (1.0f + e);
    return (Floats)((Words)t | (bits & 0x80000000u));
}

// ---- sixteen bits and thirty-two

// The sixteen lower bits of each lane, a bf16, as fp32; and the sixteen upper.
KVIST_INLINE Floats low_bf16(const Words& pairs) { return (Floats)(pairs << 16); }
KVIST_INLINE Floats high_bf16(const Words& pairs) { return (Floats)(pairs & 0xffff0000u); }

#ifdef __AVX512F__
KVIST_INLINE Floats low_fp16(const Words& pairs) {
    return (Floats)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)pairs));
}
#else
// The exponent moves by a multiplication, which also makes fp16's subnormals right; infinities and
// NaN, whose exponent is all ones in both forms, keep it.
KVIST_INLINE Floats low_fp16(const Words& pairs) {
    const Words magnitude = (pairs & 0x7fffu) << 13;
    const Words moved = (Words)((Floats)magnitude * 0x1p112f);
    const Words special = (Words)(magnitude >= 0x0f800000u) & 0x7f800000u;
    return (Floats)(moved | special | ((pairs & 0x8000u) << 16));
}
#endif
KVIST_INLINE Floats high_fp16(const Words& pairs) { return low_fp16(pairs >> 16); }

// To the nearest, ties to even; NaN stays NaN. The result stands in the lower half of each lane.
KVIST_INLINE Words to_bf16(const Floats& v) {
    const Words bits = (Words)v;
    const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const Words quiet = (bits >> 16) | 0x40u;
    return pick((bits & 0x7fffffffu) > 0x7f800000u, quiet, rounded);
}

// Adding 2^13 times the unit of the result, as a float, rounds where fp16 does; what is subnormal in
// fp16 is rounded at one fixed place.
KVIST_INLINE Words to_fp16(const Floats& v) {
    const Words bits = (Words)v, sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    const Words rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    const Words normal = (rounded - 0x38000000u) >> 13;
    const Words small = (Words)((Floats)magnitude + 0.5f) - 0x3f000000u;
    Words result = pick(magnitude < 0x38800000u, small, normal);
    result = pick(rounded >= 0x47800000u, Words{} + 0x7c00u, result);
    result = pick(magnitude > 0x7f800000u, Words{} + 0x7e00u, result);
    return result | sign;
}

KVIST_INLINE Floats load_row(const char* from, Element element) {
    if (element == Element::f32) return load<Floats>(from);
    const Words words = convert<Words>(load<Halves>(from));
    return element == Element::bf16 ? low_bf16(words) : low_fp16(words);
}

KVIST_INLINE void store_row(char* to, Element element, const Floats& v) {
    if (element == Element::f32) return store<Floats>(to, v);
    const Words words = element == Element::bf16 ? to_bf16(v) : to_fp16(v);
    store(to, convert<Halves>(words));
}

// `dim` stored elements as fp32, zeros up to `pad`, a multiple of kLanes.
static inline void widen(const char* from, Element element, std::int64_t dim, float* to, std::int64_t pad) {
    const std::int64_t bytes = element_bytes(element);
    std::int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) store<Floats>(to + d, load_row(from + d * bytes, element));
    if (d < pad) {
        alignas(64) char rest[kLanes * 4] = {};
        std::memcpy(rest, from + d * bytes, (std::size_t)((dim - d) * bytes));
        store<Floats>(to + d, load_row(rest, element));
    }
}

// `dim` values times `factor`, stored as `element`.
static inline void narrow(const float* from, float factor, std::int64_t dim, char* to, Element element) {
    const std::int64_t bytes = element_bytes(element);
    std::int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) {
        store_row(to + d * bytes, element, load<Floats>(from + d) * factor);
    }
    if (d < dim) {
        alignas(64) char rest[kLanes * 4];
        store_row(rest, element, load<Floats>(from + d) * factor);
        std::memcpy(to + d * bytes, rest, (std::size_t)((dim - d) * bytes));
    }
}

}  // namespace
}  // namespace kvist
