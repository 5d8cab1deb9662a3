// A stack's layers where the processor multiplies tiles: rows lie as the next product takes them.
//
// Few rows: each thread takes panels of outputs, and prepares a product's inputs for itself, which costs less
// than waiting for another thread that does. Many rows: each thread takes blocks of them.
#include <algorithm>
#include <atomic>
#include <string>

#include "fixed.hpp"
#include "rows.hpp"
#include "stack.hpp"
#include "threads.hpp"

namespace kvist {

// A thread's memory.
struct Scratch {
    float* rows;    // inputs of a product
    char* middle;   // what an MLP holds, [rows][intermediate] bf16
    char* decoded;  // a panel in bf16
    char* row;      // one
};

// How many pieces of a product were taken, beside the first of each thread.
struct Taken {
    std::atomic<std::int64_t> pieces{0};
};

// A product in pieces that the threads of a team take as they come to them: one that shares its core with
// somebody else takes fewer. Each knows its next piece while it is at one, so that memory can be fetched.
struct Pieces {
    explicit Pieces(const Matrix& of, std::int64_t unit = 1)
        : matrix(of), size(piece_panels(of.panels(), unit, kPieces)), count((of.panels() + size - 1) / size) {}

    Panels piece(std::int64_t index) const {
        return Panels{matrix, index * size, std::min(matrix.panels(), (index + 1) * size)};
    }
    // Where this thread's first piece begins.
    const char* begin() const { return piece(std::min<std::int64_t>(this_thread(), count - 1)).begin(); }

    // `then` is what is read after this thread's last piece.
    template <typename Multiply>
    void each(Taken& taken, const char* then, const Multiply& multiply) const {
        for (std::int64_t index = this_thread(); index < count;) {
            const std::int64_t next = team_threads() + taken.pieces.fetch_add(1, std::memory_order_relaxed);
            multiply(piece(index), next < count ? piece(next).begin() : then);
            index = next;
        }
    }

    const Matrix& matrix;
    const std::int64_t size, count;
};

namespace {

// By rows: at most so many a block, and at least; and what a block's rows may take of a cache.
constexpr std::int64_t kMostBlock = 256, kLeastBlock = 64, kBlockBytes = 3 << 19;

std::int64_t padded_rows(std::int64_t count) { return (count + kTile - 1) / kTile * kTile; }

// Rows as a matrix takes them: whole numbers for int8, tiles of bf16 else.
class Prepared {
  public:
    Prepared(const Matrix& matrix, std::int64_t count, const Scratch& scratch)
        : matrix_(matrix),
          scratch_(scratch),
          tiled_{reinterpret_cast<char*>(scratch.rows), matrix.inputs, count},
          fixed_(Fixed::in(scratch.rows, matrix.inputs, count)) {}

    static std::int64_t floats(std::int64_t inputs, std::int64_t count) { return Fixed::floats(inputs, count); }

    bool whole() const { return matrix_.weights == Weights::i8; }

    void take(const char* rows) const {
        if (whole()) {
            fix_rows(rows, matrix_.inputs * 2, fixed_);
        } else {
            tile_rows(rows, matrix_.inputs * 2, tiled_);
        }
    }

    void take_normed(const char* rows, const Norm& norm) const {
        if (!whole()) return tile_normed(rows, norm.weight.data(), norm.epsilon, tiled_);
        for (std::int64_t row = 0; row < fixed_.count; ++row, rows += matrix_.inputs * 2) {
            rms_norm(Element::bf16, rows, norm.weight.data(), matrix_.inputs, norm.epsilon, scratch_.row);
            fix_row(scratch_.row, row, fixed_);
        }
    }

    void multiply(const Panels& panels, const char* then, const Sink& sink) const { multiply(tiled_, panels, then, sink); }

    // By rows that are in tiles already, if it is tiles that the matrix takes.
    void multiply(const Tiled& tiled, const Panels& panels, const char* then, const Sink& sink) const {
        if (whole()) {
            multiply_fixed_tiles(panels, fixed_, then, sink);
        } else {
            multiply_tiled(panels, tiled, scratch_.decoded, then, sink);
        }
    }

