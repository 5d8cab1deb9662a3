#include "rows.hpp"

#include <cmath>

#include "clones.hpp"
#include "scalar.hpp"

namespace kvist {
namespace {

constexpr std::int64_t kLanes = 16;

// Sums of squares in sixteen lanes, then over the lanes: an order that no vectoriser chooses.
template <typename Stored>
KVIST_ALWAYS void norm_of(const void* x, const void* weight, std::int64_t count, float epsilon, void* out) {
    using T = typename Stored::type;
    const T* const from = static_cast<const T*>(x);
    const T* const factor = static_cast<const T*>(weight);
    T* const to = static_cast<T*>(out);
    float lanes[kLanes] = {};
    std::int64_t n = 0;
    for (; n + kLanes <= count; n += kLanes) {
        for (std::int64_t i = 0; i < kLanes; ++i) {
            const float value = Stored::load(from[n + i]);
            lanes[i] += value * value;
        }
    }
    for (std::int64_t i = 0; n < count; ++n, ++i) lanes[i] += Stored::load(from[n]) * Stored::load(from[n]);
    for (std::int64_t half = kLanes / 2; half > 0; half /= 2) {
        for (std::int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    const float scale = 1.0f / std::sqrt(lanes[0] / static_cast<float>(count) + epsilon);
    for (n = 0; n < count; ++n) {
        to[n] = Stored::store(Stored::load(factor[n]) * Stored::round(Stored::load(from[n]) * scale));
    }
}

template <typename Stored>
KVIST_ALWAYS void rotate_half(void* head, const void* cos, const void* sin, std::int64_t rotary) {
    using T = typename Stored::type;
    T* const x = static_cast<T*>(head);
    const T* const c = static_cast<const T*>(cos);
    const T* const s = static_cast<const T*>(sin);
    const std::int64_t half = rotary / 2;
    for (std::int64_t n = 0; n < half; ++n) {
        const float a = Stored::load(x[n]), b = Stored::load(x[n + half]);
        x[n] = Stored::store(Stored::round(a * Stored::load(c[n])) + Stored::round(-b * Stored::load(s[n])));
        x[n + half] = Stored::store(Stored::round(b * Stored::load(c[n + half])) +
                                    Stored::round(a * Stored::load(s[n + half])));
    }
}

template <typename Stored>
KVIST_ALWAYS void store_sums(const float* sums, std::int64_t count, void* out) {
    auto* const to = static_cast<typename Stored::type*>(out);
    for (std::int64_t n = 0; n < count; ++n) to[n] = Stored::store(sums[n]);
}

template <typename Stored>
KVIST_ALWAYS void add_sums(const float* sums, std::int64_t count, void* residual) {
    auto* const to = static_cast<typename Stored::type*>(residual);
    for (std::int64_t n = 0; n < count; ++n) to[n] = Stored::store(Stored::load(to[n]) + Stored::round(sums[n]));
}

template <typename Stored>
KVIST_ALWAYS void silu_sums(const float* gate, const float* up, std::int64_t count, void* out) {
    auto* const to = static_cast<typename Stored::type*>(out);
    for (std::int64_t n = 0; n < count; ++n) {
        to[n] = Stored::store(Stored::round(silu(Stored::round(gate[n]))) * Stored::round(up[n]));
    }
}

}  // namespace

#define KVIST_BOTH(name, call, parameters, arguments)                                  \
    KVIST_VERSIONS static void name##_f32 parameters { call<StoredF32> arguments; }      \
    KVIST_VERSIONS static void name##_bf16 parameters { call<StoredBf16> arguments; }

KVIST_BOTH(norm, norm_of, (const void* x, const void* weight, std::int64_t count, float epsilon, void* out),
           (x, weight, count, epsilon, out))
KVIST_BOTH(rotate, rotate_half, (void* head, const void* cos, const void* sin, std::int64_t rotary),
           (head, cos, sin, rotary))
KVIST_BOTH(store, store_sums, (const float* sums, std::int64_t count, void* out), (sums, count, out))
KVIST_BOTH(add, add_sums, (const float* sums, std::int64_t count, void* residual), (sums, count, residual))
KVIST_BOTH(silu, silu_sums, (const float* gate, const float* up, std::int64_t count, void* out),
           (gate, up, count, out))

void rms_norm(Element stored, const void* x, const void* weight, std::int64_t count, float epsilon, void* out) {
    (stored == Element::f32 ? norm_f32 : norm_bf16)(x, weight, count, epsilon, out);
}

void rotate_row(Element stored, void* head, const void* cos, const void* sin, std::int64_t rotary) {
    (stored == Element::f32 ? rotate_f32 : rotate_bf16)(head, cos, sin, rotary);
}

void store_row(Element stored, const float* sums, std::int64_t count, void* out) {
    (stored == Element::f32 ? store_f32 : store_bf16)(sums, count, out);
}

void add_row(Element stored, const float* sums, std::int64_t count, void* residual) {
    (stored == Element::f32 ? add_f32 : add_bf16)(sums, count, residual);
}

void silu_row(Element stored, const float* gate, const float* up, std::int64_t count, void* out) {
    (stored == Element::f32 ? silu_f32 : silu_bf16)(gate, up, count, out);
}

}  // namespace kvist
