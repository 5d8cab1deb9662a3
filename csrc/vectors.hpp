// Vectors of 64 bytes for processors whose registers have 64, 32 or 16: one, two halves, four quarters.
//
// gcc takes a vector type wider than the registers apart through memory, at a sixth of the speed; halves that it
// is told of stay in registers. Operators work on lanes, with vectors and numbers, whatever a vector is made of.
//
// Included where code is compiled for several processors: everything has internal linkage, for the linker keeps
// one copy of a shared inline function and would not know which processors may run it; standard templates that
// make code are avoided for the same reason.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

// Vectors never cross a call that is not inlined, so their calling convention is of no account.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

#define KVIST_INLINE static inline __attribute__((always_inline))
#define KVIST_MEMBER inline __attribute__((always_inline))

namespace kvist {
namespace {

template <typename V>
struct Twice {
    V low, high;

    // The same bits as other lanes.
    template <typename To>
    KVIST_MEMBER explicit operator To() const {
        return To{(decltype(To::low))low, (decltype(To::high))high};
    }
};

#define KVIST_LANEWISE(op)                                                                                  \
    template <typename V>                                                                                   \
    KVIST_INLINE auto operator op(const Twice<V>& a, const Twice<V>& b)->Twice<decltype(a.low op b.low)> {  \
        return {a.low op b.low, a.high op b.high};                                                          \
    }                                                                                                       \
    template <typename V, typename Number, std::enable_if_t<std::is_arithmetic<Number>::value, int> = 0>    \
    KVIST_INLINE auto operator op(const Twice<V>& a, Number b)->Twice<decltype(a.low op b)> {               \
        return {a.low op b, a.high op b};                                                                   \
    }                                                                                                       \
    template <typename V, typename Number, std::enable_if_t<std::is_arithmetic<Number>::value, int> = 0>    \
    KVIST_INLINE auto operator op(Number a, const Twice<V>& b)->Twice<decltype(a op b.low)> {               \
        return {a op b.low, a op b.high};                                                                   \
    }

KVIST_LANEWISE(+)
KVIST_LANEWISE(-)
KVIST_LANEWISE(*)
KVIST_LANEWISE(/)
KVIST_LANEWISE(&)
KVIST_LANEWISE(|)
KVIST_LANEWISE(<<)
KVIST_LANEWISE(>>)
KVIST_LANEWISE(<)
KVIST_LANEWISE(>)
KVIST_LANEWISE(>=)
KVIST_LANEWISE(!=)
#undef KVIST_LANEWISE

template <typename V>
KVIST_INLINE Twice<V> operator-(const Twice<V>& a) {
    return {-a.low, -a.high};
}

template <typename V, typename Other>
KVIST_INLINE Twice<V>& operator+=(Twice<V>& a, const Other& b) {
    return a = a + b;
}

template <typename V, typename Other>
KVIST_INLINE Twice<V>& operator|=(Twice<V>& a, const Other& b) {
    return a = a | b;
}

// ---- to and from memory

template <typename V>
KVIST_INLINE void take(const char* from, V& to) {
    std::memcpy(&to, from, sizeof(V));
}

template <typename V>
KVIST_INLINE void take(const char* from, Twice<V>& to) {
    take(from, to.low);
    take(from + sizeof(V), to.high);
}

template <typename V>
KVIST_INLINE void give(char* to, const V& from) {
    std::memcpy(to, &from, sizeof(V));
}

template <typename V>
KVIST_INLINE void give(char* to, const Twice<V>& from) {
    give(to, from.low);
    give(to + sizeof(V), from.high);
}

template <typename Vector>
KVIST_INLINE Vector load(const void* from) {
    Vector vector;
    take(static_cast<const char*>(from), vector);
    return vector;
}

template <typename Vector>
KVIST_INLINE void store(void* to, const Vector& vector) {
    give(static_cast<char*>(to), vector);
}

// ---- what is no operator

// Lane by lane, where the mask is set a's, else b's.
template <typename Mask, typename V>
KVIST_INLINE V pick(const Mask& mask, const V& a, const V& b) {
    return mask ? a : b;
}

template <typename Mask, typename V>
KVIST_INLINE Twice<V> pick(const Twice<Mask>& mask, const Twice<V>& a, const Twice<V>& b) {
    return {pick(mask.low, a.low, b.low), pick(mask.high, a.high, b.high)};
}

// The numbers of the lanes, in another type.
template <typename To>
struct Convert {
    template <typename From>
    KVIST_MEMBER static To of(const From& v) {
        return __builtin_convertvector(v, To);
    }
};

template <typename To>
struct Convert<Twice<To>> {
    template <typename From>
    KVIST_MEMBER static Twice<To> of(const Twice<From>& v) {
        return {Convert<To>::of(v.low), Convert<To>::of(v.high)};
    }
};

template <typename To, typename From>
KVIST_INLINE To convert(const From& v) {
    return Convert<To>::of(v);
}

template <typename V>
KVIST_INLINE float first_of(const V& v) {
    return v[0];
}

template <typename V>
KVIST_INLINE float first_of(const Twice<V>& v) {
    return first_of(v.low);
}

// ---- sixteen lanes of each kind, by the bytes of a register

typedef float Float4 __attribute__((vector_size(16)));
typedef float Float8 __attribute__((vector_size(32)));
typedef float Float16 __attribute__((vector_size(64)));
typedef std::int32_t Int4 __attribute__((vector_size(16)));
typedef std::int32_t Int8 __attribute__((vector_size(32)));
typedef std::int32_t Int16 __attribute__((vector_size(64)));
typedef std::uint32_t Word4 __attribute__((vector_size(16)));
typedef std::uint32_t Word8 __attribute__((vector_size(32)));
typedef std::uint32_t Word16 __attribute__((vector_size(64)));
typedef std::uint16_t Half4 __attribute__((vector_size(8)));
typedef std::uint16_t Half8 __attribute__((vector_size(16)));
typedef std::uint16_t Half16 __attribute__((vector_size(32)));

template <int RegisterBytes>
struct Sixteen;

template <>
struct Sixteen<64> {
    typedef Float16 Floats;
    typedef Int16 Ints;
    typedef Word16 Words;
    typedef Half16 Halves;
};

template <>
struct Sixteen<32> {
    typedef Twice<Float8> Floats;
    typedef Twice<Int8> Ints;
    typedef Twice<Word8> Words;
    typedef Twice<Half8> Halves;
};

template <>
struct Sixteen<16> {
    typedef Twice<Twice<Float4>> Floats;
    typedef Twice<Twice<Int4>> Ints;
    typedef Twice<Twice<Word4>> Words;
    typedef Twice<Twice<Half4>> Halves;
};

}  // namespace
}  // namespace kvist
