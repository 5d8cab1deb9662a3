// Where K and V of a pool lie, as the kernels are told once: kvist.spec.BlockLayout in C++.
#pragma once

#include <cstdint>
#include <string>

#include "check.hpp"

namespace kvist {

// "lhkv-1": of each layer, of each KV head: K [S, Dk], V [S, Dv].
// "lhkv-2": the same runs, inside them sixteen slots together and pairs side by side, see policy.hpp.
struct Layout {
    Layout(std::int64_t num_layers, std::int64_t num_kv_heads, std::int64_t key_dim, std::int64_t value_dim,
           std::int64_t block_size, const std::string& packing_id);

    std::int64_t head_elements() const { return block_size * (key_dim + value_dim); }
    std::int64_t layer_elements() const { return heads * head_elements(); }
    std::int64_t block_elements() const { return layers * layer_elements(); }

    // The pool is [N, block elements], contiguous, of a type that this packing holds; gives N.
    std::int64_t check_pool(Sizes& sizes, const Tensor& pool) const;
    void check_layer(const Sizes& sizes, std::int64_t layer) const { sizes.range("layer", &layer, 1, 0, layers); }

    std::int64_t layers, heads, key_dim, value_dim, block_size;
    bool paired;
};

}  // namespace kvist
