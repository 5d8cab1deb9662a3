// Decoder layers up to attention and after it, one call for everything between two attentions.
//
//     begin()     rows of the embedding                                   -> residual
//     enter(i)    norm -> QKV -> norms of heads -> rotary                 -> query, key, value
//     leave(i)    output projection + residual -> norm -> gate, up -> SiLU -> down + residual
//     advance(i)  leave(i), then enter(i + 1)
//     finish()    norm of the wanted rows -> head                         -> logits
//
// Attention itself is somebody else's: between the calls K and V are written and read through the
// buffers that `bind` was given; `run` goes through several layers with a StepAttention over them. One team of threads runs a whole call: few rows are shared out by
// outputs, many by blocks of rows; where there are tiles, see stack_tiles.cpp.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "attention.hpp"
#include "chain.hpp"
#include "clones.hpp"
#include "linear.hpp"

namespace kvist {

// An RMS norm; the memory of its weights is kept.
struct Norm {
    ConstArray weight;
    float epsilon;
};

struct Layer {
    Norm first, second;
    std::optional<Norm> query, key;  // of heads
    const Linear *qkv, *output, *gate_up, *down;
    bool rotary;
    std::optional<Asked> asked;  // of attention
    std::optional<Floats1> sinks;
};

struct Scratch;
struct Taken;
struct Pieces;

class Stack {
  public:
    Stack(std::int64_t hidden, std::int64_t num_query_heads, std::int64_t num_kv_heads, std::int64_t head_dim,
          std::int64_t intermediate, std::int64_t rotary_dim, bool bf16);

    void add_layer(const ConstArray& first, float first_epsilon, const ConstArray& second, float second_epsilon,
                   const std::optional<ConstArray>& query_norm, const std::optional<ConstArray>& key_norm,
                   float head_epsilon, const Linear& qkv, const Linear& output, const Linear& gate_up,
                   const Linear& down, bool rotary);
    // What a layer asks of attention, for `run`. layer: of the pool.
    void set_attention(std::int64_t number, std::int64_t layer, float scale, std::int64_t window, float softcap,
                       const std::optional<Floats1>& sinks);
    // Packed rows that `begin` takes; of a model whose embedding is its head, that head.
    void set_embedding(const Linear& embedding);
    void set_head(const ConstArray& norm, float epsilon, const Linear& head);

    // Buffers of a step of T tokens.
    void bind(const Indices1& ids, const Array& residual, const Array& query, const Array& key, const Array& value,
              const ConstArray& attended, const ConstArray& cos, const ConstArray& sin);
    // Which rows' logits are wanted, and where they go.
    void want(const Indices1& rows, const Array& logits);

    void begin();
    void enter(std::int64_t layer) { pass(-1, layer); }
    void leave(std::int64_t layer) { pass(layer, -1); }
    void advance(std::int64_t layer) { pass(layer, layer + 1); }
    // Enters `first`, attends and goes on, and leaves `last`.
    void run(std::int64_t first, std::int64_t last, const StepAttention& attention);
    void finish();

  private:
    void pass(std::int64_t leaving, std::int64_t entering);
    void go(const Layer* leaving, const Layer* entering);
    void enter_layer(const Layer& layer);
    void leave_layer(const Layer& layer);
    void make_room(std::int64_t rows);
    void normalize(const Norm& norm);
    void turn(const Layer& layer, std::int64_t token, std::int64_t first, std::int64_t last, bool quickly);

    bool in_tiles() const;
    void reserve_scratch(std::int64_t rows);
    Scratch scratch_of(std::int64_t rows) const;
    void run_panels(const Layer* leaving, const Layer* entering, bool wide);
    void leave_panels(const Layer& layer, const Scratch& scratch, Taken* taken, const Layer* entering);
    void enter_panels(const Layer& layer, const Scratch& scratch, Taken& taken);
    Pieces projected(const Layer& layer) const;
    // Of a head; 0 if panels hold parts of two.
    std::int64_t head_panels() const { return head_dim_ % kPanel == 0 ? head_dim_ / kPanel : 0; }
    std::int64_t block_rows() const;
    void run_blocks(const Layer* leaving, const Layer* entering, std::int64_t rows);
    void leave_block(const Layer& layer, std::int64_t row, std::int64_t count, const Scratch& scratch,
                     const char* then);
    void enter_block(const Layer& layer, std::int64_t row, std::int64_t count, const Scratch& scratch);
    std::int64_t query_width() const { return query_heads_ * head_dim_; }
    std::int64_t kv_width() const { return kv_heads_ * head_dim_; }
    Norm norm_of(const char* name, const ConstArray& weight, std::int64_t width, float epsilon) const;
    char* at(const Array& array) const { return static_cast<char*>(array.data()); }
    Input input(const void* data, std::int64_t width) const { return Input{data, element_, width, tokens_}; }

    const std::int64_t hidden_, query_heads_, kv_heads_, head_dim_, intermediate_, rotary_;
    const Element element_;
    std::vector<Layer> layers_;
    std::optional<Norm> last_;
    const Linear *embedding_ = nullptr, *head_ = nullptr;
    std::int64_t tokens_ = 0, room_ = 0;
    Array residual_, query_, key_, value_, logits_;
    ConstArray attended_, cos_, sin_;
    Indices1 ids_, rows_;
    std::unique_ptr<FloatBuffer> normed_, active_, scratch_;
    std::int64_t scratch_floats_ = 0, scratch_room_ = 0;  // of a thread, of all
    bool alone_ = false;  // whether some layer's products must not depend on how many rows there are
};

}  // namespace kvist
