// Tensors as they come in for packed matrices and stacks: what they must be, or a ValueError, TypeError or
// IndexError that says what they are. Each costs a few microseconds to hand over, so that what stays the
// same from step to step is handed over once.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <initializer_list>
#include <string>

#include "check.hpp"

namespace kvist {

namespace nb = nanobind;

using ConstArray = nb::ndarray<nb::ro, nb::device::cpu>;
using Array = nb::ndarray<nb::device::cpu>;
using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats1 = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Indices1 = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

inline void demand(bool condition, const std::string& message) {
    if (!condition) throw nb::value_error(message.c_str());
}

// -1 stands for any size. Contiguous in its last axis, or, for `whole`, altogether.
template <typename Tensor>
void demand_shape(const char* name, const Tensor& array, std::initializer_list<std::int64_t> wanted, bool whole) {
    std::string got, asked;
    bool fits = array.ndim() == wanted.size(), dense = true;
    std::size_t axis = 0;
    for (const std::int64_t size : wanted) {
        asked += (axis ? ", " : "") + (size < 0 ? std::string("any") : std::to_string(size));
        if (fits && axis < array.ndim()) fits = size < 0 || static_cast<std::int64_t>(array.shape(axis)) == size;
        ++axis;
    }
    for (axis = 0; axis < array.ndim(); ++axis) got += (axis ? ", " : "") + std::to_string(array.shape(axis));
    demand(fits, std::string(name) + " has shape [" + got + "] but must be [" + asked + "]");
    std::int64_t step = 1;
    for (axis = array.ndim(); axis-- > 0;) {
        if (array.shape(axis) != 1 && array.stride(axis) != step) dense = false;
        if (!whole) break;
        step *= static_cast<std::int64_t>(array.shape(axis));
    }
    demand(dense, std::string(name) + (whole ? " must be contiguous" : " must be contiguous in its last axis"));
}

// fp32 or bf16: what activations may be.
template <typename Tensor>
Element activation_of(const char* name, const Tensor& array) {
    const nb::dlpack::dtype type = array.dtype();
    if (type.lanes == 1 && type.bits == 32 && type.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float)) {
        return Element::f32;
    }
    if (type.lanes == 1 && type.bits == 16 && type.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat)) {
        return Element::bf16;
    }
    throw nb::type_error((std::string(name) + " must be float32 or bfloat16").c_str());
}

template <typename Tensor>
void demand_element(const char* name, const Tensor& array, Element wanted) {
    if (activation_of(name, array) == wanted) return;
    throw nb::type_error((std::string(name) + " must be " + (wanted == Element::f32 ? "float32" : "bfloat16")).c_str());
}

inline void demand_within(const char* name, const std::int64_t* values, std::int64_t count, std::int64_t end) {
    for (std::int64_t i = 0; i < count; ++i) {
        if (values[i] >= 0 && values[i] < end) continue;
        const std::string what = std::string(name) + " has " + std::to_string(values[i]) + " at position " +
                                 std::to_string(i) + ", outside [0, " + std::to_string(end) + ")";
        throw nb::index_error(what.c_str());
    }
}

}  // namespace kvist
