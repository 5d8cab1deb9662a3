// Arguments are checked here, at the border; a kernel behind it trusts what it got.
//
// A shape is written with the house's letters. The first argument that has a letter gives it its
// value, every later one must agree:
//
//     Sizes sizes("write_kv");
//     auto T = sizes.symbol("T"), H = sizes.symbol("H"), D = sizes.symbol("D");
//     sizes.shape("key", key, {T, H, D});          // binds T, H and D
//     sizes.shape("slots", slots, {T});            // must be the same T
//     sizes.range("slots", slots.data(), T.value(), 0, num_blocks * block_size);
//
// A wrong shape or value becomes a ValueError, a wrong element type a TypeError, an index outside
// its range an IndexError. Each names the operation, the argument, what it got and what was asked.
// Checks cost a few comparisons a call; `range` reads each index once.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

namespace kvist {

namespace nb = nanobind;

// Element types that K and V are stored in.
enum class Element { f32, f16, bf16 };

inline const char* element_name(Element element) {
    switch (element) {
        case Element::f32: return "float32";
        case Element::f16: return "float16";
        case Element::bf16: return "bfloat16";
    }
    return "unknown";
}

inline std::int64_t element_bytes(Element element) { return element == Element::f32 ? 4 : 2; }

// One dimension of an expected shape: a letter, a number, or anything at all.
class Size {
  public:
    Size(std::int64_t fixed) : fixed_(fixed) {}  // implicit, so that shapes read as {T, H, 64}
    static Size any() { return Size(-1); }

    // The number behind the letter. Only meaningful once an argument has bound it.
    std::int64_t value() const { return symbol_ ? symbol_->value : fixed_; }

  private:
    friend class Sizes;
    struct Symbol {
        std::string name;
        std::string bound_by;  // the argument that gave it its value; empty: none yet
        std::int64_t value = -1;
    };
    explicit Size(std::shared_ptr<Symbol> symbol) : symbol_(std::move(symbol)) {}

    std::shared_ptr<Symbol> symbol_;
    std::int64_t fixed_ = -1;  // -1: any
};

// All checks of one call of one operation.
class Sizes {
  public:
    explicit Sizes(const char* operation) : operation_(operation) {}

    Size symbol(const char* name) const {
        auto symbol = std::make_shared<Size::Symbol>();
        symbol->name = name;
        return Size(std::move(symbol));
    }

    template <typename Array>
    void shape(const char* argument, const Array& array, std::initializer_list<Size> expected) const {
        if (array.ndim() != expected.size()) mismatch(argument, array, expected, "");
        std::size_t axis = 0;
        for (const Size& size : expected) {
            const auto got = static_cast<std::int64_t>(array.shape(axis++));
            if (size.symbol_ && size.symbol_->bound_by.empty()) {
                size.symbol_->value = got;
                size.symbol_->bound_by = argument;
            } else if (size.value() != got && (size.symbol_ || size.fixed_ >= 0)) {
                mismatch(argument, array, expected, origin(size));
            }
        }
    }

    // Rows may be apart; the elements of the last `axes` axes must lie side by side.
    template <typename Array>
    void contiguous(const char* argument, const Array& array, std::size_t axes) const {
        std::int64_t step = 1;
        for (std::size_t back = 1; back <= axes && back <= array.ndim(); ++back) {
            const std::size_t axis = array.ndim() - back;
            if (array.shape(axis) != 1 && array.stride(axis) != step) {
                fail(argument, "must be contiguous in its last " + std::to_string(axes) +
                                   " axes, but axis " + std::to_string(axis) + " has stride " +
                                   std::to_string(array.stride(axis)) + " where " +
                                   std::to_string(step) + " was expected; pass it through .contiguous()");
            }
            step *= static_cast<std::int64_t>(array.shape(axis));
        }
    }

    // The element type of K, V or a query; anything but the three is a TypeError.
    template <typename Array>
    Element element(const char* argument, const Array& array) const {
        const nb::dlpack::dtype type = array.dtype();
        const auto is = [&](nb::dlpack::dtype_code code, int bits) {
            return type.code == static_cast<std::uint8_t>(code) && type.bits == bits && type.lanes == 1;
        };
        if (is(nb::dlpack::dtype_code::Float, 32)) return Element::f32;
        if (is(nb::dlpack::dtype_code::Float, 16)) return Element::f16;
        if (is(nb::dlpack::dtype_code::Bfloat, 16)) return Element::bf16;
        throw nb::type_error(text(argument, "must be float32, float16 or bfloat16, but its elements have type code " +
                                                std::to_string(type.code) + " and " + std::to_string(type.bits) +
                                                " bits")
                                 .c_str());
    }

    template <typename Array>
    void same_element(const char* argument, const Array& array, Element expected) const {
        const Element got = element(argument, array);
        if (got != expected) {
            throw nb::type_error(text(argument, std::string("is ") + element_name(got) + " but must be " +
                                                    element_name(expected) + " like the pool")
                                     .c_str());
        }
    }

    // low <= values[i] < high for each of `count` values.
    template <typename Integer>
    void range(const char* argument, const Integer* values, std::int64_t count, std::int64_t low,
               std::int64_t high) const {
        for (std::int64_t i = 0; i < count; ++i) {
            const auto value = static_cast<std::int64_t>(values[i]);
            if (value < low || value >= high) {
                throw nb::index_error(text(argument, "has " + std::to_string(value) + " at position " +
                                                         std::to_string(i) + ", outside [" + std::to_string(low) +
                                                         ", " + std::to_string(high) + ")")
                                          .c_str());
            }
        }
    }

    // Any other condition: say what was got and what was asked.
    void require(bool condition, const char* argument, const std::string& message) const {
        if (!condition) fail(argument, message);
    }

    [[noreturn]] void fail(const char* argument, const std::string& message) const {
        throw nb::value_error(text(argument, message).c_str());
    }

  private:
    std::string text(const char* argument, const std::string& message) const {
        return std::string(operation_) + ": " + argument + " " + message;
    }

    static std::string origin(const Size& size) {
        if (!size.symbol_) return "";
        return "; " + size.symbol_->name + " is " + std::to_string(size.symbol_->value) + " by " +
               size.symbol_->bound_by;
    }

    template <typename Array>
    [[noreturn]] void mismatch(const char* argument, const Array& array,
                               std::initializer_list<Size> expected, const std::string& why) const {
        std::string got = "[", want = "[";
        for (std::size_t axis = 0; axis < array.ndim(); ++axis) {
            got += (axis ? ", " : "") + std::to_string(array.shape(axis));
        }
        bool first = true;
        for (const Size& size : expected) {
            want += first ? "" : ", ";
            want += size.symbol_ ? size.symbol_->name : size.fixed_ < 0 ? "any" : std::to_string(size.fixed_);
            first = false;
        }
        fail(argument, "has shape " + got + "] but must be " + want + "]" + why);
    }

    const char* operation_;
};

}  // namespace kvist
