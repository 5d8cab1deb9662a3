#include "lanes.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

// Vectors never cross a call that is not inlined, so their calling convention is of no account.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

namespace kvist {
namespace {

typedef float Floats __attribute__((vector_size(64)));
typedef std::int32_t Ints __attribute__((vector_size(64)));
typedef std::uint32_t Words __attribute__((vector_size(64)));
typedef std::uint16_t Halves __attribute__((vector_size(32)));

#define KVIST_INLINE static inline __attribute__((always_inline))

template <typename Vector>
KVIST_INLINE Vector load(const void* from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof(Vector));
    return vector;
}

template <typename Vector>
KVIST_INLINE void store(void* to, const Vector& vector) {
    std::memcpy(to, &vector, sizeof(Vector));
}

// Lane by lane of a and b in turn, each the sum of two lanes of its source that lie eight apart.
KVIST_INLINE Floats fold(const Floats& a, const Floats& b) {
    constexpr Ints kLow = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    constexpr Ints kHigh = {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return __builtin_shuffle(a, b, kLow) + __builtin_shuffle(a, b, kHigh);
}

// Lane t of the result is the sum of the lanes of v[t]; v is used up.
KVIST_INLINE Floats sums_of(Floats (&v)[kLanes]) {
#pragma GCC unroll 4
    for (int half = kLanes / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < half; ++i) v[i] = fold(v[i], v[i + half]);
    }
    return v[0];
}

KVIST_INLINE Floats from_bf16(const Halves& stored) {
    return reinterpret_cast<Floats>(__builtin_convertvector(stored, Words) << 16);
}

// The exponent moves by a multiplication, which also makes fp16's subnormals right; infinities and
// NaN, whose exponent is all ones in both forms, keep it.
KVIST_INLINE Floats from_fp16(const Halves& stored) {
    const Words word = __builtin_convertvector(stored, Words);
    const Words magnitude = (word & 0x7fffu) << 13;
    const Words moved = reinterpret_cast<Words>(reinterpret_cast<Floats>(magnitude) * 0x1p112f);
    const Words special = reinterpret_cast<Words>(magnitude >= 0x0f800000u) & 0x7f800000u;
    return reinterpret_cast<Floats>(moved | special | ((word & 0x8000u) << 16));
}

// exp for arguments <= 0, to about one unit in the last place; 0 where the result would be subnormal.
// x = n ln 2 + r with |r| <= ln 2 / 2: a polynomial for r, n put into the exponent.
KVIST_INLINE Floats exp_of(const Floats& argument) {
    const Floats zero = {}, low = zero - 87.0f;
    const Floats x = argument < low ? low - 1.0f : argument;
    const Floats shifted = x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer
    const Floats n = shifted - 12582912.0f;
    const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Floats p = r * (1.0f / 5040.0f) + (1.0f / 720.0f);
    p = p * r + (1.0f / 120.0f);
    p = p * r + (1.0f / 24.0f);
    p = p * r + (1.0f / 6.0f);
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    const Ints exponent = __builtin_convertvector(n, Ints) << 23;
    const Floats scaled = reinterpret_cast<Floats>(reinterpret_cast<Ints>(p) + exponent);
    return x < low ? zero : scaled;
}

}  // namespace

#define KVIST_WIDEN(name, type, convert)                                                                    \
    KVIST_CLONES void name(const type* stored, std::int64_t count, std::int64_t dim, std::int64_t row,      \
                           float* out) {                                                                    \
        const std::int64_t whole = dim / kLanes * kLanes, rest = dim - whole;                               \
        for (std::int64_t t = 0; t < count; ++t, stored += dim, out += row) {                               \
            for (std::int64_t d = 0; d < whole; d += kLanes) {                                              \
                store<Floats>(out + d, convert(load<Halves>(stored + d)));                                  \
            }                                                                                               \
            if (rest != 0) {                                                                                \
                type padded[kLanes] = {};                                                                   \
                std::memcpy(padded, stored + whole, static_cast<std::size_t>(rest) * sizeof(type));         \
                store<Floats>(out + whole, convert(load<Halves>(padded)));                                  \
            }                                                                                               \
        }                                                                                                   \
    }

