// Weight matrices in one packing for every number of input rows, and products with them.
//
// 32 outputs are a panel; a panel's weights lie side by side, in the order in which they are used, so
// that a thread streams through them once. Two inputs of an output are neighbours: the pair that one
// bf16 dot-product instruction or one tile row takes.
//
//     f32   panel  [K][32]                 fp32
//     bf16  panel  [K/2][32][2]            bf16
//     i8    panel  [K/4][32][4]            int8, K rounded up to 64; then fp32 scale[32] of the outputs and
//                                          int32 total[32], what the levels of each add up to
//     i4    panel  [K/32] groups of 640 bytes, each 32 inputs x 32 outputs:
//                  [4][2 halves of 16 outputs][16][2] words of four nibbles: pair 4j+i of the group in
//                  bits 4i of word row j; then fp16 scale[32], fp16 least[32]: weight = nibble * scale + least
//
// Sums are fp32. Without tiles each row's sum is added up in an order that no other row can change. bf16
// rows meet int8 weights as whole numbers, see fixed.hpp: those sums are exact in any order.
#pragma once

#include <cstdint>

#include "check.hpp"

namespace kvist {

enum class Weights { f32, bf16, i8, i4 };

constexpr std::int64_t kPanel = 32;   // outputs
constexpr std::int64_t kGroup = 32;   // inputs; K is a multiple
constexpr std::int64_t kGroupBytes = 640;
constexpr std::int64_t kSumRows = 32;  // rows of sums handed out at a time, at most
constexpr std::int64_t kTile = 16;     // rows of a tile

struct Matrix {
    Weights weights;
    std::int64_t inputs, outputs;
    const char* packed;
    const float* bias;  // [outputs] or null

    std::int64_t panels() const { return (outputs + kPanel - 1) / kPanel; }
    std::int64_t panel_bytes() const {
        switch (weights) {
            case Weights::f32: return inputs * kPanel * 4;
            case Weights::bf16: return inputs * kPanel * 2;
            case Weights::i8: return level_bytes() + kPanel * 8;
            case Weights::i4: return inputs / kGroup * kGroupBytes;
        }
        return 0;
    }
    const char* panel(std::int64_t index) const { return packed + index * panel_bytes(); }
    // Of a panel of int8: all levels, and what stands behind them.
    std::int64_t level_bytes() const { return (inputs + 63) / 64 * 64 * kPanel; }
    const float* scale(std::int64_t index) const {
        return reinterpret_cast<const float*>(panel(index) + level_bytes());
    }
    const std::int32_t* total(std::int64_t index) const {
        return reinterpret_cast<const std::int32_t*>(panel(index) + level_bytes() + kPanel * 4);
    }
};

// Panels of a matrix that one thread multiplies.
struct Panels {
    const Matrix& matrix;
    std::int64_t first, last;

    static Panels all(const Matrix& matrix) { return Panels{matrix, 0, matrix.panels()}; }
    const char* begin() const { return matrix.panel(first); }
};

// Input rows of one product, `stride` elements apart.
struct Input {
    const void* data;
    Element element;  // f32 or bf16
    std::int64_t stride, count;
};

// Where sums go. `sums` is [count][32]: of the input rows from `row` on, for the outputs of `panel`; it
// may be used up. Outputs past the matrix's last hold nothing of meaning.
struct Sink {
    virtual ~Sink() = default;
    virtual void take(std::int64_t row, std::int64_t count, std::int64_t panel, float* sums) const = 0;
};

// Panels [first, last) of `matrix` times all rows. `alone`: by the kernel whose sums of a row do not
// depend on how many rows there are. Called by each thread for its own panels.
void multiply(const Matrix& matrix, const Input& rows, std::int64_t first, std::int64_t last, bool alone,
              const Sink& sink);

// The kernels behind it; the processor must have what they need.
void multiply_portable(const Matrix& matrix, const Input& rows, std::int64_t first, std::int64_t last,
                       const Sink& sink);
void multiply_dots(const Matrix& matrix, const Input& rows, std::int64_t first, std::int64_t last, const Sink& sink);
void multiply_tiles(const Matrix& matrix, const Input& rows, std::int64_t first, std::int64_t last, const Sink& sink);

// What multiply would use for so many bf16 rows: "portable", "dots" or "tiles".
const char* multiply_path(std::int64_t rows, bool alone);

// Of a product a thread: one that shares its core with somebody else leaves some of its own to others.
constexpr std::int64_t kPieces = 6;

// How many panels a thread takes at a time, in whole units, of a product that a team shares.
std::int64_t piece_panels(std::int64_t panels, std::int64_t unit, std::int64_t pieces);

// This thread's share of a product, inside a parallel region that all threads of the team run. Returns while
// others are still at theirs.
void multiply_share(const Matrix& matrix, const Input& rows, bool alone, const Sink& sink);

// The bias of a matrix, if it has one, onto sums of its panel.
void add_bias(const Matrix& matrix, std::int64_t panel, std::int64_t count, float* sums);

// Weights [outputs, inputs] of one panel -> packed form; false if the form has no place for them.
bool pack_panel(Weights weights, Element element, const void* source, std::int64_t row_stride,
                std::int64_t outputs, std::int64_t inputs, std::int64_t panel, char* packed);

// The weights of one output, as they count in products.
void unpack_output(const Matrix& matrix, std::int64_t output, float* out);

}  // namespace kvist
