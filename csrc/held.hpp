// Memory that kernels hold from the system, counted where it is asked for and given back: the process
// bill has a row for it. Packed weights are not in here, they are tensors of whoever packs them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>

namespace kvist {

// Of all threads, now.
inline std::atomic<std::int64_t> held_bytes{0};

// On a cache line's boundary, not initialised.
inline void* hold(std::int64_t bytes) {
    void* const data = ::operator new(static_cast<std::size_t>(bytes), std::align_val_t{64});
    held_bytes.fetch_add(bytes, std::memory_order_relaxed);
    return data;
}

inline void let_go(void* data, std::int64_t bytes) {
    ::operator delete(data, std::align_val_t{64});
    held_bytes.fetch_sub(bytes, std::memory_order_relaxed);
}

}  // namespace kvist
