// Attention of a step's tokens, layer after layer: what all layers share is checked once.
#pragma once

#include <optional>
#include <vector>

#include "arrays.hpp"
#include "contexts.hpp"
#include "fresh.hpp"
#include "isa.hpp"
#include "layout.hpp"
#include "workspace.hpp"

namespace kvist {

inline std::int64_t up(std::int64_t n, std::int64_t unit) { return (n + unit - 1) / unit * unit; }

// What a layer asks of attention.
struct Asked {
    std::int64_t layer;  // of the pool
    float scale, softcap;
    std::int64_t window;  // positions that a query sees, its own included; 0: all
    const float* sinks;   // [Q] or null
};

// One step as the kernels of all layers need it, checked; with what a layer asks, one call.
struct Call {
    Geometry geometry;  // its pool begins at layer 0, or at the layer of the call
    const Layout* layout;
    const Kernels* kernels;
    const Contexts* contexts;
    Rows query, out;
    float* lse;          // [T, Q] or null
    const float* sinks;  // [Q] or null

    std::int64_t queries() const { return geometry.heads * geometry.group; }
};

// `fresh`: K and V of the query tokens, or null if they are in the pool. The job that reads a token's place puts
// them there just before, so that no core takes the memory from another; those of the sequence behind are
// asked for meanwhile. Neither needs the GIL.
void run_decode(const Call& call, const Fresh* fresh, Workspace& workspace);
void run_prefill(const Call& call, Workspace& workspace);

inline const float* sinks_of(const std::optional<Floats1>& sinks, std::int64_t queries) {
    if (!sinks) return nullptr;
    demand_shape("sinks", *sinks, {queries}, true);
    return sinks->data();
}

class StepAttention {
  public:
    // query [T, Q, Dk], key [T, H, Dk], value [T, H, Dv], slots int64 [T], pool [N, block elements], out [T, Q, Dv];
    // one of `contexts` for each window that layers ask for. All are kept, but slots, which are copied.
    StepAttention(nb::handle query, nb::handle key, nb::handle value, nb::handle slots, nb::handle pool,
                  const std::vector<nb::object>& contexts, nb::handle out, const Layout& layout, Isa isa,
                  Workspace& workspace);
    StepAttention(const StepAttention&) = delete;  // its fresh tokens point into it
    StepAttention& operator=(const StepAttention&) = delete;

    // Refuses what no layer of these can ask.
    void check(const Asked& asked) const;
    // K and V of the tokens into a layer, then their attention. Of what was checked; needs no GIL.
    void attend(const Asked& asked) const;

    // What the calls of all layers share, and what they write.
    const Call& plain() const { return calls_.front(); }
    const Fresh& fresh() const { return fresh_; }

  private:
    const Call* call_for(std::int64_t window) const;  // null if there are no such contexts

    std::vector<nb::object> kept_;
    std::vector<Call> calls_;  // one for each of the contexts
    std::vector<std::int64_t> slots_;
    Fresh fresh_;
    Workspace& workspace_;
};

}  // namespace kvist
