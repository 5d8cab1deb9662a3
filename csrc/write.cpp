// Bytes into and between blocks: K and V of new tokens by slot, whole blocks.
//
// A write moves elements of 16 or 32 bits to where the packing wants them, and turns queries and keys
// to their positions on the way if asked. Tokens of one block are written by one thread.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <unordered_set>
#include <vector>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "check.hpp"
#include "fresh.hpp"
#include "isa.hpp"
#include "layout.hpp"
#include "threads.hpp"

namespace nb = nanobind;

namespace {

using namespace kvist;

// Below this, waking the threads costs more than the copy.
constexpr std::int64_t kParallelBytes = 64 << 10;

// Where the share of a thread begins, moved on to where another block begins.
std::int64_t share(const Fresh& write, std::int64_t part, std::int64_t parts) {
    std::int64_t token = write.tokens * part / parts;
    const auto block = [&](std::int64_t t) { return write.slots[t] / write.layout->block_size; };
    while (token > 0 && token < write.tokens && block(token) == block(token - 1)) ++token;
    return token;
}

// `each(token)` for all tokens, those of a block on one thread.
template <typename Each>
void share_out(const Fresh& write, std::int64_t bytes, Each each) {
#pragma omp parallel if (bytes >= kParallelBytes)
    {
        const int thread = this_thread(), team = team_threads();
        const std::int64_t end = share(write, thread + 1, team);
        for (std::int64_t t = share(write, thread, team); t < end; ++t) each(t);
    }
}

// Bytes that a write moves to and from memory. Where a token begins a block of its own, or goes on in one, its
// neighbours' cache lines come along.
std::int64_t moved_bytes(const Fresh& write) {
    const Layout& layout = *write.layout;
    const std::int64_t bytes = layout.heads * (layout.key_dim + layout.value_dim) * element_bytes(write.element);
    std::int64_t runs = 0;
    for (std::int64_t t = 0; t < write.tokens; ++t) runs += t == 0 || write.slots[t] != write.slots[t - 1] + 1;
    const std::int64_t lines = layout.paired ? layout.key_dim / 2 + layout.value_dim / 16 : 0;
    return write.tokens * bytes + runs * layout.heads * lines * 64;
}

void write_kv(nb::handle pool, const Layout& layout, std::int64_t layer, nb::handle key, nb::handle value,
              nb::handle slots) {
    Sizes sizes("write_kv");
    const Fresh write = check_fresh(sizes, pool, layout, layer, key, value, slots);

    nb::gil_scoped_release release;
    put_all(write);
}

void rotate_write_kv(nb::handle query_object, nb::handle pool, const Layout& layout, std::int64_t layer,
                     nb::handle key, nb::handle value, nb::handle slots, nb::handle cos_object,
                     nb::handle sin_object, Isa isa) {
    Sizes sizes("rotate_write_kv");
    const Fresh write = check_fresh(sizes, pool, layout, layer, key, value, slots);
    const Tensor query("query", query_object), cos("cos", cos_object), sin("sin", sin_object);
    const Size Q = sizes.symbol("Q"), rotary = sizes.symbol("rotary");
    const Size T(write.tokens);
    sizes.shape("query", query, {T, Q, Size(layout.key_dim)});
    sizes.shape("cos", cos, {T, rotary});
    sizes.shape("sin", sin, {T, rotary});
    for (const auto& [name, tensor] : {std::pair{"query", &query}, {"cos", &cos}, {"sin", &sin}}) {
        sizes.contiguous(name, *tensor, 1);
    }
    const std::int64_t turned = rotary.value();
    sizes.require(turned % 2 == 0 && turned >= 2 && turned <= layout.key_dim && layout.key_dim <= kMostDims, "cos",
                  "turns ", turned, " of ", layout.key_dim,
                  " elements of a head; it must be an even number of them, and a head has at most ", kMostDims);
    const Element query_element = sizes.element("query", query), angle = sizes.element("cos", cos);
    sizes.type("sin", sin, cos.type());
    sizes.require(supported(isa), "isa", "is ", isa_name(isa), ", which this processor does not have");
    const Kernels& kernels = kvist::kernels(isa, Arithmetic::rows);
    const std::int64_t query_bytes = element_bytes(query_element), angle_bytes = element_bytes(angle);
    const std::int64_t queries = Q.value();

    nb::gil_scoped_release release;
    const std::int64_t turned_bytes = write.tokens * queries * layout.key_dim * query_bytes;
    share_out(write, moved_bytes(write) + turned_bytes, [&](std::int64_t t) {
        alignas(64) float cosines[kMostDims], sines[kMostDims];
        alignas(64) char row[kMostDims * 4];
        kernels.widen(cos.data() + t * cos.stride(0) * angle_bytes, angle, turned, cosines);
        kernels.widen(sin.data() + t * sin.stride(0) * angle_bytes, angle, turned, sines);
        for (std::int64_t q = 0; q < queries; ++q) {
            char* const at = query.data() + (t * query.stride(0) + q * query.stride(1)) * query_bytes;
            kernels.rotate(RotateJob{at, at, query_element, layout.key_dim, turned, cosines, sines});
        }
        for (std::int64_t h = 0; h < layout.heads; ++h) {
            kernels.rotate(RotateJob{write.key + t * write.key_token + h * write.key_head, row, write.element,
                                     layout.key_dim, turned, cosines, sines});
            put(layout, write.element, head_of(write, t, h), write.slots[t] % layout.block_size, row,
                write.value + t * write.value_token + h * write.value_head);
        }
    });
}

void copy_blocks(nb::handle pool_object, nb::handle src_object, nb::handle dst_object) {
    Sizes sizes("copy_blocks");
    const Tensor pool("pool", pool_object), src("src", src_object), dst("dst", dst_object);
    const Size N = sizes.symbol("N"), E = sizes.symbol("block elements"), n = sizes.symbol("n");
    sizes.shape("pool", pool, {N, E});
    sizes.contiguous("pool", pool, 2);
    sizes.shape("src", src, {n});
    sizes.shape("dst", dst, {n});
    for (const auto& [name, tensor] : {std::pair{"src", &src}, {"dst", &dst}}) {
        sizes.type(name, *tensor, Type::i64);
        sizes.contiguous(name, *tensor, 1);
    }
    const std::int64_t count = n.value();
    const auto* const from = reinterpret_cast<const std::int64_t*>(src.data());
    const auto* const to = reinterpret_cast<const std::int64_t*>(dst.data());
    sizes.range("src", from, count, 0, N.value());
    sizes.range("dst", to, count, 0, N.value());
    std::unordered_set<std::int64_t> written;
    for (std::int64_t i = 0; i < count; ++i) {
        sizes.require(written.insert(to[i]).second, "dst", "names block ", to[i], " twice; write each block once");
    }
    for (std::int64_t i = 0; i < count; ++i) {
        sizes.require(written.count(from[i]) == 0, "src",
                      "names block ", from[i], ", which dst writes too; copy in two calls");
    }
    const std::int64_t bytes = E.value() * element_bytes(sizes.element("pool", pool));
    char* const base = pool.data();

    nb::gil_scoped_release release;
#pragma omp parallel for schedule(static) if (count * bytes >= kParallelBytes)
    for (std::int64_t i = 0; i < count; ++i) {
        std::memcpy(base + to[i] * bytes, base + from[i] * bytes, static_cast<std::size_t>(bytes));
    }
}

}  // namespace