  private:
    const Matrix& matrix_;
    const Scratch& scratch_;
    const Tiled tiled_;
    const Fixed fixed_;
};

// What an MLP makes of gates and ups and multiplies again, `middle` having been filled by all threads that fill it.
struct Activated {
    Activated(const Matrix& down, std::int64_t count, char* middle)
        : tiled{middle, down.inputs, count}, by_tiles(tiled), by_rows(middle, down.inputs),
          whole(down.weights == Weights::i8), data(middle) {}

    const Sink& sink() const { return whole ? static_cast<const Sink&>(by_rows) : by_tiles; }
    Prepared prepare(const Matrix& down, const Scratch& scratch) const {
        const Prepared rows(down, tiled.count, scratch);
        if (whole) rows.take(data);
        return rows;
    }

    const Tiled tiled;
    const SiluTiled by_tiles;
    const SiluRows by_rows;
    const bool whole;
    const char* const data;
};

}  // namespace

bool Stack::in_tiles() const {
    return !alone_ && element_ == Element::bf16 && multiply_path(tokens_, false) == std::string("tiles");
}

// Makes room for each thread to work on so many rows.
void Stack::reserve_scratch(std::int64_t rows) {
    const std::int64_t inputs = std::max({hidden_, query_width(), intermediate_});
    scratch_floats_ = Prepared::floats(inputs, rows) + (rows + 1 + kPanel) * inputs / 2;
    const std::int64_t needed = scratch_floats_ * most_threads();
    if (needed <= scratch_room_) return;
    scratch_.reset();
    scratch_room_ = 0;
    scratch_ = std::make_unique<FloatBuffer>(needed);
    scratch_room_ = needed;
}

Scratch Stack::scratch_of(std::int64_t rows) const {
    const std::int64_t inputs = std::max({hidden_, query_width(), intermediate_});
    float* const own = scratch_->data + this_thread() * scratch_floats_;
    float* const middle = own + Prepared::floats(inputs, rows);
    float* const decoded = middle + rows * inputs / 2;
    return Scratch{own, reinterpret_cast<char*>(middle), reinterpret_cast<char*>(decoded),
                   reinterpret_cast<char*>(decoded + kPanel * inputs / 2)};
}

void Stack::run_panels(const Layer* leaving, const Layer* entering, bool wide) {
    const std::int64_t rows = padded_rows(tokens_);
    reserve_scratch(rows);
    make_room(rows);
    Taken taken[4];
#pragma omp parallel if (wide)
    {
        const Scratch scratch = scratch_of(rows);
        if (leaving != nullptr) leave_panels(*leaving, scratch, taken, entering);
        if (leaving != nullptr && entering != nullptr) {
#pragma omp barrier
        }
        if (entering != nullptr) enter_panels(*entering, scratch, taken[3]);
    }
}

void Stack::leave_panels(const Layer& layer, const Scratch& scratch, Taken* taken, const Layer* entering) {
    const Pieces output(layer.output->matrix), gate_up(layer.gate_up->matrix), down(layer.down->matrix);
    const Prepared attended(output.matrix, tokens_, scratch), normed(gate_up.matrix, tokens_, scratch);
    const Activated active(down.matrix, tokens_, reinterpret_cast<char*>(active_->data));
    const AddRows onto_residual(at(residual_), hidden_);
    const char* const then = entering == nullptr ? nullptr : projected(*entering).begin();
    attended.take(static_cast<const char*>(attended_.data()));
    output.each(taken[0], gate_up.begin(), [&](const Panels& panels, const char* next) {
        attended.multiply(panels, next, onto_residual);
    });
#pragma omp barrier
    normed.take_normed(at(residual_), layer.second);
    gate_up.each(taken[1], down.begin(), [&](const Panels& panels, const char* next) {
        normed.multiply(panels, next, active.sink());
    });
#pragma omp barrier
    const Prepared rows = active.prepare(down.matrix, scratch);
    down.each(taken[2], then, [&](const Panels& panels, const char* next) {
        rows.multiply(active.tiled, panels, next, onto_residual);
    });
}

// Pieces of the merged projection: whole heads where they can be, which are turned by whom they are from.
Pieces Stack::projected(const Layer& layer) const {
    return Pieces(layer.qkv->matrix, std::max<std::int64_t>(head_panels(), 1));
}

void Stack::enter_panels(const Layer& layer, const Scratch& scratch, Taken& taken) {
    const Pieces qkv = projected(layer);
    const Prepared normed(qkv.matrix, tokens_, scratch);
    const SplitRows sink(at(query_), at(key_), at(value_), query_width(), kv_width());
    const std::int64_t unit = head_panels(), heads = query_heads_ + kv_heads_;
    const bool turned = layer.rotary || layer.query || layer.key;
    normed.take_normed(at(residual_), layer.first);
    qkv.each(taken, nullptr, [&](const Panels& panels, const char* next) {
        normed.multiply(panels, next, sink);
        if (!turned || unit == 0) return;
        const std::int64_t first = std::min(heads, panels.first / unit), last = std::min(heads, panels.last / unit);
        for (std::int64_t t = 0; t < tokens_; ++t) turn(layer, t, first, last, true);
    });
    if (!turned || unit > 0) return;
#pragma omp barrier
#pragma omp for schedule(static)
    for (std::int64_t t = 0; t < tokens_; ++t) turn(layer, t, 0, heads, true);
}

// Rows of a block when tokens are shared out by rows, or 0: too few for all threads, or a block of
// what an MLP holds would not stay in a core's second cache.
std::int64_t Stack::block_rows() const {
    const std::int64_t fits = kBlockBytes / ((hidden_ + intermediate_) * 2) / kTile * kTile;
    const std::int64_t most = std::min(kMostBlock, fits), threads = most_threads();
    if (most < kLeastBlock || tokens_ < threads * kLeastBlock) return 0;
    // As many blocks as threads, or a multiple of it.
    const std::int64_t blocks = (tokens_ + most * threads - 1) / (most * threads) * threads;
    return padded_rows((tokens_ + blocks - 1) / blocks);
}

void Stack::run_blocks(const Layer* leaving, const Layer* entering, std::int64_t rows) {
    reserve_scratch(rows);
#pragma omp parallel
    {
        const Scratch scratch = scratch_of(rows);
#pragma omp for schedule(dynamic)
        for (std::int64_t row = 0; row < tokens_; row += rows) {
            const std::int64_t count = std::min(rows, tokens_ - row);
            if (leaving != nullptr) {
                leave_block(*leaving, row, count, scratch, entering == nullptr ? nullptr : entering->qkv->matrix.packed);
            }
            if (entering != nullptr) enter_block(*entering, row, count, scratch);
        }
    }
}

void Stack::leave_block(const Layer& layer, std::int64_t row, std::int64_t count, const Scratch& scratch,
                        const char* then) {
    const Panels output = Panels::all(layer.output->matrix), gate_up = Panels::all(layer.gate_up->matrix);
    const Panels down = Panels::all(layer.down->matrix);
    const Prepared attended(output.matrix, count, scratch), normed(gate_up.matrix, count, scratch);
    const Activated active(down.matrix, count, scratch.middle);
    char* const residual = at(residual_) + row * hidden_ * 2;
    const AddRows onto_residual(residual, hidden_);
    attended.take(static_cast<const char*>(attended_.data()) + row * query_width() * 2);
    attended.multiply(output, gate_up.begin(), onto_residual);
    normed.take_normed(residual, layer.second);
    normed.multiply(gate_up, down.begin(), active.sink());
    active.prepare(down.matrix, scratch).multiply(active.tiled, down, then, onto_residual);
}

void Stack::enter_block(const Layer& layer, std::int64_t row, std::int64_t count, const Scratch& scratch) {
    const Prepared normed(layer.qkv->matrix, count, scratch);
    normed.take_normed(at(residual_) + row * hidden_ * 2, layer.first);
    normed.multiply(Panels::all(layer.qkv->matrix), nullptr,
                    SplitRows(at(query_) + row * query_width() * 2, at(key_) + row * kv_width() * 2,
                              at(value_) + row * kv_width() * 2, query_width(), kv_width()));
    if (!layer.rotary && !layer.query && !layer.key) return;
    for (std::int64_t t = row; t < row + count; ++t) turn(layer, t, 0, query_heads_ + kv_heads_, true);
}

}  // namespace kvist
