// Rotary position embedding of one head's row, its two halves turned against each other.
#pragma once

#include "isa.hpp"
#include "lanes.hpp"

namespace kvist {
namespace {

//     row   | a[rotary/2] | b[rotary/2] | rest |   ->   a cos - b sin | b cos + a sin | rest
//
// cos and sin give an angle an element of the row, as transformers makes them; both halves are read.
// In fp32, rounded once. `from` may be `to`.
static void rotate(const RotateJob& job) {
    alignas(64) float row[kMostDims], turned[kMostDims];
    const std::int64_t half = job.rotary / 2, pad = whole(job.dim, kLanes);
    widen(job.from, job.element, job.dim, row, pad);
    std::int64_t d = 0;
    for (; d + kLanes <= half; d += kLanes) {
        const Floats a = load<Floats>(row + d), b = load<Floats>(row + half + d);
        const Floats cos_a = load<Floats>(job.cos + d), cos_b = load<Floats>(job.cos + half + d);
        const Floats sin_a = load<Floats>(job.sin + d), sin_b = load<Floats>(job.sin + half + d);
        store(turned + d, a * cos_a - b * sin_a);
        store(turned + half + d, b * cos_b + a * sin_b);
    }
    for (; d < half; ++d) {
        turned[d] = row[d] * job.cos[d] - row[half + d] * job.sin[d];
        turned[half + d] = row[half + d] * job.cos[half + d] + row[d] * job.sin[half + d];
    }
    for (d = 2 * half; d < pad; ++d) turned[d] = row[d];
    narrow(turned, 1.0f, job.dim, job.to, job.element);
}

}  // namespace
}  // namespace kvist
