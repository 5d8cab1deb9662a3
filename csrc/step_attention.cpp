// How attention is called: everything checked here, once for one layer or for all layers of a step.
#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include "attention.hpp"
#include "check.hpp"

namespace nb = nanobind;

namespace {

using namespace kvist;

Rows rows_of(const Sizes& sizes, const char* name, const Tensor& tensor) {
    sizes.contiguous(name, tensor, 1);
    const Element element = sizes.element(name, tensor);
    const std::int64_t bytes = element_bytes(element);
    return Rows{tensor.data(), element, tensor.stride(0) * bytes, tensor.stride(1) * bytes};
}

Call check(Sizes& sizes, nb::handle query_object, nb::handle pool_object, const Contexts& contexts,
           nb::handle out_object, const Layout& layout, Isa isa) {
    const Tensor query("query", query_object), pool("pool", pool_object), out("out", out_object);
    const Size Q = sizes.symbol("Q");
    const Size T(contexts.tokens());
    sizes.shape("query", query, {T, Q, Size(layout.key_dim)});
    sizes.shape("out", out, {T, Q, Size(layout.value_dim)});
    const std::int64_t queries = Q.value();
    sizes.require(queries >= 1 && queries % layout.heads == 0, "query",
                  "has ", queries, " heads, no multiple of ", layout.heads, " KV heads");
    sizes.require(contexts.block_size() == layout.block_size, "contexts",
                  "were made for a block_size of ", contexts.block_size(), ", the layout has ", layout.block_size);
    const std::int64_t blocks = layout.check_pool(sizes, pool);
    if (contexts.blocks() > blocks) {
        sizes.outside("block_tables", "has " + std::to_string(contexts.blocks() - 1) + ", but the pool has " +
                                          std::to_string(blocks) + " blocks");
    }
    sizes.require(supported(isa), "isa", "is ", isa_name(isa), ", which this processor does not have");

    Call call{};
    call.layout = &layout;
    call.contexts = &contexts;
    call.query = rows_of(sizes, "query", query);
    call.out = rows_of(sizes, "out", out);

    const Element element = sizes.element("pool", pool);
    Arithmetic arithmetic = Arithmetic::rows;
    if (layout.paired) {
        arithmetic = element == Element::bf16 ? Arithmetic::wide_bf16 : Arithmetic::wide_fp16;
        // A query that is wider than bf16 is not rounded.
        if (element == Element::bf16 && call.query.element == Element::bf16 && isa >= Isa::avx512bf16) {
            arithmetic = Arithmetic::dot;
        }
    }
    call.kernels = &kernels(isa, arithmetic);

    const std::int64_t bytes = element_bytes(element);
    Geometry& g = call.geometry;
    g.pool = pool.data();
    g.element = element;
    g.block_bytes = layout.block_elements() * bytes;
    g.head_bytes = layout.head_elements() * bytes;
    g.value_bytes = layout.block_size * layout.key_dim * bytes;
    g.heads = layout.heads;
    g.group = queries / layout.heads;
    g.key_dim = layout.key_dim;
    g.value_dim = layout.value_dim;
    g.key_pad = up(layout.key_dim, arithmetic == Arithmetic::dot ? 32 : 16);
    g.value_pad = up(layout.value_dim, 16);
    return call;
}

void check_asked(const Sizes& sizes, const Layout& layout, const Asked& asked) {
    sizes.require(asked.scale > 0.0f && asked.softcap >= 0.0f && std::isfinite(asked.scale) &&
                      std::isfinite(asked.softcap),
                  "scale, softcap", "must be above zero, and zero or above, and finite");
    layout.check_layer(sizes, asked.layer);
}

Call with_asked(Call call, const Asked& asked) {
    Geometry& g = call.geometry;
    g.pool += asked.layer * call.layout->layer_elements() * element_bytes(g.element);
    g.scale = asked.scale;
    g.softcap = asked.softcap;
    call.sinks = asked.sinks;
    return call;
}

// The call of one layer alone.
Call check_one(const char* operation, nb::handle query, nb::handle pool, const Contexts& contexts, nb::handle out,
               const std::optional<nb::object>& lse_object, const std::optional<nb::object>& sinks_object,
               const Layout& layout, std::int64_t layer, float scale, float softcap, Isa isa) {
    Sizes sizes(operation);
    Call call = check(sizes, query, pool, contexts, out, layout, isa);
    const Size T(contexts.tokens()), Q(call.queries());
    if (lse_object) {
        const Tensor lse("lse", *lse_object);
        sizes.shape("lse", lse, {T, Q});
        sizes.type("lse", lse, Type::f32);
        sizes.contiguous("lse", lse, 2);
        call.lse = reinterpret_cast<float*>(lse.data());
    }
    Asked asked{layer, scale, softcap, contexts.window(), nullptr};
    if (sinks_object) {
        const Tensor sinks("sinks", *sinks_object);
        sizes.shape("sinks", sinks, {Q});
        sizes.type("sinks", sinks, Type::f32);
        sizes.contiguous("sinks", sinks, 1);
        asked.sinks = reinterpret_cast<const float*>(sinks.data());
    }
    check_asked(sizes, layout, asked);
    return with_asked(call, asked);
}

void decode(nb::handle query, nb::handle pool, const Contexts& contexts, nb::handle out,
            const std::optional<nb::object>& lse, const std::optional<nb::object>& sinks, const Layout& layout,
            std::int64_t layer, float scale, float softcap, Isa isa, Workspace& workspace) {
    const Call call = check_one("decode", query, pool, contexts, out, lse, sinks, layout, layer, scale, softcap, isa);
    nb::gil_scoped_release release;
    run_decode(call, nullptr, workspace);
}

void prefill(nb::handle query, nb::handle pool, const Contexts& contexts, nb::handle out,
             const std::optional<nb::object>& lse, const std::optional<nb::object>& sinks, const Layout& layout,
             std::int64_t layer, float scale, float softcap, Isa isa, Workspace& workspace) {
    const Call call = check_one("prefill", query, pool, contexts, out, lse, sinks, layout, layer, scale, softcap, isa);
    nb::gil_scoped_release release;
    run_prefill(call, workspace);
}

// Tokens that are written when they are read must be where their contexts end.
void check_ends(const Sizes& sizes, const Contexts& contexts, const Layout& layout, const Fresh& fresh) {
    for (std::int64_t r = 0; r < contexts.sequences(); ++r) {
        const Tile& last = contexts.tiles()[contexts.first(r + 1) - 1];
        const std::int64_t begin = last.block * layout.block_size + last.part * kTileSlots;
        sizes.require(fresh.slots[r] >= begin && fresh.slots[r] < begin + kTileSlots, "slots",
                      "gives token ", r, " slot ", fresh.slots[r], ", which is not where its context ends");
    }
}

}  // namespace

