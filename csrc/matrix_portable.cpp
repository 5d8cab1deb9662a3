// Products for any processor and for fp32: weights widened to fp32 sixteen lanes at a time.
#include <algorithm>
#include <cstring>

#include "clones.hpp"
#include "isa.hpp"
#include "matrix.hpp"
#include "scalar.hpp"
#include "vectors.hpp"

namespace kvist {
namespace {

// Loops over a panel with registers of so many bytes. Sixteen 32-byte registers hold the sums of four rows for one
// half of a panel, which is then gone through twice.
template <int RegisterBytes>
struct Loops {
    using Floats = typename Sixteen<RegisterBytes>::Floats;
    using Ints = typename Sixteen<RegisterBytes>::Ints;
    using Words = typename Sixteen<RegisterBytes>::Words;
    using Halves = typename Sixteen<RegisterBytes>::Halves;
    static constexpr int kHalves = RegisterBytes == 64 ? 2 : 1;

    template <int R>
    using Rows = Floats[R][kHalves];

    KVIST_INLINE Floats from_halves(const Halves& stored) {
        const Words word = convert<Words>(stored);
        const Words magnitude = (Words)((Floats)((word & 0x7fffu) << 13) * 0x1p112f);
        return (Floats)(magnitude | ((word & 0x8000u) << 16));
    }

    // sum[r][half] += x[r][k] * weights
    template <int R>
    KVIST_INLINE void add(Rows<R>& sum, int half, const float* x, std::int64_t stride, std::int64_t k,
                          const Floats& weights) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sum[r][half] += x[r * stride + k] * weights;
    }

    template <int R, int First>
    KVIST_INLINE void sum_f32(const char* panel, const float* x, std::int64_t stride, std::int64_t inputs,
                              Rows<R>& sum) {
        for (std::int64_t k = 0; k < inputs; ++k) {
#pragma GCC unroll 2
            for (int h = 0; h < kHalves; ++h) {
                add<R>(sum, h, x, stride, k, load<Floats>(panel + k * 128 + (First + h) * 64));
            }
        }
    }

    template <int R, int First>
    KVIST_INLINE void sum_bf16(const char* panel, const float* x, std::int64_t stride, std::int64_t inputs,
                               Rows<R>& sum) {
        for (std::int64_t k = 0; k < inputs; k += 2) {
#pragma GCC unroll 2
            for (int h = 0; h < kHalves; ++h) {
                const Words pair = load<Words>(panel + k * 64 + (First + h) * 64);
                add<R>(sum, h, x, stride, k, (Floats)(pair << 16));
                add<R>(sum, h, x, stride, k + 1, (Floats)(pair & 0xffff0000u));
            }
        }
    }

    template <int R, int First>
    KVIST_INLINE void sum_i8(const char* panel, const float* x, std::int64_t stride, std::int64_t inputs,
                             Rows<R>& sum) {
        for (std::int64_t k = 0; k < inputs; k += 4) {
#pragma GCC unroll 2
            for (int h = 0; h < kHalves; ++h) {
                const Ints four = load<Ints>(panel + k * 32 + (First + h) * 64);
#pragma GCC unroll 4
                for (int j = 0; j < 4; ++j) {
                    add<R>(sum, h, x, stride, k + j, convert<Floats>((four << (24 - 8 * j)) >> 24));
                }
            }
        }
    }

    template <int R, int First>
    KVIST_INLINE void sum_i4(const char* panel, const float* x, std::int64_t stride, std::int64_t inputs,
                             Rows<R>& sum) {
        for (std::int64_t first = 0; first < inputs; first += kGroup, panel += kGroupBytes) {
            Rows<R> part = {};
            for (std::int64_t pair = 0; pair < kGroup / 2; ++pair) {
                const char* const words = panel + pair / 4 * 128;
                const std::int64_t k = first + 2 * pair;
#pragma GCC unroll 2
                for (int h = 0; h < kHalves; ++h) {
                    const Words word = load<Words>(words + (First + h) * 64) >> static_cast<int>(pair % 4 * 4);
                    add<R>(part, h, x, stride, k, convert<Floats>((Ints)(word & 15u)));
                    add<R>(part, h, x, stride, k + 1, convert<Floats>((Ints)((word >> 16) & 15u)));
                }
            }
            for (int r = 0; r < R; ++r) {
                float total = 0.0f;
                for (std::int64_t k = 0; k < kGroup; ++k) total += x[r * stride + first + k];
                for (int h = 0; h < kHalves; ++h) {
                    const Floats scale = from_halves(load<Halves>(panel + 512 + (First + h) * 32));
                    const Floats least = from_halves(load<Halves>(panel + 576 + (First + h) * 32));
                    sum[r][h] += part[r][h] * scale + total * least;
                }
            }
        }
    }

