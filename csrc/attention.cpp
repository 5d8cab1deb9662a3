// Paged decode attention: one query token a sequence, K and V read from blocks as they are stored.
//
// The work is cut into (sequence, KV head, split of a fixed number of tokens). A task reads its K
// and V once for all query heads of the group, in fp32, and leaves an unnormalised sum, its maximum
// and its weight; a second pass merges the splits of a head in their order. Neither the batch nor
// the number of threads enters the arithmetic of a result.
//
//     context   |--- split 0 ---|--- split 1 ---|- split 2 -|          one task each
//     task      tiles: widen K -> scores | softmax over the split | tiles: widen V -> sum
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include <nanobind/stl/optional.h>

#include "check.hpp"
#include "lanes.hpp"

namespace nb = nanobind;

namespace {

using kvist::Element;
using kvist::kLanes;
using kvist::Size;
using kvist::Sizes;

using Floats = nb::ndarray<float, nb::c_contig, nb::device::cpu>;
using ConstFloats = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Pool = nb::ndarray<nb::ro, nb::device::cpu>;
using Tables = nb::ndarray<const std::int32_t, nb::ndim<2>, nb::device::cpu>;
using Lengths = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Tokens widened at a time: a tile of K or V in fp32 stays in the first cache.
constexpr std::int64_t kTile = 32;

std::int64_t padded(std::int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// What every task of a call shares. Sizes in elements; *_row is a dim rounded up to whole vectors.
struct Plan {
    const char* pool;
    Element element;
    std::int64_t heads, group, key_dim, value_dim, key_row, value_row;
    std::int64_t slots, head_elements, block_elements, layer_offset, split_tokens;
    float scale;
};

// One split of one sequence's context under one KV head.
struct Task {
    const float* query;         // [G, Dk]
    const std::int32_t* table;  // of the whole sequence
    std::int64_t head, first, count;
    float *sum, *top, *weight;  // [G, value_row], [G], [G]
};

// Buffers of one thread; the allocation is per call and thread, not per task.
struct Scratch {
    explicit Scratch(const Plan& plan)
        : query(plan.group * plan.key_row),
          rows(kTile * std::max(plan.key_row, plan.value_row)),
          scores(plan.group * padded(plan.split_tokens)) {
        std::fill_n(rows.data, kTile * std::max(plan.key_row, plan.value_row), 0.0f);
    }
    kvist::Buffer query, rows, scores;
};

// `count` tokens of a task, from its `token`-th on, as fp32 rows: K or V by `part`, the offset of the
// first within a head. They may begin in the middle of a block and lie in several.
void gather(const Plan& plan, const Task& task, std::int64_t token, std::int64_t count, std::int64_t part,
            std::int64_t dim, std::int64_t row, float* out) {
    const std::int64_t bytes = kvist::element_bytes(plan.element);
    const std::int64_t offset = plan.layer_offset + task.head * plan.head_elements + part;
    for (std::int64_t done = 0; done < count;) {
        const std::int64_t position = task.first + token + done, slot = position % plan.slots;
        const std::int64_t taken = std::min(plan.slots - slot, count - done);
        const std::int64_t start = task.table[position / plan.slots] * plan.block_elements + offset + slot * dim;
        kvist::widen(plan.element, plan.pool + start * bytes, taken, dim, row, out + done * row);
        done += taken;
    }
}

void run(const Plan& plan, const Task& task, Scratch& scratch) {
    const std::int64_t score_row = padded(plan.split_tokens);
    for (std::int64_t g = 0; g < plan.group; ++g) {
        float* const row = scratch.query.data + g * plan.key_row;
        for (std::int64_t d = 0; d < plan.key_row; ++d) {
            row[d] = d < plan.key_dim ? task.query[g * plan.key_dim + d] * plan.scale : 0.0f;
        }
    }
    for (std::int64_t token = 0; token < task.count; token += kTile) {
        const std::int64_t count = std::min(kTile, task.count - token);
        gather(plan, task, token, count, 0, plan.key_dim, plan.key_row, scratch.rows.data);
        kvist::score(scratch.query.data, plan.group, scratch.rows.data, count, plan.key_row,
                     scratch.scores.data + token, score_row);
    }
    for (std::int64_t g = 0; g < plan.group; ++g) {
        float* const row = scratch.scores.data + g * score_row;
        task.top[g] = kvist::maximum(row, task.count);
        task.weight[g] = kvist::exponentials(row, task.count, task.top[g]);
        std::fill_n(task.sum + g * plan.value_row, plan.value_row, 0.0f);
    }
    for (std::int64_t token = 0; token < task.count; token += kTile) {
        const std::int64_t count = std::min(kTile, task.count - token);
        gather(plan, task, token, count, plan.slots * plan.key_dim, plan.value_dim, plan.value_row,
               scratch.rows.data);
        kvist::accumulate(scratch.scores.data + token, score_row, plan.group, scratch.rows.data, count,
                          plan.value_row, task.sum);
    }
}

// Partial results of `splits` tasks of one query head, `stride` heads apart, into one row.
void merge(const Plan& plan, const float* sum, const float* top, const float* weight, std::int64_t splits,
           std::int64_t stride, float* out, float* lse) {
    float highest = top[0];
    for (std::int64_t s = 1; s < splits; ++s) highest = std::max(highest, top[s * stride]);
    float total = 0.0f;
    std::fill_n(out, plan.value_dim, 0.0f);
    for (std::int64_t s = 0; s < splits; ++s) {
        const float factor = std::exp(top[s * stride] - highest);
        total += factor * weight[s * stride];
        const float* const part = sum + s * stride * plan.value_row;
        for (std::int64_t d = 0; d < plan.value_dim; ++d) out[d] += factor * part[d];
    }
    for (std::int64_t d = 0; d < plan.value_dim; ++d) out[d] /= total;
    if (lse != nullptr) *lse = highest + std::log(total);
}

void decode(const ConstFloats& query, const Pool& pool, const Tables& tables, const Lengths& lengths,
            const Floats& out, const std::optional<Floats>& lse, std::int64_t layer, std::int64_t num_layers,
            std::int64_t num_kv_heads, std::int64_t key_dim, std::int64_t block_size,
            std::int64_t split_tokens, float scale) {
    Sizes sizes("decode");
    sizes.require(std::min({num_layers, num_kv_heads, key_dim, block_size, split_tokens}) >= 1,
                  "num_layers, num_kv_heads, key_dim, block_size, split_tokens", "must be at least 1");
    const Size R = sizes.symbol("R"), Q = sizes.symbol("Q"), Dv = sizes.symbol("Dv"), N = sizes.symbol("N");
    const Size B = sizes.symbol("B");
    sizes.shape("query", query, {R, Q, Size(key_dim)});
    sizes.shape("out", out, {R, Q, Dv});
    if (lse) sizes.shape("lse", *lse, {R, Q});
    sizes.shape("block_tables", tables, {R, B});
    sizes.contiguous("block_tables", tables, 1);
    sizes.shape("seq_lens", lengths, {R});
    sizes.range("layer", &layer, 1, 0, num_layers);
    const std::int64_t count = R.value(), queries = Q.value(), value_dim = Dv.value();
    sizes.require(queries % num_kv_heads == 0, "query",
                  "has " + std::to_string(queries) + " heads, no multiple of " + std::to_string(num_kv_heads) +
                      " KV heads");
    const std::int64_t head_elements = block_size * (key_dim + value_dim);
    const std::int64_t block_elements = num_layers * num_kv_heads * head_elements;
    sizes.shape("pool", pool, {N, Size(block_elements)});
    sizes.contiguous("pool", pool, 2);
    sizes.range("seq_lens", lengths.data(), count, 1, B.value() * block_size + 1);
    for (std::int64_t r = 0; r < count; ++r) {
        const std::int64_t blocks = (lengths.data()[r] + block_size - 1) / block_size;
        sizes.range("block_tables", tables.data() + r * tables.stride(0), blocks, 0, N.value());
    }

    const std::int64_t group = queries / num_kv_heads;
    const Plan plan{static_cast<const char*>(pool.data()),
                    sizes.element("pool", pool),
                    num_kv_heads,
                    group,
                    key_dim,
                    value_dim,
                    padded(key_dim),
                    padded(value_dim),
                    block_size,
                    head_elements,
                    block_elements,
                    layer * num_kv_heads * head_elements,
                    split_tokens,
                    scale};
    const float* const asked = query.data();
    const std::int32_t* const table = tables.data();
    const std::int64_t table_row = tables.stride(0);
    float* const found = out.data();
    float* const found_lse = lse ? lse->data() : nullptr;

    nb::gil_scoped_release release;
    std::vector<std::int64_t> first_split(count + 1, 0);  // splits of all sequences before r
    std::vector<std::int64_t> sequence_of;
    for (std::int64_t r = 0; r < count; ++r) {
        const std::int64_t splits = (lengths.data()[r] + split_tokens - 1) / split_tokens;
        first_split[r + 1] = first_split[r] + splits;
        sequence_of.insert(sequence_of.end(), splits, r);
    }
    // Partial results lie as [split][Q]; the parts of one query head are Q apart.
    const std::int64_t splits = first_split[count], tasks = splits * num_kv_heads;
    const std::unique_ptr<float[]> sums(new float[splits * queries * plan.value_row]);
    const std::unique_ptr<float[]> tops(new float[splits * queries]), weights(new float[splits * queries]);
#pragma omp parallel if (tasks > 1)
    {
        Scratch scratch(plan);
#pragma omp for schedule(dynamic)
        for (std::int64_t i = 0; i < tasks; ++i) {
            const std::int64_t split = i / num_kv_heads, head = i % num_kv_heads, r = sequence_of[split];
            const std::int64_t first = (split - first_split[r]) * split_tokens;
            const std::int64_t at = split * queries + head * group;
            run(plan,
                Task{asked + (r * queries + head * group) * key_dim, table + r * table_row, head, first,
                     std::min(split_tokens, lengths.data()[r] - first), sums.get() + at * plan.value_row,
                     tops.get() + at, weights.get() + at},
                scratch);
        }
#pragma omp for schedule(static)
        for (std::int64_t i = 0; i < count * queries; ++i) {
            const std::int64_t r = i / queries, at = first_split[r] * queries + i % queries;
            merge(plan, sums.get() + at * plan.value_row, tops.get() + at, weights.get() + at,
                  first_split[r + 1] - first_split[r], queries, found + i * value_dim,
                  found_lse ? found_lse + i : nullptr);
        }
    }
}

}  // namespace

void bind_attention(nb::module_& module) {
    module.def("decode", &decode, nb::arg("query").noconvert(), nb::arg("pool").noconvert(),
               nb::arg("block_tables").noconvert(), nb::arg("seq_lens").noconvert(),
               nb::arg("out").noconvert(), nb::arg("lse").noconvert().none(), nb::arg("layer"),
               nb::arg("num_layers"), nb::arg("num_kv_heads"), nb::arg("key_dim"), nb::arg("block_size"),
               nb::arg("split_tokens"), nb::arg("scale"),
               "Attention of query fp32 [R, Q, Dk], one token a sequence, over one layer of pool [N, block "
               "elements] through block_tables int32 [R, B] and seq_lens int32 [R], into out fp32 [R, Q, Dv] and, "
               "unless None, lse fp32 [R, Q].");
}
