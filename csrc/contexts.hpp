// The contexts of one step as tiles: checked once, then read by every layer.
#pragma once

#include <cstdint>
#include <vector>

#include "isa.hpp"
#include "tensor.hpp"

namespace kvist {

// A decode splits every context after so many tiles, which is 256 tokens: a fixed number, never one
// that follows from the batch or the threads.
constexpr std::int64_t kSplitTiles = 16;

// Steps of a prefill begin at multiples of this, see prefill.hpp.
constexpr std::int64_t kStepTiles = 16;

class Contexts {
  public:
    struct Split {
        std::int64_t sequence, begin, end;  // tiles
    };

    // block_tables int32 [R, B], seq_lens int32 [R], query_start int32 [R + 1]. The first
    // `num_decodes` sequences have one query token each. window: positions a query sees; 0: all.
    static Contexts of_tables(nb::handle block_tables, nb::handle seq_lens, nb::handle query_start,
                              std::int64_t num_decodes, std::int64_t block_size, std::int64_t window);

    // runs int32 [M, 4] of (block id, first slot, count, position), those of sequence r from
    // run_start[r] on (int32 [R + 1]), positions ascending; tokens between them are not attended.
    static Contexts of_runs(nb::handle runs, nb::handle run_start, nb::handle seq_lens, nb::handle query_start,
                            std::int64_t num_decodes, std::int64_t block_size, std::int64_t window);

    std::int64_t sequences() const { return static_cast<std::int64_t>(first_.size()) - 1; }
    std::int64_t queries(std::int64_t r) const { return query_start_[r + 1] - query_start_[r]; }
    std::int64_t query_start(std::int64_t r) const { return query_start_[r]; }
    std::int64_t position(std::int64_t r) const { return position_[r]; }  // of its first query token
    std::int64_t tokens() const { return query_start_.back(); }
    std::int64_t num_decodes() const { return num_decodes_; }
    std::int64_t block_size() const { return block_size_; }
    std::int64_t window() const { return window_; }
    // Whether nobody reads the block in which another's context ends: then a step of decodes alone may write
    // each token when it is read.
    bool ends_apart() const { return ends_apart_; }
    // Blocks that a pool must have.
    std::int64_t blocks() const { return blocks_; }

    const Tile* tiles() const { return tiles_.data(); }
    std::int64_t first(std::int64_t r) const { return first_[r]; }
    const std::vector<Split>& splits() const { return splits_; }
    std::int64_t first_split(std::int64_t r) const { return first_split_[r]; }

  private:
    Contexts(const char* operation, nb::handle seq_lens, nb::handle query_start, std::int64_t num_decodes,
             std::int64_t block_size, std::int64_t window);

    void add_run(std::int64_t r, std::int32_t block, std::int64_t slot, std::int64_t count, std::int64_t position);
    void end_sequence(std::int64_t r);
    void look_at_ends();

    std::int64_t num_decodes_, block_size_, window_, blocks_ = 0;
    bool ends_apart_ = false;
    std::vector<std::int64_t> lengths_, query_start_, position_;
    std::vector<Tile> tiles_;
    std::vector<std::int64_t> first_ = {0};
    std::vector<Split> splits_;
    std::vector<std::int64_t> first_split_ = {0};
};

}  // namespace kvist
