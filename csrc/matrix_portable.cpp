// Products for any processor and for fp32: weights widened to fp32 sixteen lanes at a time.
#include <algorithm>
#include <cstring>

#include "clones.hpp"
#include "matrix.hpp"
#include "scalar.hpp"

// Vectors never cross a call that is not inlined, so their calling convention is of no account.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

namespace kvist {
namespace {

typedef float Floats __attribute__((vector_size(64)));
typedef std::uint32_t Words __attribute__((vector_size(64)));
typedef std::int32_t Ints __attribute__((vector_size(64)));
typedef std::uint16_t Halves __attribute__((vector_size(32)));

template <typename Vector>
KVIST_ALWAYS Vector load(const void* from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof(Vector));
    return vector;
}

KVIST_ALWAYS Floats floats_of(const Words& bits) { return reinterpret_cast<Floats>(bits); }

KVIST_ALWAYS Floats from_halves(const Halves& stored) {
    const Words word = __builtin_convertvector(stored, Words);
    const Words magnitude = reinterpret_cast<Words>(floats_of((word & 0x7fffu) << 13) * 0x1p112f);
    return floats_of(magnitude | ((word & 0x8000u) << 16));
}

// sum[r] += x[r] * w for both halves of a panel.
template <int R>
KVIST_ALWAYS void add(Floats (&sum)[R][2], const float* x, std::int64_t stride, std::int64_t k, const Floats& low,
                      const Floats& high) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        sum[r][0] += x[r * stride + k] * low;
        sum[r][1] += x[r * stride + k] * high;
    }
}

template <int R>
KVIST_ALWAYS void sum_f32(const char* panel, const float* x, std::int64_t stride, std::int64_t inputs,
                          Floats (&sum)[R][2]) {
    for (std::int64_t k = 0; k < inputs; ++k) {
        add<R>(sum, x, stride, k, load<Floats>(panel + k * 128), load<Floats>(panel + k * 128 + 64));
    }
}

template <int R>
KVIST_ALWAYS void sum_bf16(const char* panel, const float* x, std::int64_t stride, std::int64_t inputs,
                           Floats (&sum)[R][2]) {
    for (std::int64_t k = 0; k < inputs; k += 2) {
        const Words low = load<Words>(panel + k * 64), high = load<Words>(panel + k * 64 + 64);
        add<R>(sum, x, stride, k, floats_of(low << 16), floats_of(high << 16));
        add<R>(sum, x, stride, k + 1, floats_of(low & 0xffff0000u), floats_of(high & 0xffff0000u));
    }
}

template <int R>
KVIST_ALWAYS void sum_i8(const char* panel, const float* x, std::int64_t stride, std::int64_t inputs,
                         Floats (&sum)[R][2]) {
    for (std::int64_t k = 0; k < inputs; k += 4) {
        const Ints low = load<Ints>(panel + k * 32), high = load<Ints>(panel + k * 32 + 64);
        const auto level = [](const Ints& four, int j) {
            return __builtin_convertvector((four << (24 - 8 * j)) >> 24, Floats);
        };
        for (int j = 0; j < 4; ++j) add<R>(sum, x, stride, k + j, level(low, j), level(high, j));
    }
}

template <int R>
KVIST_ALWAYS void sum_i4(const char* panel, const float* x, std::int64_t stride, std::int64_t inputs,
                         Floats (&sum)[R][2]) {
    for (std::int64_t first = 0; first < inputs; first += kGroup, panel += kGroupBytes) {
        Floats part[R][2] = {};
        for (std::int64_t pair = 0; pair < kGroup / 2; ++pair) {
            const char* const words = panel + pair / 4 * 128;
            const Words low = load<Words>(words) >> (pair % 4 * 4), high = load<Words>(words + 64) >> (pair % 4 * 4);
            const auto level = [](const Words& word) {
                return __builtin_convertvector(reinterpret_cast<Ints>(word & 15u), Floats);
            };
            add<R>(part, x, stride, first + 2 * pair, level(low), level(high));
            add<R>(part, x, stride, first + 2 * pair + 1, level(low >> 16), level(high >> 16));
        }
        for (int r = 0; r < R; ++r) {
            float total = 0.0f;
            for (std::int64_t k = 0; k < kGroup; ++k) total += x[r * stride + first + k];
            for (int half = 0; half < 2; ++half) {
                const Floats scale = from_halves(load<Halves>(panel + 512 + half * 32));
                const Floats least = from_halves(load<Halves>(panel + 576 + half * 32));
                sum[r][half] += part[r][half] * scale + total * least;
            }
        }
    }
}

