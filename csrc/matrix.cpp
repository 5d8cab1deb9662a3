// Which kernel multiplies, how threads share a product, and the way into and out of the packing.
#include "matrix.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "clones.hpp"
#include "fixed.hpp"
#include "isa.hpp"
#include "scalar.hpp"
#include "threads.hpp"

namespace kvist {
namespace {

// Input that stay in a core's cache while the panels of a thread pass by.
constexpr std::int64_t kBlockRows = 256;

// Fewer rows than this leave most of a tile empty.
constexpr std::int64_t kLeastTileRows = 4;

enum class Path { portable, dots, tiles };

Path best_path() {
    switch (chosen_isa()) {
        case Isa::amx: return Path::tiles;
        case Isa::avx512bf16: return Path::dots;
        default: return Path::portable;
    }
}

Path path_for(std::int64_t rows, bool alone) {
    static const Path best = best_path();
    return best == Path::tiles && (alone || rows < kLeastTileRows) ? Path::dots : best;
}

float half_to_float(std::uint16_t half) {
    const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
    const float magnitude = float_of(static_cast<std::uint32_t>(half & 0x7fffu) << 13) * 0x1p112f;
    return float_of(bits_of(magnitude) | sign);
}

// Finite numbers within fp16's range, to the nearest, ties to even.
std::uint16_t float_to_half(float value) {
    const std::uint32_t sign = (bits_of(value) >> 16) & 0x8000u;
    const float magnitude = std::fabs(value);
    if (magnitude < 0x1p-14f) {  // subnormal: the unit is 2^-24
        return static_cast<std::uint16_t>(sign | static_cast<std::uint32_t>(std::nearbyint(magnitude * 0x1p24f)));
    }
    const std::uint32_t bits = bits_of(magnitude) - (112u << 23);
    return static_cast<std::uint16_t>(sign | ((bits + 0xfffu + ((bits >> 13) & 1u)) >> 13));
}

struct Group {
    float scale, least;
    std::uint8_t nibbles[kGroup];
    double error;
};

void choose_nibbles(const float* weights, Group& group) {
    const float inverse = group.scale > 0.0f ? 1.0f / group.scale : 0.0f;
    group.error = 0.0;
    for (std::int64_t k = 0; k < kGroup; ++k) {
        const float level = std::nearbyint((weights[k] - group.least) * inverse);
        group.nibbles[k] = static_cast<std::uint8_t>(std::clamp(level, 0.0f, 15.0f));
        const double off = double(weights[k]) - (double(group.nibbles[k]) * group.scale + group.least);
        group.error += off * off;
    }
}

// Sixteen levels from the least to the greatest weight; then the line that fits the chosen levels
// best, if that is nearer. Weights that come from such a form are found again.
Group quantize_group(const float* weights) {
    const auto [low, high] = std::minmax_element(weights, weights + kGroup);
    Group best{};
    best.least = half_to_float(float_to_half(*low));
    best.scale = half_to_float(float_to_half((*high - *low) / 15.0f));
    choose_nibbles(weights, best);
    double n = 0, nn = 0, w = 0, nw = 0;
    for (std::int64_t k = 0; k < kGroup; ++k) {
        const double level = best.nibbles[k];
        n += level, nn += level * level, w += weights[k], nw += level * weights[k];
    }
    const double spread = kGroup * nn - n * n;
    if (spread > 0.0) {
        Group fitted{};
        const double slope = (kGroup * nw - n * w) / spread;
        fitted.scale = half_to_float(float_to_half(static_cast<float>(slope)));
        fitted.least = half_to_float(float_to_half(static_cast<float>((w - slope * n) / kGroup)));
        choose_nibbles(weights, fitted);
        if (fitted.error < best.error) best = fitted;
    }
    return best;
}

char* group_of(char* panel, std::int64_t group) { return panel + group * kGroupBytes; }

// Byte and shift of input `k` of a group under output `n` of a panel.
std::int64_t word_of(std::int64_t n, std::int64_t k) {
    const std::int64_t pair = k / 2, row = pair / 4;
    return ((row * 2 + n / 16) * 32 + n % 16 * 2 + k % 2) * 2;
}

void put_group(const Group& group, std::int64_t n, char* packed) {
    for (std::int64_t k = 0; k < kGroup; ++k) {
        char* const at = packed + word_of(n, k);
        std::uint16_t word;
        std::memcpy(&word, at, 2);
        word = static_cast<std::uint16_t>(word | group.nibbles[k] << (k / 2 % 4 * 4));
        std::memcpy(at, &word, 2);
    }
    const std::uint16_t scale = float_to_half(group.scale), least = float_to_half(group.least);
    std::memcpy(packed + 512 + n * 2, &scale, 2);
    std::memcpy(packed + 576 + n * 2, &least, 2);
}

// Byte of input `k` under output `n` of a panel of int8.
std::int64_t level_of(std::int64_t n, std::int64_t k) { return (k / 4 * kPanel + n) * 4 + k % 4; }

// Whether a form that rounds has a place for all of these weights: int4's scales and minima are fp16.
bool holds(Weights weights, const float* row, std::int64_t inputs) {
    const float most = weights == Weights::i4 ? 65504.0f : std::numeric_limits<float>::max();
    if (weights != Weights::i4 && weights != Weights::i8) return true;
    return std::all_of(row, row + inputs, [most](float weight) { return std::fabs(weight) <= most; });
}

void pack_output(const Matrix& matrix, const float* row, std::int64_t n, char* panel) {
    const std::int64_t inputs = matrix.inputs;
    switch (matrix.weights) {
        case Weights::f32: {
            for (std::int64_t k = 0; k < inputs; ++k) std::memcpy(panel + (k * kPanel + n) * 4, row + k, 4);
            return;
        }
        case Weights::bf16: {
            auto* const out = reinterpret_cast<std::uint16_t*>(panel);
            for (std::int64_t k = 0; k < inputs; ++k) out[(k / 2 * kPanel + n) * 2 + k % 2] = to_bf16(row[k]);
            return;
        }
        case Weights::i8: {
            float most = 0.0f;
            for (std::int64_t k = 0; k < inputs; ++k) most = std::max(most, std::fabs(row[k]));
            // Of weights so small that the other is no number, nothing is left.
            const float scale = most / 127.0f, inverse = scale > 1e-37f ? 127.0f / most : 0.0f;
            std::int32_t total = 0;
            for (std::int64_t k = 0; k < inputs; ++k) {
                const float level = std::clamp(std::nearbyint(row[k] * inverse), -127.0f, 127.0f);
                panel[level_of(n, k)] = static_cast<char>(static_cast<std::int8_t>(level));
                total += static_cast<std::int32_t>(level);
            }
            std::memcpy(panel + matrix.level_bytes() + n * 4, &scale, 4);
            std::memcpy(panel + matrix.level_bytes() + (kPanel + n) * 4, &total, 4);
            return;
        }
        case Weights::i4: {
            for (std::int64_t g = 0; g < inputs / kGroup; ++g) {
                put_group(quantize_group(row + g * kGroup), n, group_of(panel, g));
            }
            return;
        }
    }
}

}  // namespace

bool pack_panel(Weights weights, Element element, const void* source, std::int64_t row_stride,
                std::int64_t outputs, std::int64_t inputs, std::int64_t panel, char* packed) {
    const Matrix shape{weights, inputs, outputs, packed, nullptr};
    char* const into = packed + panel * shape.panel_bytes();
    std::memset(into, 0, static_cast<std::size_t>(shape.panel_bytes()));
    std::string memory(static_cast<std::size_t>(inputs) * sizeof(float), '\0');
    auto* const row = reinterpret_cast<float*>(memory.data());
    const std::int64_t first = panel * kPanel, last = std::min(outputs, first + kPanel);
    for (std::int64_t n = first; n < last; ++n) {
        const char* const stored = static_cast<const char*>(source) + n * row_stride * element_bytes(element);
        if (element == Element::f32) {
            std::memcpy(row, stored, static_cast<std::size_t>(inputs) * sizeof(float));
        } else {
            const auto* const halves = reinterpret_cast<const std::uint16_t*>(stored);
            for (std::int64_t k = 0; k < inputs; ++k) row[k] = from_bf16(halves[k]);
        }
        if (!holds(weights, row, inputs)) return false;
        pack_output(shape, row, n - first, into);
    }
    return true;
}

void unpack_output(const Matrix& matrix, std::int64_t output, float* out) {
    const char* const panel = matrix.panel(output / kPanel);
    const std::int64_t n = output % kPanel;
    switch (matrix.weights) {
        case Weights::f32:
            for (std::int64_t k = 0; k < matrix.inputs; ++k) std::memcpy(out + k, panel + (k * kPanel + n) * 4, 4);
            return;
        case Weights::bf16:
            for (std::int64_t k = 0; k < matrix.inputs; ++k) {
                out[k] = from_bf16(reinterpret_cast<const std::uint16_t*>(panel)[(k / 2 * kPanel + n) * 2 + k % 2]);
            }
            return;
        case Weights::i8:
            for (std::int64_t k = 0; k < matrix.inputs; ++k) {
                const auto level = static_cast<std::int8_t>(panel[level_of(n, k)]);
                out[k] = static_cast<float>(level) * matrix.scale(output / kPanel)[n];
            }
            return;
        case Weights::i4:
            for (std::int64_t k = 0; k < matrix.inputs; ++k) {
                const char* const group = panel + k / kGroup * kGroupBytes;
                std::uint16_t word, scale, least;
                std::memcpy(&word, group + word_of(n, k % kGroup), 2);
                std::memcpy(&scale, group + 512 + n * 2, 2);
                std::memcpy(&least, group + 576 + n * 2, 2);
                const int level = word >> (k % kGroup / 2 % 4 * 4) & 15;
                out[k] = static_cast<float>(level) * half_to_float(scale) + half_to_float(least);
            }
            return;
    }
}

void add_bias(const Matrix& matrix, std::int64_t panel, std::int64_t count, float* sums) {
    if (matrix.bias == nullptr) return;
    const std::int64_t valid = std::min(kPanel, matrix.outputs - panel * kPanel);
    const float* const bias = matrix.bias + panel * kPanel;
    for (std::int64_t r = 0; r < count; ++r) {
        for (std::int64_t n = 0; n < valid; ++n) sums[r * kPanel + n] += bias[n];
    }
}

void multiply(const Matrix& matrix, const Input& rows, std::int64_t first, std::int64_t last, bool alone,
              const Sink& sink) {
    const bool exact = rows.element == Element::f32 || matrix.weights == Weights::f32;
    const bool whole = matrix.weights == Weights::i8;
    const Path path = exact ? Path::portable : path_for(rows.count, alone && !whole);
    if (whole && path != Path::portable) {
        const FloatBuffer memory(Fixed::floats(matrix.inputs, rows.count));
        const Fixed fixed = Fixed::in(memory.data, matrix.inputs, rows.count);
        fix_rows(static_cast<const char*>(rows.data), rows.stride * 2, fixed);
        const Panels panels{matrix, first, last};
        return path == Path::tiles ? multiply_fixed_tiles(panels, fixed, nullptr, sink)
                                   : multiply_fixed_dots(panels, fixed, sink);
    }
    switch (path) {
        case Path::portable: return multiply_portable(matrix, rows, first, last, sink);
        case Path::dots: return multiply_dots(matrix, rows, first, last, sink);
        case Path::tiles: return multiply_tiles(matrix, rows, first, last, sink);
    }
}

const char* multiply_path(std::int64_t rows, bool alone) {
    switch (path_for(rows, alone)) {
        case Path::portable: return "portable";
        case Path::dots: return "dots";
        case Path::tiles: return "tiles";
    }
    return "unknown";
}

namespace {

// Passes sums of a block of rows on under their place in the whole.
struct Shifted final : Sink {
    Shifted(const Sink& sink, std::int64_t row) : inner(sink), offset(row) {}
    void take(std::int64_t row, std::int64_t count, std::int64_t panel, float* sums) const override {
        inner.take(offset + row, count, panel, sums);
    }
    const Sink& inner;
    std::int64_t offset;
};

// Of a thread. Rows are prepared again for each piece, which tells where they are many or the product is short.
std::int64_t pieces_for(std::int64_t rows) {
    constexpr std::int64_t many = 64;
    if (rows < kLeastTileRows) return 1;
    return rows <= many ? kPieces : 2;
}

}  // namespace

void multiply_share(const Matrix& matrix, const Input& rows, bool alone, const Sink& sink) {
    const std::int64_t panels = matrix.panels(), blocks = (rows.count + kBlockRows - 1) / kBlockRows;
    const std::int64_t size = piece_panels(panels, 1, pieces_for(rows.count));
    const std::int64_t pieces = (panels + size - 1) / size;
#pragma omp for schedule(dynamic) nowait
    for (std::int64_t at = 0; at < blocks * pieces; ++at) {
        const std::int64_t row = at / pieces * kBlockRows, first = at % pieces * size;
        const char* const data =
            static_cast<const char*>(rows.data) + row * rows.stride * element_bytes(rows.element);
        const Input some{data, rows.element, rows.stride, std::min(kBlockRows, rows.count - row)};
        multiply(matrix, some, first, std::min(panels, first + size), alone, Shifted(sink, row));
    }
}

std::int64_t piece_panels(std::int64_t panels, std::int64_t unit, std::int64_t pieces) {
    const std::int64_t all = unit * team_threads() * pieces;
    return (panels + all - 1) / all * unit;
}

}  // namespace kvist
