// Memory that kernels need while they run, kept from call to call: asking the system for it each
// time costs a page fault every 4 KiB. One call at a time may use a workspace.
#pragma once

#include <cstdint>

#include "held.hpp"

namespace kvist {

class Workspace {
  public:
    Workspace() = default;
    Workspace(const Workspace&) = delete;
    Workspace& operator=(const Workspace&) = delete;
    ~Workspace() { release(); }

    // At least so many bytes, on a cache line's boundary, not initialised.
    char* reserve(std::int64_t bytes) {
        if (bytes > bytes_) {
            release();
            data_ = static_cast<char*>(hold(bytes));
            bytes_ = bytes;
        }
        return data_;
    }

    std::int64_t bytes() const { return bytes_; }

  private:
    void release() {
        if (data_ != nullptr) let_go(data_, bytes_);
        data_ = nullptr;
        bytes_ = 0;
    }

    char* data_ = nullptr;
    std::int64_t bytes_ = 0;
};

}  // namespace kvist