#define KVIST_SUMS(name, rows, kind)                                                                              \
    KVIST_VERSIONS void name(const char* panel, const float* x, std::int64_t stride, std::int64_t inputs,           \
                           float* sums) {                                                                         \
        Floats sum[rows][2] = {};                                                                                 \
        kind<rows>(panel, x, stride, inputs, sum);                                                                \
        std::memcpy(sums, sum, sizeof(sum));                                                                      \
    }

KVIST_SUMS(four_f32, 4, sum_f32)
KVIST_SUMS(one_f32, 1, sum_f32)
KVIST_SUMS(four_bf16, 4, sum_bf16)
KVIST_SUMS(one_bf16, 1, sum_bf16)
KVIST_SUMS(four_i8, 4, sum_i8)
KVIST_SUMS(one_i8, 1, sum_i8)
KVIST_SUMS(four_i4, 4, sum_i4)
KVIST_SUMS(one_i4, 1, sum_i4)

using Sums = void (*)(const char*, const float*, std::int64_t, std::int64_t, float*);

Sums four_rows(Weights weights) {
    switch (weights) {
        case Weights::f32: return &four_f32;
        case Weights::bf16: return &four_bf16;
        case Weights::i8: return &four_i8;
        case Weights::i4: return &four_i4;
    }
    return nullptr;
}

Sums one_row(Weights weights) {
    switch (weights) {
        case Weights::f32: return &one_f32;
        case Weights::bf16: return &one_bf16;
        case Weights::i8: return &one_i8;
        case Weights::i4: return &one_i4;
    }
    return nullptr;
}

void scale_sums(const float* scale, std::int64_t count, float* sums) {
    for (std::int64_t r = 0; r < count; ++r, sums += kPanel) {
        for (std::int64_t n = 0; n < kPanel; ++n) sums[n] *= scale[n];
    }
}

}  // namespace

void multiply_portable(const Matrix& matrix, const Input& rows, std::int64_t first, std::int64_t last,
                       const Sink& sink) {
    const Sums four = four_rows(matrix.weights), one = one_row(matrix.weights);
    const bool widened = rows.element == Element::bf16;
    const FloatBuffer copy(widened ? rows.count * matrix.inputs : 0);
    const float* x = static_cast<const float*>(rows.data);
    std::int64_t stride = rows.stride;
    if (widened) {
        const auto* const halves = static_cast<const std::uint16_t*>(rows.data);
        for (std::int64_t r = 0; r < rows.count; ++r) {
            for (std::int64_t k = 0; k < matrix.inputs; ++k) {
                copy.data[r * matrix.inputs + k] = from_bf16(halves[r * rows.stride + k]);
            }
        }
        x = copy.data;
        stride = matrix.inputs;
    }
    alignas(64) float sums[kSumRows * kPanel];
    for (std::int64_t panel = first; panel < last; ++panel) {
        const char* const weights = matrix.panel(panel);
        for (std::int64_t row = 0; row < rows.count; row += kSumRows) {
            const std::int64_t count = std::min(kSumRows, rows.count - row);
            std::int64_t r = 0;
            for (; r + 4 <= count; r += 4) four(weights, x + (row + r) * stride, stride, matrix.inputs, sums + r * kPanel);
            for (; r < count; ++r) one(weights, x + (row + r) * stride, stride, matrix.inputs, sums + r * kPanel);
            if (matrix.weights == Weights::i8) scale_sums(matrix.scale(panel), count, sums);
            add_bias(matrix, panel, count, sums);
            sink.take(row, count, panel, sums);
        }
    }
}

}  // namespace kvist
