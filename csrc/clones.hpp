// Loops compiled for several processors, one of which is chosen when the library is loaded, and memory
// for them.
#pragma once

#include <cstdint>

#include "held.hpp"

#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define KVIST_VERSIONS __attribute__((noinline, target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define KVIST_VERSIONS __attribute__((noinline))
#endif

namespace kvist {

// fp32 memory on a cache line's boundary, not initialised.
struct FloatBuffer {
    explicit FloatBuffer(std::int64_t count)
        : bytes(count * static_cast<std::int64_t>(sizeof(float))), data(static_cast<float*>(hold(bytes))) {}
    ~FloatBuffer() { let_go(data, bytes); }
    FloatBuffer(const FloatBuffer&) = delete;
    FloatBuffer& operator=(const FloatBuffer&) = delete;
    const std::int64_t bytes;
    float* const data;
};

}  // namespace kvist
