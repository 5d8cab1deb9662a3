#include "stack.hpp"

#include <algorithm>

#include "rows.hpp"
#include "threads.hpp"

namespace kvist {
namespace {

// Less work than this is done before other threads are awake.
constexpr std::int64_t kParallelWork = 1 << 17;

// Sums onto the residual.
struct AddSink final : Sink {
    AddSink(char* to, Element stored, std::int64_t columns) : residual(to), element(stored), width(columns) {}
    void take(std::int64_t row, std::int64_t count, std::int64_t panel, float* sums) const override {
        const std::int64_t column = panel * kPanel, valid = std::min(kPanel, width - column);
        for (std::int64_t r = 0; r < count; ++r) {
            add_row(element, sums + r * kPanel, valid, residual + ((row + r) * width + column) * element_bytes(element));
        }
    }
    char* residual;
    Element element;
    std::int64_t width;
};

// A panel is sixteen gates and the sixteen ups that go with them.
struct SiluSink final : Sink {
    SiluSink(char* to, Element stored, std::int64_t columns) : out(to), element(stored), width(columns) {}
    void take(std::int64_t row, std::int64_t count, std::int64_t panel, float* sums) const override {
        for (std::int64_t r = 0; r < count; ++r) {
            const float* const pair = sums + r * kPanel;
            silu_row(element, pair, pair + kPanel / 2, kPanel / 2,
                     out + ((row + r) * width + panel * kPanel / 2) * element_bytes(element));
        }
    }
    char* out;
    Element element;
    std::int64_t width;
};

// Sums of the merged projection into query, key and value. No panel lies in two of them.
struct QkvSink final : Sink {
    QkvSink(char* query, char* key, char* value, std::int64_t query_width, std::int64_t kv_width, Element stored)
        : out{query, key, value}, width{query_width, kv_width, kv_width}, element(stored) {}
    void take(std::int64_t row, std::int64_t count, std::int64_t panel, float* sums) const override {
        std::int64_t column = panel * kPanel, part = 0;
        while (part < 2 && column >= width[part]) column -= width[part++];
        for (std::int64_t r = 0; r < count; ++r) {
            store_row(element, sums + r * kPanel, std::min(kPanel, width[part] - column),
                      out[part] + ((row + r) * width[part] + column) * element_bytes(element));
        }
    }
    char* out[3];
    std::int64_t width[3];
    Element element;
};

void demand_linear(const char* name, const Linear& linear, std::int64_t inputs, std::int64_t outputs) {
    const Matrix& matrix = linear.matrix;
    demand(matrix.inputs == inputs && matrix.outputs == outputs,
           std::string(name) + " is " + std::to_string(matrix.outputs) + " x " + std::to_string(matrix.inputs) +
               " but must be " + std::to_string(outputs) + " x " + std::to_string(inputs));
}

}  // namespace

Stack::Stack(std::int64_t hidden, std::int64_t num_query_heads, std::int64_t num_kv_heads, std::int64_t head_dim,
             std::int64_t intermediate, std::int64_t rotary_dim, bool bf16)
    : hidden_(hidden),
      query_heads_(num_query_heads),
      kv_heads_(num_kv_heads),
      head_dim_(head_dim),
      intermediate_(intermediate),
      rotary_(rotary_dim),
      element_(bf16 ? Element::bf16 : Element::f32) {
    demand(std::min({hidden, num_query_heads, num_kv_heads, head_dim, intermediate}) >= 1,
           "hidden, num_query_heads, num_kv_heads, head_dim and intermediate must be at least 1");
    demand(hidden % kPanel == 0 && intermediate % kPanel == 0 && num_query_heads * head_dim % kPanel == 0 &&
               num_kv_heads * head_dim % kPanel == 0,
           "hidden, intermediate and heads x head_dim must be multiples of 32");
    demand(rotary_dim >= 0 && rotary_dim % 2 == 0 && rotary_dim <= head_dim, "rotary_dim must be even and fit a head");
}

Norm Stack::norm_of(const char* name, const ConstArray& weight, std::int64_t width, float epsilon) const {
    demand_shape(name, weight, {width}, true);
    demand_element(name, weight, element_);
    return Norm{weight, epsilon};
}

void Stack::add_layer(const ConstArray& first, float first_epsilon, const ConstArray& second, float second_epsilon,
                      const std::optional<ConstArray>& query_norm, const std::optional<ConstArray>& key_norm,
                      float head_epsilon, const Linear& qkv, const Linear& output, const Linear& gate_up,
                      const Linear& down, bool rotary) {
    demand_linear("qkv", qkv, hidden_, (query_heads_ + 2 * kv_heads_) * head_dim_);
    demand_linear("output", output, query_heads_ * head_dim_, hidden_);
    demand_linear("gate_up", gate_up, hidden_, 2 * intermediate_);
    demand_linear("down", down, intermediate_, hidden_);
    Layer layer{norm_of("first", first, hidden_, first_epsilon),
                norm_of("second", second, hidden_, second_epsilon),
                std::nullopt,
                std::nullopt,
                &qkv,
                &output,
                &gate_up,
                &down,
                rotary,
                std::nullopt,
                std::nullopt};
    if (query_norm) layer.query = norm_of("query_norm", *query_norm, head_dim_, head_epsilon);
    if (key_norm) layer.key = norm_of("key_norm", *key_norm, head_dim_, head_epsilon);
    alone_ = alone_ || qkv.alone || output.alone || gate_up.alone || down.alone;
    layers_.push_back(std::move(layer));
}

void Stack::set_attention(std::int64_t number, std::int64_t layer, float scale, std::int64_t window, float softcap,
                          const std::optional<Floats1>& sinks) {
    demand_within("number", &number, 1, static_cast<std::int64_t>(layers_.size()));
    Layer& set = layers_[static_cast<std::size_t>(number)];
    set.asked = Asked{layer, scale, softcap, window, sinks_of(sinks, query_heads_)};
    set.sinks = sinks;
}

void Stack::set_embedding(const Linear& embedding) {
    demand_linear("embedding", embedding, hidden_, embedding.matrix.outputs);
    embedding_ = &embedding;
}

void Stack::set_head(const ConstArray& norm, float epsilon, const Linear& head) {
    demand_linear("head", head, hidden_, head.matrix.outputs);
    last_ = norm_of("norm", norm, hidden_, epsilon);
    head_ = &head;
}

void Stack::bind(const Indices1& ids, const Array& residual, const Array& query, const Array& key,
                 const Array& value, const ConstArray& attended, const ConstArray& cos, const ConstArray& sin) {
    demand(residual.ndim() > 0 && residual.shape(0) > 0, "residual must have tokens");
    const auto tokens = static_cast<std::int64_t>(residual.shape(0));
    const auto check = [&](const char* name, const auto& array, std::initializer_list<std::int64_t> shape) {
        demand_shape(name, array, shape, true);
        demand_element(name, array, element_);
    };
    demand_shape("ids", ids, {tokens}, true);
    check("residual", residual, {tokens, hidden_});
    check("query", query, {tokens, query_heads_, head_dim_});
    check("key", key, {tokens, kv_heads_, head_dim_});
    check("value", value, {tokens, kv_heads_, head_dim_});
    check("attended", attended, {tokens, query_heads_, head_dim_});
    check("cos", cos, {tokens, rotary_});
    check("sin", sin, {tokens, rotary_});
    tokens_ = tokens;
    ids_ = ids;
    residual_ = residual, query_ = query, key_ = key, value_ = value, attended_ = attended, cos_ = cos, sin_ = sin;
}

void Stack::want(const Indices1& rows, const Array& logits) {
    demand(head_ != nullptr, "set_head was not called");
    const auto count = static_cast<std::int64_t>(rows.shape(0));
    demand_shape("logits", logits, {count, head_->matrix.outputs}, true);
    demand_element("logits", logits, Element::f32);
    rows_ = rows, logits_ = logits;
}

void Stack::begin() {
    demand(tokens_ > 0 && embedding_ != nullptr, "bind or set_embedding was not called");
    const std::int64_t* const ids = ids_.data();
    demand_within("ids", ids, tokens_, embedding_->matrix.outputs);

    nb::gil_scoped_release release;
#pragma omp parallel if (tokens_ * hidden_ >= kParallelWork)
    {
        const FloatBuffer row(hidden_);
#pragma omp for schedule(static)
        for (std::int64_t t = 0; t < tokens_; ++t) {
            unpack_output(embedding_->matrix, ids[t], row.data);
            store_row(element_, row.data, hidden_, at(residual_) + t * hidden_ * element_bytes(element_));
        }
    }
}

void Stack::pass(std::int64_t leaving, std::int64_t entering) {
    demand(tokens_ > 0, "bind was not called");
    const auto count = static_cast<std::int64_t>(layers_.size());
    if (leaving >= 0) demand_within("layer", &leaving, 1, count);
    if (entering >= 0) demand_within("layer", &entering, 1, count);
    demand(leaving >= 0 || entering >= 0, "layer must not be negative");

    nb::gil_scoped_release release;
    go(leaving < 0 ? nullptr : &layers_[static_cast<std::size_t>(leaving)],
       entering < 0 ? nullptr : &layers_[static_cast<std::size_t>(entering)]);
}

void Stack::run(std::int64_t first, std::int64_t last, const StepAttention& attention) {
    demand(tokens_ > 0, "bind was not called");
    const auto count = static_cast<std::int64_t>(layers_.size());
    demand_within("first", &first, 1, count);
    demand_within("last", &last, 1, count);
    demand(first <= last, "first must not come after last");
    const Call& call = attention.plain();
    const Fresh& fresh = attention.fresh();
    demand(call.query.data == at(query_) && call.out.data == attended_.data() && fresh.key == at(key_) &&
               fresh.value == at(value_) && fresh.tokens == tokens_ && call.queries() == query_heads_,
           "attention must be over the query, key, value and attended of bind");
    const auto layer_at = [&](std::int64_t number) { return &layers_[static_cast<std::size_t>(number)]; };
    for (std::int64_t number = first; number <= last; ++number) {
        demand(layer_at(number)->asked.has_value(), "set_attention was not called");
        attention.check(*layer_at(number)->asked);
    }

    nb::gil_scoped_release release;
    go(nullptr, layer_at(first));
    for (std::int64_t number = first; number <= last; ++number) {
        attention.attend(*layer_at(number)->asked);
        go(layer_at(number), number < last ? layer_at(number + 1) : nullptr);
    }
}

// Out of one layer and into the next, or either; needs no GIL.
void Stack::go(const Layer* left, const Layer* entered) {
    const bool wide = tokens_ * hidden_ * intermediate_ >= kParallelWork;
    if (in_tiles()) {
        const std::int64_t rows = block_rows();
        return rows > 0 ? run_blocks(left, entered, rows) : run_panels(left, entered, wide);
    }
    make_room(tokens_);
#pragma omp parallel if (wide)
    {
        if (left != nullptr) leave_layer(*left);
        if (left != nullptr && entered != nullptr) {
#pragma omp barrier
        }
        if (entered != nullptr) enter_layer(*entered);
    }
}

// Rows between the products of a layer, where tokens are not shared out by rows.
void Stack::make_room(std::int64_t rows) {
    if (rows <= room_) return;
    room_ = 0;
    normed_.reset();
    active_.reset();
    const std::int64_t floats = (rows * element_bytes(element_) + 3) / 4;
    normed_ = std::make_unique<FloatBuffer>(floats * hidden_);
    active_ = std::make_unique<FloatBuffer>(floats * intermediate_);
    room_ = rows;
}

void Stack::normalize(const Norm& norm) {
    const std::int64_t row_bytes = hidden_ * element_bytes(element_);
    const char* const from = at(residual_);
    auto* const to = reinterpret_cast<char*>(normed_->data);
#pragma omp for schedule(static)
    for (std::int64_t t = 0; t < tokens_; ++t) {
        rms_norm(element_, from + t * row_bytes, norm.weight.data(), hidden_, norm.epsilon, to + t * row_bytes);
    }
}

void Stack::enter_layer(const Layer& layer) {
    normalize(layer.first);
    const QkvSink sink(at(query_), at(key_), at(value_), query_heads_ * head_dim_, kv_heads_ * head_dim_, element_);
    multiply_share(layer.qkv->matrix, input(normed_->data, hidden_), layer.qkv->alone, sink);
    if (!layer.rotary && !layer.query && !layer.key) return;
#pragma omp barrier
#pragma omp for schedule(static)
    for (std::int64_t t = 0; t < tokens_; ++t) turn(layer, t, 0, query_heads_ + kv_heads_, false);
}

// Norms of some heads of a token, queries before keys, and their rotary embedding. `quickly`: as only some
// processors can.
void Stack::turn(const Layer& layer, std::int64_t token, std::int64_t first, std::int64_t last, bool quickly) {
    const std::int64_t bytes = element_bytes(element_);
    const char* const cos = static_cast<const char*>(cos_.data()) + token * rotary_ * bytes;
    const char* const sin = static_cast<const char*>(sin_.data()) + token * rotary_ * bytes;
    for (std::int64_t head = first; head < last; ++head) {
        const bool is_query = head < query_heads_;
        char* const vector = is_query ? at(query_) + (token * query_heads_ + head) * head_dim_ * bytes
                                      : at(key_) + (token * kv_heads_ + head - query_heads_) * head_dim_ * bytes;
        const std::optional<Norm>& norm = is_query ? layer.query : layer.key;
        if (norm) rms_norm(element_, vector, norm->weight.data(), head_dim_, norm->epsilon, vector);
        if (!layer.rotary) continue;
        if (quickly) {
            turn_row(vector, cos, sin, rotary_);
        } else {
            rotate_row(element_, vector, cos, sin, rotary_);
        }
    }
}

void Stack::leave_layer(const Layer& layer) {
    const AddSink onto_residual(at(residual_), element_, hidden_);
    const SiluSink activate(reinterpret_cast<char*>(active_->data), element_, intermediate_);
    multiply_share(layer.output->matrix, input(attended_.data(), query_heads_ * head_dim_), layer.output->alone,
                   onto_residual);
#pragma omp barrier
    normalize(layer.second);
    multiply_share(layer.gate_up->matrix, input(normed_->data, hidden_), layer.gate_up->alone, activate);
#pragma omp barrier
    multiply_share(layer.down->matrix, input(active_->data, intermediate_), layer.down->alone, onto_residual);
}

void Stack::finish() {
    demand(tokens_ > 0 && head_ != nullptr && logits_.ndim() == 2, "bind, set_head or want was not called");
    demand(static_cast<std::int64_t>(logits_.shape(1)) == head_->matrix.outputs,
           "set_head came after want; call want again");
    const auto count = static_cast<std::int64_t>(rows_.shape(0));
    const std::int64_t* const wanted = rows_.data();
    demand_within("rows", wanted, count, tokens_);
    const StoreSink sink(logits_.data(), Element::f32, head_->matrix.outputs, head_->matrix.outputs);
    const std::int64_t row_bytes = hidden_ * element_bytes(element_);

    nb::gil_scoped_release release;
    const FloatBuffer normed((count * row_bytes + 3) / 4);
    auto* const to = reinterpret_cast<char*>(normed.data);
    const bool wide = count * hidden_ * head_->matrix.outputs >= kParallelWork;
#pragma omp parallel if (wide)
    {
#pragma omp for schedule(static)
        for (std::int64_t i = 0; i < count; ++i) {
            rms_norm(element_, at(residual_) + wanted[i] * row_bytes, last_->weight.data(), hidden_, last_->epsilon,
                     to + i * row_bytes);
        }
        multiply_share(head_->matrix, Input{to, element_, hidden_, count}, head_->alone, sink);
    }
}

}  // namespace kvist

