// Memory that kernels need while they run, kept from call to call: asking the system for it each
// time costs a page fault every 4 KiB. One call at a time may use a workspace; a second is refused, since
// the memory of the first could go.
#pragma once

#include <atomic>
#include <cstdint>
#include <stdexcept>

#include "held.hpp"

namespace kvist {

class Workspace {
  public:
    Workspace() = default;
    Workspace(const Workspace&) = delete;
    Workspace& operator=(const Workspace&) = delete;
    ~Workspace() { release(); }

    // Held by a call for as long as it runs.
    class Use {
      public:
        explicit Use(Workspace& workspace) : workspace_(workspace) {
            if (workspace.busy_.exchange(true, std::memory_order_acquire)) {
                throw std::runtime_error("workspace: another call uses it; give each thread one of its own");
            }
        }
        Use(const Use&) = delete;
        Use& operator=(const Use&) = delete;
        ~Use() { workspace_.busy_.store(false, std::memory_order_release); }

      private:
        Workspace& workspace_;
    };

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
    std::atomic<bool> busy_{false};
};

}  // namespace kvist
