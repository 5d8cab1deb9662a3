// Many rows through what stands between two attentions, as the matrix unit takes them.
//
//     rows [count][inputs]  ->  tiled [count / 16][inputs / 32][16][32] bf16
//
// A block of many rows goes through a whole layer on one thread: what one product leaves, the next finds
// in that core's second cache, and nobody waits for anybody. Few rows are shared out by panels. Only
// bf16, only where `multiply_path` says "tiles". Rounds where rows.hpp rounds.
#pragma once

#include <cstdint>

#include "matrix.hpp"

namespace kvist {

// Rows in tiles, up to a whole number of kTile; what lies behind the last row does not matter, since the
// sums of each row are its own.
struct Tiled {
    char* data;
    std::int64_t inputs, count;

    std::int64_t padded() const { return (count + kTile - 1) / kTile * kTile; }
    // Where elements [column, column + 16) of a row lie; column is a multiple of sixteen.
    char* at(std::int64_t row, std::int64_t column) const {
        return data + (row / 16 * (inputs / 32) + column / 32) * 1024 + row % 16 * 64 + column % 32 * 2;
    }
};

// Rows `stride_bytes` apart, as they are.
void tile_rows(const char* rows, std::int64_t stride_bytes, const Tiled& tiled);
// round(x / rms(x)) * weight of each.
void tile_normed(const char* rows, const void* weight, float epsilon, const Tiled& tiled);

// Panels times such rows, not of int8. `decoded` has room for a panel in bf16; memory from `then` on is what
// this thread will read next, and is fetched meanwhile.
void multiply_tiled(const Panels& panels, const Tiled& rows, char* decoded, const char* then, const Sink& sink);

// The first `rotary` of a head's `rotary` or more elements are turned, in place.
void turn_row(char* head, const char* cos, const char* sin, std::int64_t rotary);

// Sums onto rows of `width` elements.
struct AddRows final : Sink {
    AddRows(char* to, std::int64_t columns) : out(to), width(columns) {}
    void take(std::int64_t row, std::int64_t count, std::int64_t panel, float* sums) const override;
    char* out;
    std::int64_t width;
};

// Sums of a merged projection into three tensors, none of whose borders lies in a panel.
struct SplitRows final : Sink {
    SplitRows(char* first, char* second, char* third, std::int64_t first_width, std::int64_t other_width)
        : out{first, second, third}, width{first_width, other_width, other_width} {}
    void take(std::int64_t row, std::int64_t count, std::int64_t panel, float* sums) const override;
    char* out[3];
    std::int64_t width[3];
};

// silu(gate) * up of panels of sixteen gates and their sixteen ups.
struct SiluTiled final : Sink {
    explicit SiluTiled(const Tiled& to) : out(to) {}
    void take(std::int64_t row, std::int64_t count, std::int64_t panel, float* sums) const override;
    Tiled out;
};

// The same onto rows of `width` elements.
struct SiluRows final : Sink {
    SiluRows(char* to, std::int64_t columns) : out(to), width(columns) {}
    void take(std::int64_t row, std::int64_t count, std::int64_t panel, float* sums) const override;
    char* out;
    std::int64_t width;
};

}  // namespace kvist