void bind_stack(nanobind::module_& module) {
    namespace nb = nanobind;
    using kvist::Stack;
    nb::class_<Stack>(module, "Stack", "Decoder layers, but for attention, and the head. One thread calls.")
        .def(nb::init<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, bool>(),
             nb::arg("hidden"), nb::arg("num_query_heads"), nb::arg("num_kv_heads"), nb::arg("head_dim"),
             nb::arg("intermediate"), nb::arg("rotary_dim"), nb::arg("bf16"))
        .def("add_layer", &Stack::add_layer, nb::arg("first").noconvert(), nb::arg("first_epsilon"),
             nb::arg("second").noconvert(), nb::arg("second_epsilon"), nb::arg("query_norm").noconvert().none(),
             nb::arg("key_norm").noconvert().none(), nb::arg("head_epsilon"), nb::arg("qkv"), nb::arg("output"),
             nb::arg("gate_up"), nb::arg("down"), nb::arg("rotary"), nb::keep_alive<1, 9>(), nb::keep_alive<1, 10>(),
             nb::keep_alive<1, 11>(), nb::keep_alive<1, 12>(), "Put a layer behind those there are.")
        .def("set_attention", &Stack::set_attention, nb::arg("number"), nb::arg("layer"), nb::arg("scale"),
             nb::arg("window"), nb::arg("softcap"), nb::arg("sinks").noconvert().none(),
             "What a layer asks of attention, for `run`; layer is that of the pool, window 0 for all, softcap 0 for none.")
        .def("set_embedding", &Stack::set_embedding, nb::arg("embedding"), nb::keep_alive<1, 2>(),
             "The packed rows that `begin` takes.")
        .def("set_head", &Stack::set_head, nb::arg("norm").noconvert(), nb::arg("epsilon"), nb::arg("head"),
             nb::keep_alive<1, 4>(), "The last norm and the projection to logits.")
        .def("bind", &Stack::bind, nb::arg("ids").noconvert(), nb::arg("residual").noconvert(), nb::arg("query").noconvert(),
             nb::arg("key").noconvert(), nb::arg("value").noconvert(), nb::arg("attended").noconvert(),
             nb::arg("cos").noconvert(), nb::arg("sin").noconvert(),
             "Use these buffers: ids int64 [T], residual [T, hidden], query [T, Q, D], key and value [T, H, D], attended [T, Q, D], "
             "cos and sin [T, rotary_dim].")
        .def("want", &Stack::want, nb::arg("rows").noconvert(), nb::arg("logits").noconvert(),
             "Which rows int64 [n] of T `finish` takes, read when it runs, and logits fp32 [n, V] that it writes.")
        .def("begin", &Stack::begin, "Rows of the embedding -> residual.")
        .def("enter", &Stack::enter, nb::arg("layer"), "residual -> query, key, value of a layer.")
        .def("leave", &Stack::leave, nb::arg("layer"), "attended of a layer -> residual.")
        .def("advance", &Stack::advance, nb::arg("layer"), "leave(layer), then enter(layer + 1).")
        .def("run", &Stack::run, nb::arg("first"), nb::arg("last"), nb::arg("attention"),
             "enter(first), attention and advance layer after layer, leave(last).")
        .def("finish", &Stack::finish, "residual -> logits of the wanted rows.");
}
