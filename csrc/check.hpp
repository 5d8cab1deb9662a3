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

#include <cstdint>
#include <initializer_list>
#include <string>

#include "element.hpp"
#include "tensor.hpp"

namespace kvist {

inline const char* type_name(Type type) {
    switch (type) {
        case Type::f32: return "float32";
        case Type::f16: return "float16";
        case Type::bf16: return "bfloat16";
        case Type::i32: return "int32";
        case Type::i64: return "int64";
        case Type::other: break;
    }
    return "of another dtype";
}

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
        const char* name;
        const char* bound_by = nullptr;  // the argument that gave it its value; null: none yet
        std::int64_t value = -1;
    };
    explicit Size(Symbol* symbol) : symbol_(symbol) {}

    Symbol* symbol_ = nullptr;
    std::int64_t fixed_ = -1;  // -1: any
};

// All checks of one call of one operation.
class Sizes {
  public:
    explicit Sizes(const char* operation) : operation_(operation) {}
    Sizes(const Sizes&) = delete;  // sizes point into it
    Sizes& operator=(const Sizes&) = delete;

    Size symbol(const char* name) {
        if (letters_ == kMostLetters) throw nb::value_error("a kernel names more letters than there is room for");
        symbols_[letters_].name = name;
        return Size(&symbols_[letters_++]);
    }

    void shape(const char* argument, const Tensor& array, std::initializer_list<Size> expected) const {
        if (array.ndim() != expected.size()) mismatch(argument, array, expected, "");
        std::size_t axis = 0;
        for (const Size& size : expected) {
            const auto got = static_cast<std::int64_t>(array.shape(axis++));
            if (size.symbol_ && size.symbol_->bound_by == nullptr) {
                size.symbol_->value = got;
                size.symbol_->bound_by = argument;
            } else if (size.value() != got && (size.symbol_ || size.fixed_ >= 0)) {
                mismatch(argument, array, expected, origin(size));
            }
        }
    }

    // Rows may be apart; the elements of the last `axes` axes must lie side by side.
    void contiguous(const char* argument, const Tensor& array, std::size_t axes) const {
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
    Element element(const char* argument, const Tensor& array) const {
        switch (array.type()) {
            case Type::f32: return Element::f32;
            case Type::f16: return Element::f16;
            case Type::bf16: return Element::bf16;
            default: break;
        }
        throw nb::type_error(text(argument, std::string("must be float32, float16 or bfloat16, but is ") +
                                                type_name(array.type()))
                                 .c_str());
    }

    void type(const char* argument, const Tensor& array, Type expected) const {
        if (array.type() == expected) return;
        throw nb::type_error(
            text(argument, std::string("is ") + type_name(array.type()) + " but must be " + type_name(expected))
                .c_str());
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

    // Any other condition: say what was got and what was asked, in parts that become words only if it fails.
    template <typename... Parts>
    void require(bool condition, const char* argument, const Parts&... parts) const {
        if (!condition) fail(argument, (std::string() + ... + words(parts)));
    }

    [[noreturn]] void outside(const char* argument, const std::string& message) const {
        throw nb::index_error(text(argument, message).c_str());
    }

    [[noreturn]] void fail(const char* argument, const std::string& message) const {
        throw nb::value_error(text(argument, message).c_str());
    }

  private:
    static const char* words(const char* text) { return text; }
    static const std::string& words(const std::string& text) { return text; }
    static std::string words(std::int64_t number) { return std::to_string(number); }

    std::string text(const char* argument, const std::string& message) const {
        return std::string(operation_) + ": " + argument + " " + message;
    }

    static std::string origin(const Size& size) {
        if (!size.symbol_) return "";
        return "; " + std::string(size.symbol_->name) + " is " + std::to_string(size.symbol_->value) + " by " +
               size.symbol_->bound_by;
    }

    [[noreturn]] void mismatch(const char* argument, const Tensor& array,
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

    static constexpr int kMostLetters = 8;

    const char* operation_;
    Size::Symbol symbols_[kMostLetters] = {};
    int letters_ = 0;
};

}  // namespace kvist
