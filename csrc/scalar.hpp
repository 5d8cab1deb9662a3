// Numbers one at a time: rounding to bf16, exp, SiLU. Written so that a compiler makes vectors of loops over them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace kvist {

#define KVIST_ALWAYS static inline __attribute__((always_inline))

KVIST_ALWAYS std::uint32_t bits_of(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}

KVIST_ALWAYS float float_of(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

// To the nearest, ties to even; a NaN stays one.
KVIST_ALWAYS std::uint16_t to_bf16(float value) {
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

KVIST_ALWAYS float from_bf16(std::uint16_t stored) { return float_of(static_cast<std::uint32_t>(stored) << 16); }

// How activations are stored. `round` is what storing and loading again makes of a number.
struct StoredF32 {
    using type = float;
    KVIST_ALWAYS float load(float stored) { return stored; }
    KVIST_ALWAYS float store(float value) { return value; }
    KVIST_ALWAYS float round(float value) { return value; }
};

struct StoredBf16 {
    using type = std::uint16_t;
    KVIST_ALWAYS float load(std::uint16_t stored) { return from_bf16(stored); }
    KVIST_ALWAYS std::uint16_t store(float value) { return to_bf16(value); }
    KVIST_ALWAYS float round(float value) { return from_bf16(to_bf16(value)); }
};

// exp for arguments <= 0, to about one unit in the last place; 0 where the result would be subnormal.
// x = n ln 2 + r with |r| <= ln 2 / 2: a polynomial for r, n put into the exponent.
KVIST_ALWAYS float exp_below_zero(float argument) {
    const float x = argument < -87.0f ? -88.0f : argument;
    const float shifted = x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer
    const float n = shifted - 12582912.0f;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = r * (1.0f / 5040.0f) + (1.0f / 720.0f);
    p = p * r + (1.0f / 120.0f);
    p = p * r + (1.0f / 24.0f);
    p = p * r + (1.0f / 6.0f);
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    const auto exponent = static_cast<std::uint32_t>(static_cast<std::int32_t>(n)) << 23;
    return x < -87.0f ? 0.0f : float_of(bits_of(p) + exponent);
}

KVIST_ALWAYS float silu(float x) {
    const float e = exp_below_zero(x < 0.0f ? x : -x);
    return x * ((x < 0.0f ? e : 1.0f) / (1.0f + e));
}

}  // namespace kvist
