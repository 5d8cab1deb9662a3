// What a decoder layer does to one token's row beside products: norm, rotary, SiLU, residual.
//
// Rounding to bf16 happens where torch modules one after the other would round; in fp32 nowhere.
#pragma once

#include <cstdint>

#include "check.hpp"

namespace kvist {

// out = round(x / rms(x)) * weight; `stored` is the element of x, weight and out.
void rms_norm(Element stored, const void* x, const void* weight, std::int64_t count, float epsilon, void* out);

// In place, the first `rotary` of a head: x * cos + (second half negated, first half) * sin.
void rotate_row(Element stored, void* head, const void* cos, const void* sin, std::int64_t rotary);

// out[n] = sums[n], n < count.
void store_row(Element stored, const float* sums, std::int64_t count, void* out);

// residual[n] += sums[n].
void add_row(Element stored, const float* sums, std::int64_t count, void* residual);

// out[n] = silu(gate[n]) * up[n].
void silu_row(Element stored, const float* gate, const float* up, std::int64_t count, void* out);

}  // namespace kvist