namespace kvist {

StepAttention::StepAttention(nb::handle query, nb::handle key, nb::handle value, nb::handle slots, nb::handle pool,
                             const std::vector<nb::object>& contexts, nb::handle out, const Layout& layout, Isa isa,
                             Workspace& workspace)
    : kept_(contexts), workspace_(workspace) {
    for (const nb::handle object : {query, key, value, pool, out}) kept_.push_back(nb::borrow(object));
    Sizes sizes("StepAttention");
    fresh_ = check_fresh(sizes, pool, layout, 0, key, value, slots);
    slots_.assign(fresh_.slots, fresh_.slots + fresh_.tokens);
    fresh_.slots = slots_.data();
    sizes.require(!contexts.empty(), "contexts", "are none");
    for (const nb::object& object : contexts) {
        if (!nb::isinstance<Contexts>(object)) throw nb::type_error("StepAttention: contexts has something else in it");
        const auto& each = nb::cast<const Contexts&>(object);
        sizes.require(fresh_.tokens == each.tokens(), "contexts", "have ", each.tokens(), " tokens, and slots ",
                      fresh_.tokens);
        Sizes own("StepAttention");
        calls_.push_back(::check(own, query, pool, each, out, layout, isa));
        if (each.ends_apart()) check_ends(sizes, each, layout, fresh_);
    }
}

const Call* StepAttention::call_for(std::int64_t window) const {
    for (const Call& call : calls_) {
        if (call.contexts->window() == window) return &call;
    }
    return nullptr;
}

void StepAttention::check(const Asked& asked) const {
    const Sizes sizes("StepAttention");
    check_asked(sizes, *calls_.front().layout, asked);
    sizes.require(call_for(asked.window) != nullptr, "window", "is ", asked.window,
                  ", for which there are no contexts");
}

void StepAttention::attend(const Asked& asked) const {
    const Call call = with_asked(*call_for(asked.window), asked);
    const Contexts& contexts = *call.contexts;
    Fresh fresh = fresh_;
    fresh.pool += asked.layer * call.layout->layer_elements() * element_bytes(fresh.element);
    if (contexts.ends_apart()) return run_decode(call, &fresh, workspace_);
    put_all(fresh);
    if (contexts.num_decodes() > 0) run_decode(call, nullptr, workspace_);
    if (contexts.num_decodes() < contexts.sequences()) run_prefill(call, workspace_);
}

}  // namespace kvist

