// Element types that K, V, queries and results come in.
#pragma once

#include <cstdint>

namespace kvist {

enum class Element { f32, f16, bf16 };

// Not `inline`: files compiled for a newer processor must not lend their copy to the others.
static constexpr std::int64_t element_bytes(Element element) { return element == Element::f32 ? 4 : 2; }

}  // namespace kvist
