// A packed matrix as Python holds it, and the memory that keeps it alive.
#pragma once

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>

#include "arrays.hpp"
#include "matrix.hpp"

namespace kvist {

struct Linear {
    Linear(const std::string& weights, std::int64_t inputs, std::int64_t outputs, Bytes packed,
           std::optional<Floats1> bias, bool alone);

    Matrix matrix;
    bool alone;
    Bytes packed;
    std::optional<Floats1> bias;
};

Weights weights_named(const std::string& name);

// Sums rounded to `element` into rows `stride` elements apart.
struct StoreSink final : Sink {
    StoreSink(void* to, Element stored, std::int64_t row_stride, std::int64_t columns)
        : out(static_cast<char*>(to)), element(stored), stride(row_stride), outputs(columns) {}
    void take(std::int64_t row, std::int64_t count, std::int64_t panel, float* sums) const override;
    char* out;
    Element element;
    std::int64_t stride, outputs;
};

}  // namespace kvist
