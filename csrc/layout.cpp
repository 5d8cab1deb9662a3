#include "layout.hpp"

#include <algorithm>

namespace kvist {
namespace {

constexpr std::int64_t kMostElements = std::int64_t{1} << 48;

}  // namespace

Layout::Layout(std::int64_t num_layers, std::int64_t num_kv_heads, std::int64_t key_dim, std::int64_t value_dim,
               std::int64_t block_size, const std::string& packing_id)
    : layers(num_layers),
      heads(num_kv_heads),
      key_dim(key_dim),
      value_dim(value_dim),
      block_size(block_size),
      paired(packing_id == "lhkv-2") {
    const Sizes sizes("Layout");
    sizes.require(std::min({layers, heads, key_dim, value_dim, block_size}) >= 1,
                  "num_layers, num_kv_heads, key_dim, value_dim, block_size",
                  "must be at least 1");
    // Elements of a block as a product that fits: one that wraps around would fit a small pool.
    std::int64_t elements = key_dim > kMostElements - value_dim ? kMostElements : key_dim + value_dim;
    for (const std::int64_t factor : {layers, heads, block_size}) {
        sizes.require(elements < kMostElements / factor, "num_layers, num_kv_heads, key_dim, value_dim, block_size",
                      "make a block of more elements than any memory holds");
        elements *= factor;
    }
    sizes.require(paired || packing_id == "lhkv-1", "packing_id", "is ", packing_id, ", which no kernel here reads");
    sizes.require(!paired || (block_size % 16 == 0 && key_dim % 2 == 0), "packing_id",
                  "lhkv-2 needs slots in multiples of 16 and an even key_dim, but block_size is ", block_size,
                  " and key_dim ", key_dim);
}

std::int64_t Layout::check_pool(Sizes& sizes, const Tensor& pool) const {
    const Size blocks = sizes.symbol("N");
    sizes.shape("pool", pool, {blocks, Size(block_elements())});
    sizes.contiguous("pool", pool, 2);
    const Element element = sizes.element("pool", pool);
    sizes.require(!paired || element != Element::f32, "pool", "is float32, which packing lhkv-2 does not hold");
    return blocks.value();
}

}  // namespace kvist