KVIST_WIDEN(widen_bf16, std::uint16_t, from_bf16)
KVIST_WIDEN(widen_fp16, std::uint16_t, from_fp16)

static void widen_fp32(const float* stored, std::int64_t count, std::int64_t dim, std::int64_t row, float* out) {
    for (std::int64_t t = 0; t < count; ++t, stored += dim, out += row) {
        std::memcpy(out, stored, static_cast<std::size_t>(dim) * sizeof(float));
        std::fill(out + dim, out + row, 0.0f);
    }
}

void widen(Element element, const void* stored, std::int64_t count, std::int64_t dim, std::int64_t row,
           float* out) {
    switch (element) {
        case Element::bf16: return widen_bf16(static_cast<const std::uint16_t*>(stored), count, dim, row, out);
        case Element::f16: return widen_fp16(static_cast<const std::uint16_t*>(stored), count, dim, row, out);
        case Element::f32: return widen_fp32(static_cast<const float*>(stored), count, dim, row, out);
    }
}

KVIST_CLONES void score(const float* query, std::int64_t group, const float* rows, std::int64_t count,
                        std::int64_t row, float* out, std::int64_t out_row) {
    for (std::int64_t g = 0; g < group; ++g, query += row, out += out_row) {
        for (std::int64_t t = 0; t < count; t += kLanes) {
            Floats products[kLanes] = {};
            for (std::int64_t d = 0; d < row; d += kLanes) {
                const Floats asked = load<Floats>(query + d);
#pragma GCC unroll 16
                for (int i = 0; i < kLanes; ++i) {
                    products[i] += asked * load<Floats>(rows + (t + i) * row + d);
                }
            }
            store<Floats>(out + t, sums_of(products));
        }
    }
}

float maximum(const float* values, std::int64_t count) {
    float highest = values[0];
    for (std::int64_t t = 1; t < count; ++t) highest = std::max(highest, values[t]);
    return highest;
}

KVIST_CLONES float exponentials(float* values, std::int64_t count, float top) {
    const std::int64_t whole = (count + kLanes - 1) / kLanes * kLanes;
    std::fill(values + count, values + whole, -std::numeric_limits<float>::infinity());
    Floats sums[kLanes] = {};
    for (std::int64_t t = 0; t < whole; t += kLanes) {
        const Floats weight = exp_of(load<Floats>(values + t) - top);
        store<Floats>(values + t, weight);
        sums[0] += weight;
    }
    return sums_of(sums)[0];
}

// `Vectors` vectors of every row at once: as many sums that do not wait for each other.
template <int Vectors>
KVIST_INLINE void accumulate_columns(const float* weights, const float* rows, std::int64_t count,
                                     std::int64_t row, float* sum) {
    Floats totals[Vectors];
    for (int i = 0; i < Vectors; ++i) totals[i] = load<Floats>(sum + i * kLanes);
    for (std::int64_t t = 0; t < count; ++t) {
#pragma GCC unroll 8
        for (int i = 0; i < Vectors; ++i) totals[i] += weights[t] * load<Floats>(rows + t * row + i * kLanes);
    }
    for (int i = 0; i < Vectors; ++i) store<Floats>(sum + i * kLanes, totals[i]);
}

KVIST_CLONES void accumulate(const float* weights, std::int64_t weight_row, std::int64_t group,
                             const float* rows, std::int64_t count, std::int64_t row, float* sum) {
    for (std::int64_t g = 0; g < group; ++g, weights += weight_row, sum += row) {
        std::int64_t d = 0;
        for (; d + 4 * kLanes <= row; d += 4 * kLanes) {
            accumulate_columns<4>(weights, rows + d, count, row, sum + d);
        }
        for (; d < row; d += kLanes) accumulate_columns<1>(weights, rows + d, count, row, sum + d);
    }
}

}  // namespace kvist