    template <Weights W, int R, int First>
    KVIST_INLINE void half(const char* panel, const float* x, std::int64_t stride, std::int64_t inputs, float* sums) {
        Rows<R> sum = {};
        if constexpr (W == Weights::f32) sum_f32<R, First>(panel, x, stride, inputs, sum);
        if constexpr (W == Weights::bf16) sum_bf16<R, First>(panel, x, stride, inputs, sum);
        if constexpr (W == Weights::i8) sum_i8<R, First>(panel, x, stride, inputs, sum);
        if constexpr (W == Weights::i4) sum_i4<R, First>(panel, x, stride, inputs, sum);
        for (int r = 0; r < R; ++r) {
            for (int h = 0; h < kHalves; ++h) store(sums + r * kPanel + (First + h) * kPanel / 2, sum[r][h]);
        }
    }

    template <Weights W, int R>
    KVIST_INLINE void whole(const char* panel, const float* x, std::int64_t stride, std::int64_t inputs, float* sums) {
        half<W, R, 0>(panel, x, stride, inputs, sums);
        if constexpr (kHalves == 1) half<W, R, 1>(panel, x, stride, inputs, sums);
    }
};

using Sums = void (*)(const char* panel, const float* x, std::int64_t stride, std::int64_t inputs, float* sums);

struct Products {
    Sums four, one;  // rows at a time
};

// The loops of one set of instructions, compiled for it.
#define KVIST_PRODUCTS(name, attributes, register_bytes)                                                        \
    template <Weights W, int R>                                                                                 \
    attributes void sums_##name(const char* panel, const float* x, std::int64_t stride, std::int64_t inputs,    \
                                float* sums) {                                                                  \
        Loops<register_bytes>::template whole<W, R>(panel, x, stride, inputs, sums);                            \
    }                                                                                                           \
    Products products_##name(Weights weights) {                                                                 \
        switch (weights) {                                                                                      \
            case Weights::f32: return {sums_##name<Weights::f32, 4>, sums_##name<Weights::f32, 1>};             \
            case Weights::bf16: return {sums_##name<Weights::bf16, 4>, sums_##name<Weights::bf16, 1>};          \
            case Weights::i8: return {sums_##name<Weights::i8, 4>, sums_##name<Weights::i8, 1>};                \
            case Weights::i4: return {sums_##name<Weights::i4, 4>, sums_##name<Weights::i4, 1>};                \
        }                                                                                                       \
        return {};                                                                                              \
    }

KVIST_PRODUCTS(portable, , 16)
#ifdef KVIST_X86
KVIST_PRODUCTS(avx2, __attribute__((target("arch=x86-64-v3"))), 32)
KVIST_PRODUCTS(avx512, __attribute__((target("arch=x86-64-v4,prefer-vector-width=512"))), 64)
#endif
#undef KVIST_PRODUCTS

Products products(Weights weights) {
#ifdef KVIST_X86
    static const Isa isa = chosen_isa();
    if (isa >= Isa::avx512) return products_avx512(weights);
    if (isa >= Isa::avx2) return products_avx2(weights);
#endif
    return products_portable(weights);
}

void scale_sums(const float* scale, std::int64_t count, float* sums) {
    for (std::int64_t r = 0; r < count; ++r, sums += kPanel) {
        for (std::int64_t n = 0; n < kPanel; ++n) sums[n] *= scale[n];
    }
}

}  // namespace

void multiply_portable(const Matrix& matrix, const Input& rows, std::int64_t first, std::int64_t last,
                       const Sink& sink) {
    const auto [four, one] = products(matrix.weights);
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
