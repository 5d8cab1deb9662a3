// Packing, unpacking and multiplying for Python, with everything checked at the border.
#include "linear.hpp"

#include <algorithm>
#include <vector>

#include "clones.hpp"
#include "fixed.hpp"
#include "rows.hpp"

namespace nb = nanobind;

namespace kvist {

// Less work than this is done before other threads are awake.
static constexpr std::int64_t kParallelWork = 1 << 18;

Weights weights_named(const std::string& name) {
    if (name == "float32") return Weights::f32;
    if (name == "bfloat16") return Weights::bf16;
    if (name == "int8") return Weights::i8;
    if (name == "int4") return Weights::i4;
    throw nb::value_error(("weights: " + name + " is not float32, bfloat16, int8 or int4").c_str());
}

Linear::Linear(const std::string& weights, std::int64_t inputs, std::int64_t outputs, Bytes memory,
               std::optional<Floats1> biases, bool rows_alone)
    : matrix{weights_named(weights), inputs, outputs, reinterpret_cast<const char*>(memory.data()), nullptr},
      alone(rows_alone),
      packed(std::move(memory)),
      bias(std::move(biases)) {
    demand(inputs > 0 && inputs % kGroup == 0 && outputs > 0,
           "inputs must be a multiple of 32 and outputs at least 1, but they are " + std::to_string(inputs) + " and " +
               std::to_string(outputs));
    constexpr std::int64_t most = std::int64_t{1} << 30;  // so that no size wraps around
    demand(inputs <= most && outputs <= most, "inputs and outputs must be at most 2^30");
    demand(matrix.weights != Weights::i8 || inputs <= kFixedInputs,
           "int8 takes at most " + std::to_string(kFixedInputs) + " inputs, not " + std::to_string(inputs));
    demand_shape("packed", packed, {matrix.panels() * matrix.panel_bytes()}, true);
    demand(reinterpret_cast<std::uintptr_t>(matrix.packed) % 4 == 0, "packed must lie on a multiple of four bytes");
    if (bias) {
        demand_shape("bias", *bias, {outputs}, true);
        matrix.bias = bias->data();
    }
}

void StoreSink::take(std::int64_t row, std::int64_t count, std::int64_t panel, float* sums) const {
    const std::int64_t column = panel * kPanel, valid = std::min(kPanel, outputs - column);
    for (std::int64_t r = 0; r < count; ++r) {
        store_row(element, sums + r * kPanel, valid, out + ((row + r) * stride + column) * element_bytes(element));
    }
}

}  // namespace kvist

namespace {

using namespace kvist;

std::int64_t packed_bytes(const std::string& weights, std::int64_t inputs, std::int64_t outputs) {
    const Matrix shape{weights_named(weights), inputs, outputs, nullptr, nullptr};
    return shape.panels() * shape.panel_bytes();
}

void pack(const ConstArray& source, const std::string& weights,
          const nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& packed) {
    demand_shape("source", source, {-1, -1}, false);
    const Element element = activation_of("source", source);
    const Weights kind = weights_named(weights);
    const auto outputs = static_cast<std::int64_t>(source.shape(0)), inputs = static_cast<std::int64_t>(source.shape(1));
    demand(inputs > 0 && inputs % kGroup == 0 && outputs > 0,
           "source must have a multiple of 32 inputs and an output, but is [" + std::to_string(outputs) + ", " +
               std::to_string(inputs) + "]");
    const Matrix shape{kind, inputs, outputs, nullptr, nullptr};
    demand_shape("packed", packed, {shape.panels() * shape.panel_bytes()}, true);
    auto* const into = reinterpret_cast<char*>(packed.data());
    const void* const data = source.data();
    const std::int64_t stride = source.stride(0), panels = shape.panels();

    bool held = true;
    {
        nb::gil_scoped_release release;
#pragma omp parallel for schedule(static) reduction(&& : held) if (outputs * inputs >= kParallelWork)
        for (std::int64_t panel = 0; panel < panels; ++panel) {
            held = pack_panel(kind, element, data, stride, outputs, inputs, panel, into) && held;
        }
    }
    demand(held, "source has weights that are not finite, or too large for " + weights);
}

void linear_multiply(const Linear& linear, const ConstArray& x, const Array& out) {
    const Matrix& matrix = linear.matrix;
    demand_shape("x", x, {-1, matrix.inputs}, false);
    const auto count = static_cast<std::int64_t>(x.shape(0));
    demand_shape("out", out, {count, matrix.outputs}, false);
    const Input rows{x.data(), activation_of("x", x), x.stride(0), count};
    const StoreSink sink(out.data(), activation_of("out", out), out.stride(0), matrix.outputs);
    const bool alone = linear.alone;

    nb::gil_scoped_release release;
    const bool wide = rows.count * matrix.inputs * matrix.outputs >= kParallelWork;
#pragma omp parallel if (wide)
    multiply_share(matrix, rows, alone, sink);
}

void linear_rows(const Linear& linear, const Indices1& ids, const Array& out) {
    const Matrix& matrix = linear.matrix;
    const auto count = static_cast<std::int64_t>(ids.shape(0));
    demand_shape("out", out, {count, matrix.inputs}, false);
    demand_within("ids", ids.data(), count, matrix.outputs);
    const Element element = activation_of("out", out);
    const std::int64_t* const wanted = ids.data();
    auto* const into = static_cast<char*>(out.data());
    const std::int64_t row_bytes = out.stride(0) * element_bytes(element);

    nb::gil_scoped_release release;
#pragma omp parallel if (count * matrix.inputs >= kParallelWork)
    {
        const FloatBuffer row(matrix.inputs);
#pragma omp for schedule(static)
        for (std::int64_t t = 0; t < count; ++t) {
            unpack_output(matrix, wanted[t], row.data);
            store_row(element, row.data, matrix.inputs, into + t * row_bytes);
        }
    }
}

}  // namespace

void bind_linear(nb::module_& module) {
    module.def("packed_bytes", &packed_bytes, nb::arg("weights"), nb::arg("inputs"), nb::arg("outputs"),
               "Bytes of a packed matrix.");
    module.def("pack", &pack, nb::arg("source").noconvert(), nb::arg("weights"), nb::arg("packed").noconvert(),
               "Pack source [N, K], fp32 or bf16, into packed uint8 [packed_bytes].");
    module.def("multiply_path", &multiply_path, nb::arg("rows"), nb::arg("alone"),
               "Which kernel multiplies so many bf16 rows here: portable, dots or tiles.");
    nb::class_<Linear>(module, "Linear", "A packed matrix; keeps the memory that it is given.")
        .def(nb::init<const std::string&, std::int64_t, std::int64_t, Bytes, std::optional<Floats1>, bool>(),
             nb::arg("weights"), nb::arg("inputs"), nb::arg("outputs"), nb::arg("packed").noconvert(),
             nb::arg("bias").noconvert().none(), nb::arg("alone"))
        .def("multiply", &linear_multiply, nb::arg("x").noconvert(), nb::arg("out").noconvert(),
             "out [T, N] = x [T, K] times the transposed matrix, plus bias; fp32 sums, rounded once.")
        .def("rows", &linear_rows, nb::arg("ids").noconvert(), nb::arg("out").noconvert(),
             "Unpack the weights of outputs ids int64 [T] into out [T, K].");
}
