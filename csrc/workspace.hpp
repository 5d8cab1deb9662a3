// Memory that kernels need while they run, kept from call to call: asking the system for it each
// time costs a page fault every 4 KiB. One call at a time may use a workspace.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>

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
            data_ = static_cast<char*>(::operator new(static_cast<std::size_t>(bytes), std::align_val_t{64}));
            bytes_ = bytes;
        }
        return data_;
    }

    std::int64_t bytes() const { return bytes_; }

  private:
    void release() {
        if (data_ != nullptr) ::operator delete(data_, std::align_val_t{64});
        data_ = nullptr;
        bytes_ = 0;
    }

    char* data_ = nullptr;
    std::int64_t bytes_ = 0;
};

}  // namespace kvist
