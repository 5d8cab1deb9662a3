// What a kernel needs of a tensor: where it begins, its shape and strides, what its elements are.
//
// Read by duck typing from the attributes of the Python object, which torch's tensors have. DLPack
// is the proper door and costs some nine microseconds a tensor; a decode step comes through here
// several hundred times. Nothing of torch is linked or included. Call with the GIL held; the caller
// keeps the object alive for as long as the memory is used.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

#include "element.hpp"

namespace kvist {

namespace nb = nanobind;

// Of the types that arrive here; `other` is refused wherever it is not asked for by name.
enum class Type { f32, f16, bf16, i32, i64, other };

class Tensor {
  public:
    // `argument` names it in the complaint about an object that is no tensor on a CPU.
    Tensor(const char* argument, nb::handle object);

    char* data() const { return data_; }
    std::size_t ndim() const { return ndim_; }
    std::int64_t shape(std::size_t axis) const { return shape_[axis]; }
    // In elements, as everywhere.
    std::int64_t stride(std::size_t axis) const { return stride_[axis]; }
    Type type() const { return type_; }

  private:
    static constexpr std::size_t kMostAxes = 4;

    char* data_ = nullptr;
    std::size_t ndim_ = 0;
    std::int64_t shape_[kMostAxes] = {}, stride_[kMostAxes] = {};
    Type type_ = Type::other;
};

}  // namespace kvist
