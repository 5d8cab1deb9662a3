#include "tensor.hpp"

namespace kvist {
namespace {

// Attribute names as Python objects, made once.
struct Names {
    PyObject *data_ptr = PyUnicode_InternFromString("data_ptr"), *shape = PyUnicode_InternFromString("shape"),
             *stride = PyUnicode_InternFromString("stride"), *dtype = PyUnicode_InternFromString("dtype"),
             *is_cpu = PyUnicode_InternFromString("is_cpu");
};

const Names& names() {
    static const Names kNames;
    return kNames;
}

nb::object attribute(nb::handle object, PyObject* name) {
    PyObject* const found = PyObject_GetAttr(object.ptr(), name);
    if (found == nullptr) throw nb::python_error();
    return nb::steal(found);
}

nb::object called(nb::handle object, PyObject* name) {
    PyObject* const found = PyObject_CallMethodNoArgs(object.ptr(), name);
    if (found == nullptr) throw nb::python_error();
    return nb::steal(found);
}

// A framework has one object a dtype for as long as it lives; what each means is asked once.
Type type_of(nb::handle dtype) {
    struct Known {
        PyObject* dtype;
        Type type;
    };
    static Known known[5] = {};
    static int count = 0;
    for (int i = 0; i < count; ++i) {
        if (known[i].dtype == dtype.ptr()) return known[i].type;
    }
    const std::string name = nb::str(dtype).c_str();
    const auto ends = [&](const char* text) {
        const std::string end(text);
        return name.size() >= end.size() && name.compare(name.size() - end.size(), end.size(), end) == 0;
    };
    Type type = Type::other;
    if (ends(".float32")) type = Type::f32;
    if (ends(".float16")) type = Type::f16;
    if (ends(".bfloat16")) type = Type::bf16;
    if (ends(".int32")) type = Type::i32;
    if (ends(".int64")) type = Type::i64;
    if (type != Type::other && count < 5) {
        known[count++] = Known{nb::borrow(dtype).release().ptr(), type};
    }
    return type;
}

}  // namespace

Tensor::Tensor(const char* argument, nb::handle object) {
    if (!nb::hasattr(object, names().is_cpu)) {
        throw nb::type_error((std::string(argument) + " is no tensor").c_str());
    }
    if (!nb::cast<bool>(attribute(object, names().is_cpu))) {
        throw nb::type_error((std::string(argument) + " is not on the CPU").c_str());
    }
    type_ = type_of(attribute(object, names().dtype));
    const nb::object shape = attribute(object, names().shape), stride = called(object, names().stride);
    // They are read as the tuples that they are, without asking again.
    if (!PyTuple_Check(shape.ptr()) || !PyTuple_Check(stride.ptr()) || nb::len(shape) != nb::len(stride)) {
        throw nb::type_error(
            (std::string(argument) + " is no tensor: its shape and strides are no tuples of one length").c_str());
    }
    ndim_ = nb::len(shape);
    if (ndim_ > kMostAxes) {
        throw nb::value_error(
            (std::string(argument) + " has " + std::to_string(ndim_) + " axes, more than any kernel takes").c_str());
    }
    for (std::size_t axis = 0; axis < ndim_; ++axis) {
        shape_[axis] = nb::cast<std::int64_t>(nb::handle(PyTuple_GET_ITEM(shape.ptr(), axis)));
        stride_[axis] = nb::cast<std::int64_t>(nb::handle(PyTuple_GET_ITEM(stride.ptr(), axis)));
    }
    data_ = reinterpret_cast<char*>(nb::cast<std::uintptr_t>(called(object, names().data_ptr)));
    if (data_ != nullptr) return;
    for (std::size_t axis = 0; axis < ndim_; ++axis) {
        if (shape_[axis] == 0) return;
    }
    throw nb::value_error((std::string(argument) + " has elements and no memory").c_str());
}

}  // namespace kvist