void bind_attention(nb::module_& module) {
    nb::class_<Workspace>(module, "Workspace", "Memory that kernels use while they run; for one call at a time.")
        .def(nb::init<>())
        .def_prop_ro("nbytes", &Workspace::bytes, "Bytes held now; grows with the largest call so far.");
    nb::class_<Contexts>(module, "Contexts", "The contexts of one step, checked and cut, for all of its layers.")
        .def_static("of_tables", &Contexts::of_tables, nb::arg("block_tables"), nb::arg("seq_lens"),
                    nb::arg("query_start"), nb::arg("num_decodes"), nb::arg("block_size"), nb::arg("window"))
        .def_static("of_runs", &Contexts::of_runs, nb::arg("runs"), nb::arg("run_start"), nb::arg("seq_lens"),
                    nb::arg("query_start"), nb::arg("num_decodes"), nb::arg("block_size"), nb::arg("window"))
        .def_prop_ro("ends_apart", &Contexts::ends_apart,
                     "Whether all are decodes and none reads the block in which another ends.");
    module.def("decode", &decode, nb::arg("query"), nb::arg("pool"), nb::arg("contexts"), nb::arg("out"),
               nb::arg("lse").none(), nb::arg("sinks").none(), nb::arg("layout"), nb::arg("layer"), nb::arg("scale"),
               nb::arg("softcap"), nb::arg("isa"), nb::arg("workspace"),
               "Attention of the first num_decodes tokens of query [T, Q, Dk] over one layer of pool [N, block "
               "elements], into out [T, Q, Dv] and, unless None, lse fp32 [T, Q].");
    module.def("prefill", &prefill, nb::arg("query"), nb::arg("pool"), nb::arg("contexts"), nb::arg("out"),
               nb::arg("lse").none(), nb::arg("sinks").none(), nb::arg("layout"), nb::arg("layer"), nb::arg("scale"),
               nb::arg("softcap"), nb::arg("isa"), nb::arg("workspace"),
               "The same for the tokens of the other sequences.");
    nb::class_<StepAttention>(module, "StepAttention",
                              "Writing and attention of one step, the tensors of which all layers share. For one "
                              "thread.")
        .def(nb::init<nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, const std::vector<nb::object>&,
                      nb::handle, const Layout&, Isa, Workspace&>(),
             nb::arg("query"), nb::arg("key"), nb::arg("value"), nb::arg("slots"), nb::arg("pool"),
             nb::arg("contexts"), nb::arg("out"), nb::arg("layout"), nb::arg("isa"), nb::arg("workspace"),
             nb::keep_alive<1, 9>(), nb::keep_alive<1, 11>())
        .def(
            "attend",
            [](const StepAttention& step, std::int64_t layer, float scale, std::int64_t window, float softcap,
               const std::optional<Floats1>& sinks) {
                const Asked asked{layer, scale, softcap, window, sinks_of(sinks, step.plain().queries())};
                step.check(asked);
                nb::gil_scoped_release release;
                step.attend(asked);
            },
            nb::arg("layer"), nb::arg("scale"), nb::arg("window"), nb::arg("softcap"),
            nb::arg("sinks").noconvert().none(),
            "K and V into a layer of the pool, then attention of all tokens, as write_kv, decode and prefill would.");
}
