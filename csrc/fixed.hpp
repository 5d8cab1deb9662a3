// bf16 rows as whole numbers, for products with int8 weights.
//
//     x = scale * (256 * high + low - 32768)        two bytes without a sign; one scale a row
//
// Levels of weights times bytes add up exactly in 32 bits, in any order: no row's sums depend on the rows
// beside it or on the instructions that were used. What an x loses is at most 2^-16 of its row's
// greatest: less than that one lost when it became bf16.
//
//     rows [count][inputs]  ->  [count / 16][inputs / 64][high, low][16][64]
#pragma once

#include "matrix.hpp"

namespace kvist {

constexpr std::int64_t kFixedInputs = 65536;  // more of them could add up to more than 32 bits hold

struct Fixed {
    std::uint8_t* data;
    float* scale;  // [count], rounded up to kTile
    std::int64_t inputs, count;

    static std::int64_t steps(std::int64_t inputs) { return (inputs + 63) / 64; }
    static std::int64_t padded(std::int64_t count) { return (count + kTile - 1) / kTile * kTile; }
    // Room for such rows and where they lie in it.
    static std::int64_t floats(std::int64_t inputs, std::int64_t count) {
        return padded(count) * (steps(inputs) * 32 + 1);
    }
    static Fixed in(float* room, std::int64_t inputs, std::int64_t count) {
        float* const behind = room + padded(count) * steps(inputs) * 32;
        return Fixed{reinterpret_cast<std::uint8_t*>(room), behind, inputs, count};
    }
    // High bytes of sixteen rows' inputs [64 * step, 64 * step + 64); the low ones are 1024 further.
    std::uint8_t* at(std::int64_t row, std::int64_t step) const {
        return data + (row / kTile * steps(inputs) + step) * 2048 + row % kTile * 64;
    }
};

// One row, and rows `stride_bytes` apart.
void fix_row(const char* row, std::int64_t number, const Fixed& fixed);
void fix_rows(const char* rows, std::int64_t stride_bytes, const Fixed& fixed);

// Panels of int8 times such rows; with tiles, memory from `then` on is fetched meanwhile.
void multiply_fixed_dots(const Panels& panels, const Fixed& rows, const Sink& sink);
void multiply_fixed_tiles(const Panels& panels, const Fixed& rows, const char* then, const Sink& sink);

}  // namespace kvist
