#include "contexts.hpp"

#include <algorithm>
#include <limits>

#include "check.hpp"

namespace kvist {
namespace {

// A tile counts its place within a block in sixteen bits.
constexpr std::int64_t kMostSlots = std::int64_t{1} << 20;

// Slots that a query may see among sixteen that begin at `start`.
std::uint32_t visible(std::int64_t start, std::int64_t position, std::int64_t window) {
    std::uint32_t mask = 0xffff;
    const std::int64_t last = position - start;
    if (last < kTileSlots - 1) mask &= last < 0 ? 0u : (2u << last) - 1u;
    const std::int64_t first = window > 0 ? position - window + 1 - start : 0;
    if (first > 0) mask &= first >= kTileSlots ? 0u : (0xffffu << first) & 0xffffu;
    return mask;
}

std::vector<std::int64_t> integers(const Sizes& sizes, const char* name, const Tensor& array) {
    sizes.type(name, array, Type::i32);
    sizes.contiguous(name, array, 1);
    const auto* const values = reinterpret_cast<const std::int32_t*>(array.data());
    return {values, values + array.shape(0)};
}

}  // namespace

Contexts::Contexts(const char* operation, nb::handle seq_lens, nb::handle query_start, std::int64_t num_decodes,
                   std::int64_t block_size, std::int64_t window)
    // Contexts have 32-bit lengths: what is longer than any of them cuts nothing.
    : num_decodes_(num_decodes),
      block_size_(block_size),
      window_(window > std::numeric_limits<std::int32_t>::max() ? 0 : window) {
    Sizes sizes(operation);
    const Size R = sizes.symbol("R");
    const Tensor lengths("seq_lens", seq_lens), starts("query_start", query_start);
    sizes.require(block_size >= 1 && window >= 0, "block_size, window", "must be at least 1 and 0");
    sizes.require(block_size <= kMostSlots, "block_size",
                  "is ", block_size, ", and a block has at most ", kMostSlots, " slots");
    sizes.shape("seq_lens", lengths, {R});
    sizes.shape("query_start", starts, {Size(R.value() + 1)});
    lengths_ = integers(sizes, "seq_lens", lengths);
    query_start_ = integers(sizes, "query_start", starts);
    sizes.range("num_decodes", &num_decodes, 1, 0, R.value() + 1);
    sizes.range("query_start", query_start_.data(), 1, 0, 1);
    for (std::int64_t r = 0; r < R.value(); ++r) {
        sizes.require(queries(r) >= 1 && queries(r) <= lengths_[r] && (r >= num_decodes || queries(r) == 1),
                      "query_start",
                      "gives sequence ", r, " ", queries(r), " query tokens in a context of ", lengths_[r]);
        position_.push_back(lengths_[r] - queries(r));
    }
}

void Contexts::add_run(std::int64_t r, std::int32_t block, std::int64_t slot, std::int64_t count,
                       std::int64_t position) {
    blocks_ = std::max(blocks_, std::int64_t{block} + 1);
    for (std::int64_t part = slot / kTileSlots; part * kTileSlots < slot + count; ++part) {
        const std::int64_t start = part * kTileSlots;
        const std::int64_t from = std::max(slot - start, std::int64_t{0});
        const std::int64_t to = std::min<std::int64_t>(slot + count - start, kTileSlots);
        std::uint32_t mask = (0xffffu << from) & (0xffffu >> (kTileSlots - to));
        const std::int64_t at = position + start - slot;
        // A decode's mask is complete; later queries of a prefill see more, and mask for themselves.
        const bool one = r < num_decodes_;
        mask &= visible(at, one ? position_[r] : std::numeric_limits<std::int32_t>::max(), 0);
        if (window_ > 0) mask &= visible(at, position_[r], window_) | (one ? 0u : ~visible(at, position_[r], 0));
        if (mask == 0 && one) continue;
        tiles_.push_back(Tile{block, static_cast<std::int32_t>(at), static_cast<std::uint16_t>(part),
                              static_cast<std::uint16_t>(mask)});
    }
}

void Contexts::end_sequence(std::int64_t r) {
    const auto end = static_cast<std::int64_t>(tiles_.size());
    if (r < num_decodes_) {
        for (std::int64_t begin = first_.back(); begin < end; begin += kSplitTiles) {
            splits_.push_back(Split{r, begin, std::min(begin + kSplitTiles, end)});
        }
        first_split_.push_back(static_cast<std::int64_t>(splits_.size()));
    }
    first_.push_back(end);
}

void Contexts::look_at_ends() {
    const std::int64_t count = sequences();
    if (num_decodes_ != count) return;
    std::vector<char> ends(static_cast<std::size_t>(blocks_), 0);
    for (std::int64_t r = 0; r < count; ++r) {
        if (first_[r] == first_[r + 1]) return;  // nothing of it is read
        char& end = ends[tiles_[first_[r + 1] - 1].block];
        if (end != 0) return;
        end = 1;
    }
    for (std::int64_t r = 0; r < count; ++r) {
        const std::int32_t own = tiles_[first_[r + 1] - 1].block;
        for (std::int64_t t = first_[r]; t < first_[r + 1]; ++t) {
            if (ends[tiles_[t].block] != 0 && tiles_[t].block != own) return;
        }
    }
    ends_apart_ = true;
}

Contexts Contexts::of_tables(nb::handle block_tables, nb::handle seq_lens, nb::handle query_start,
                             std::int64_t num_decodes, std::int64_t block_size, std::int64_t window) {
    Contexts contexts("contexts", seq_lens, query_start, num_decodes, block_size, window);
    Sizes sizes("contexts");
    const auto count = static_cast<std::int64_t>(contexts.lengths_.size());
    const Tensor tables("block_tables", block_tables);
    sizes.shape("block_tables", tables, {Size(count), Size::any()});
    sizes.type("block_tables", tables, Type::i32);
    sizes.contiguous("block_tables", tables, 1);
    const std::int64_t wide = tables.shape(1);
    for (std::int64_t r = 0; r < count; ++r) {
        const std::int64_t length = contexts.lengths_[r], blocks = (length + block_size - 1) / block_size;
        sizes.require(blocks <= wide, "block_tables", "has ", wide, " columns, but sequence ", r, " needs ", blocks);
        const auto* const table = reinterpret_cast<const std::int32_t*>(tables.data()) + r * tables.stride(0);
        sizes.range("block_tables", table, blocks, 0, std::numeric_limits<std::int32_t>::max());
        // Blocks before the window are left out, for a prefill in whole steps: where its steps begin
        // must not depend on where the prompt was cut.
        std::int64_t begin = window > 0 ? std::max<std::int64_t>(contexts.position_[r] - window + 1, 0) : 0;
        if (r >= num_decodes) begin = begin / (kStepTiles * kTileSlots) * (kStepTiles * kTileSlots);
        // Tiles count within blocks, so whole steps are whole blocks only where the sizes agree.
        if (r >= num_decodes && (kStepTiles * kTileSlots) % block_size != 0) begin = 0;
        for (std::int64_t b = begin / block_size; b < blocks; ++b) {
            contexts.add_run(r, table[b], 0, std::min(block_size, length - b * block_size), b * block_size);
        }
        contexts.end_sequence(r);
    }
    contexts.look_at_ends();
    return contexts;
}

Contexts Contexts::of_runs(nb::handle runs, nb::handle run_start, nb::handle seq_lens, nb::handle query_start,
                           std::int64_t num_decodes, std::int64_t block_size, std::int64_t window) {
    Contexts contexts("contexts", seq_lens, query_start, num_decodes, block_size, window);
    Sizes sizes("contexts");
    const auto count = static_cast<std::int64_t>(contexts.lengths_.size());
    const Tensor rows("runs", runs), starts("run_start", run_start);
    sizes.shape("runs", rows, {Size::any(), Size(4)});
    sizes.type("runs", rows, Type::i32);
    sizes.contiguous("runs", rows, 2);
    sizes.shape("run_start", starts, {Size(count + 1)});
    const std::vector<std::int64_t> begin = integers(sizes, "run_start", starts);
    sizes.range("run_start", begin.data(), 1, 0, 1);
    sizes.range("run_start", &begin.back(), 1, rows.shape(0), rows.shape(0) + 1);
    const auto* run = reinterpret_cast<const std::int32_t*>(rows.data());
    for (std::int64_t r = 0; r < count; ++r) {
        sizes.require(begin[r] <= begin[r + 1], "run_start", "must ascend");
        std::int64_t next = 0;
        for (std::int64_t i = begin[r]; i < begin[r + 1]; ++i, run += 4) {
            const std::int64_t slot = run[1], tokens = run[2], position = run[3];
            sizes.range("runs", run, 1, 0, std::numeric_limits<std::int32_t>::max());
            sizes.require(slot >= 0 && tokens >= 1 && slot + tokens <= block_size, "runs",
                          "has ", tokens, " tokens from slot ", slot, " on in row ", i, ", outside a block of ",
                          block_size);
            sizes.require(position >= next && position + tokens <= contexts.lengths_[r], "runs",
                          "has position ", position, " in row ", i,
                          "; positions ascend and end within the context of ", contexts.lengths_[r]);
            next = position + tokens;
            contexts.add_run(r, run[0], slot, tokens, position);
        }
        contexts.end_sequence(r);
    }
    contexts.look_at_ends();
    return contexts;
}

}  // namespace kvist
