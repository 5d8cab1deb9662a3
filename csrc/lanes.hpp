// Inner loops of attention in fp32, sixteen lanes at a time, compiled for several processors.
//
// Written with the compiler's vector type, so that the order of every sum stands in the source and
// does not depend on what a vectoriser makes of a loop. Each loop is a function of its own, outside
// OpenMP regions, so that one of its versions is chosen when the library is loaded.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

#include "check.hpp"

#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define KVIST_CLONES __attribute__((noinline, target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define KVIST_CLONES __attribute__((noinline))
#endif

namespace kvist {

constexpr std::int64_t kLanes = 16;

// fp32 memory on a cache line's boundary, not initialised.
struct Buffer {
    explicit Buffer(std::int64_t count)
        : data(static_cast<float*>(::operator new(static_cast<std::size_t>(count) * sizeof(float),
                                                  std::align_val_t{64}))) {}
    ~Buffer() { ::operator delete(data, std::align_val_t{64}); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    float* const data;
};

// `count` stored rows of `dim` elements side by side -> fp32 rows of `row` elements, zeros behind dim.
void widen(Element element, const void* stored, std::int64_t count, std::int64_t dim, std::int64_t row,
           float* out);

// out[g * out_row + t] = query[g] . rows[t], each of `row` elements. Computed for whole vectors of t:
// `rows` and `out` have room up to a multiple of sixteen; what stands there does not matter.
void score(const float* query, std::int64_t group, const float* rows, std::int64_t count, std::int64_t row,
           float* out, std::int64_t out_row);

float maximum(const float* values, std::int64_t count);

// values[t] = exp(values[t] - top); returns their sum. `values` has room up to whole vectors.
float exponentials(float* values, std::int64_t count, float top);

// sum[g] += weights[g * weight_row + t] * rows[t] over t, each of `row` elements.
void accumulate(const float* weights, std::int64_t weight_row, std::int64_t group, const float* rows,
                std::int64_t count, std::int64_t row, float* sum);

}  // namespace kvist
