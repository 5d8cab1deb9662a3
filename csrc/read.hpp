// Reading memory and nothing else: loops to measure bandwidth with.
#pragma once

#include "lanes.hpp"

namespace kvist {
namespace {

template <int Streams, bool Ahead>
static void read_streams(const char* data, std::int64_t bytes) {
    constexpr std::int64_t kLine = 64, kFar = 2048;
    const std::int64_t share = bytes / Streams / (4 * kLine) * (4 * kLine);
    Words seen[4] = {};
    for (std::int64_t at = 0; at < share; at += 4 * kLine) {
#pragma GCC unroll 4
        for (int s = 0; s < Streams; ++s) {
            const char* const from = data + s * share + at;
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                if (Ahead) __builtin_prefetch(from + kFar + i * kLine, 0, 2);
                seen[i] |= load<Words>(from + i * kLine);
            }
        }
    }
    const Words all = seen[0] | seen[1] | seen[2] | seen[3];
    // What was read counts as used, so that reading it is not left out.
    __asm__ volatile("" : : "m"(all) : "memory");
}

static void read(const char* data, std::int64_t bytes, std::int64_t streams, bool ahead) {
    if (streams == 4) return ahead ? read_streams<4, true>(data, bytes) : read_streams<4, false>(data, bytes);
    if (streams == 2) return ahead ? read_streams<2, true>(data, bytes) : read_streams<2, false>(data, bytes);
    return ahead ? read_streams<1, true>(data, bytes) : read_streams<1, false>(data, bytes);
}

}  // namespace
}  // namespace kvist
