// Bytes into and between blocks: write K and V of new tokens by slot, copy whole blocks.
//
// Only moves bytes: the pool, K and V have one element type, whichever of the three it is. The
// packing is "lhkv-1": a block is, for each layer, for each KV head, K [S, Dk] and then V [S, Dv].
#include <cstdint>
#include <cstring>
#include <unordered_set>

#include "check.hpp"

namespace nb = nanobind;

namespace {

using kvist::Size;
using kvist::Sizes;

using Tensor = nb::ndarray<nb::device::cpu>;
using ConstTensor = nb::ndarray<nb::ro, nb::device::cpu>;
using Indices = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Below this, waking the threads costs more than the copy.
constexpr std::int64_t kParallelBytes = 256 << 10;

void write_kv(const Tensor& pool, const ConstTensor& key, const ConstTensor& value, const Indices& slots,
              std::int64_t layer, std::int64_t num_layers, std::int64_t block_size) {
    Sizes sizes("write_kv");
    const Size N = sizes.symbol("N"), T = sizes.symbol("T"), H = sizes.symbol("H");
    const Size Dk = sizes.symbol("Dk"), Dv = sizes.symbol("Dv");
    sizes.shape("slots", slots, {T});
    sizes.shape("key", key, {T, H, Dk});
    sizes.shape("value", value, {T, H, Dv});
    sizes.require(num_layers >= 1 && block_size >= 1, "num_layers, block_size", "must be at least 1");
    sizes.range("layer", &layer, 1, 0, num_layers);
    const std::int64_t heads = H.value(), key_dim = Dk.value(), value_dim = Dv.value(), tokens = T.value();
    const std::int64_t head_elements = block_size * (key_dim + value_dim);
    const std::int64_t block_elements = num_layers * heads * head_elements;
    sizes.shape("pool", pool, {N, Size(block_elements)});
    sizes.contiguous("pool", pool, 2);
    sizes.contiguous("key", key, 1);
    sizes.contiguous("value", value, 1);
    const kvist::Element element = sizes.element("pool", pool);
    sizes.same_element("key", key, element);
    sizes.same_element("value", value, element);
    sizes.range("slots", slots.data(), tokens, 0, N.value() * block_size);

    const std::int64_t bytes = kvist::element_bytes(element);
    auto* const base = static_cast<char*>(pool.data());
    const auto* const keys = static_cast<const char*>(key.data());
    const auto* const values = static_cast<const char*>(value.data());
    const std::int64_t* const slot_of = slots.data();
    const std::int64_t key_token = key.stride(0) * bytes, key_head = key.stride(1) * bytes;
    const std::int64_t value_token = value.stride(0) * bytes, value_head = value.stride(1) * bytes;
    const auto key_bytes = static_cast<std::size_t>(key_dim * bytes);
    const auto value_bytes = static_cast<std::size_t>(value_dim * bytes);
    const std::int64_t total = tokens * heads * (key_dim + value_dim) * bytes;

    nb::gil_scoped_release release;
#pragma omp parallel for schedule(static) if (total >= kParallelBytes)
    for (std::int64_t t = 0; t < tokens; ++t) {
        const std::int64_t block = slot_of[t] / block_size, slot = slot_of[t] % block_size;
        char* head = base + (block * block_elements + layer * heads * head_elements) * bytes;
        for (std::int64_t h = 0; h < heads; ++h, head += head_elements * bytes) {
            std::memcpy(head + slot * key_dim * bytes, keys + t * key_token + h * key_head, key_bytes);
            std::memcpy(head + (block_size * key_dim + slot * value_dim) * bytes,
                        values + t * value_token + h * value_head, value_bytes);
        }
    }
}

void copy_blocks(const Tensor& pool, const Indices& src, const Indices& dst) {
    Sizes sizes("copy_blocks");
    const Size N = sizes.symbol("N"), E = sizes.symbol("block elements"), n = sizes.symbol("n");
    sizes.shape("pool", pool, {N, E});
    sizes.contiguous("pool", pool, 2);
    sizes.shape("src", src, {n});
    sizes.shape("dst", dst, {n});
    const std::int64_t count = n.value();
    sizes.range("src", src.data(), count, 0, N.value());
    sizes.range("dst", dst.data(), count, 0, N.value());
    std::unordered_set<std::int64_t> written;
    for (std::int64_t i = 0; i < count; ++i) {
        sizes.require(written.insert(dst.data()[i]).second, "dst",
                      "names block " + std::to_string(dst.data()[i]) + " twice; write each block once");
    }
    for (std::int64_t i = 0; i < count; ++i) {
        sizes.require(written.count(src.data()[i]) == 0, "src",
                      "names block " + std::to_string(src.data()[i]) +
                          ", which dst writes too; copy in two calls");
    }
    const std::int64_t bytes = E.value() * kvist::element_bytes(sizes.element("pool", pool));
    auto* const base = static_cast<char*>(pool.data());
    const std::int64_t *const from = src.data(), *const to = dst.data();

    nb::gil_scoped_release release;
#pragma omp parallel for schedule(static) if (count * bytes >= kParallelBytes)
    for (std::int64_t i = 0; i < count; ++i) {
        std::memcpy(base + to[i] * bytes, base + from[i] * bytes, static_cast<std::size_t>(bytes));
    }
}

}  // namespace

void bind_blocks(nb::module_& module) {
    module.def("write_kv", &write_kv, nb::arg("pool").noconvert(), nb::arg("key").noconvert(),
               nb::arg("value").noconvert(), nb::arg("slots").noconvert(), nb::arg("layer"),
               nb::arg("num_layers"), nb::arg("block_size"),
               "Write key [T, H, Dk] and value [T, H, Dv] (rows contiguous, dtype of the pool) into the slots "
               "(int64 [T], block * S + slot, all different) of one layer of pool [N, block elements].");
    module.def("copy_blocks", &copy_blocks, nb::arg("pool").noconvert(), nb::arg("src").noconvert(),
               nb::arg("dst").noconvert(),
               "pool[dst[i]] = pool[src[i]] for int64 [n] block ids; no block is written twice or both read and "
               "written.");
}