void kvist::put_all(const Fresh& fresh) {
    share_out(fresh, moved_bytes(fresh), [&](std::int64_t t) { put_heads(fresh, t, 0, fresh.layout->heads); });
}

void bind_write(nb::module_& module) {
    nb::class_<Layout>(module, "Layout", "Where K and V of a pool lie: kvist.spec.BlockLayout for the kernels.")
        .def(nb::init<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, const std::string&>(),
             nb::arg("num_layers"), nb::arg("num_kv_heads"), nb::arg("key_dim"), nb::arg("value_dim"),
             nb::arg("block_size"), nb::arg("packing_id"));
    module.def("write_kv", &write_kv, nb::arg("pool"), nb::arg("layout"), nb::arg("layer"), nb::arg("key"),
               nb::arg("value"), nb::arg("slots"),
               "Fresh key [T, H, Dk] and value [T, H, Dv] (rows contiguous, dtype of the pool) into the slots "
               "(int64 [T], block * S + slot, all different) of one layer of pool [N, block elements].");
    module.def("rotate_write_kv", &rotate_write_kv, nb::arg("query"), nb::arg("pool"), nb::arg("layout"),
               nb::arg("layer"), nb::arg("key"), nb::arg("value"), nb::arg("slots"), nb::arg("cos"), nb::arg("sin"),
               nb::arg("isa"),
               "The same, key turned on the way by cos and sin [T, rotary dims] and query [T, Q, Dk] in place.");
    module.def("copy_blocks", &copy_blocks, nb::arg("pool"), nb::arg("src"), nb::arg("dst"),
               "pool[dst[i]] = pool[src[i]] for int64 [n] block ids; no block is written twice or both read and "
               "written.");
}
