// What the kernels of one instruction set look like from outside, and which sets there are.
//
// Each isa_*.cpp is compiled for one set of instructions and offers the same few functions; nothing
// else in this library may assume more than the baseline. Jobs are plain numbers and pointers, which
// were checked before they got here.
#pragma once

#include <cstdint>

#include "element.hpp"

namespace kvist {

// In ascending order: a processor that has one has those before it, too.
enum class Isa { portable, avx2, avx512, avx512bf16, amx };
constexpr int kIsas = 5;

// How a product of a query and a key is computed, which follows from the dtypes and the packing.
enum class Arithmetic {
    rows,       // packing "lhkv-1": widened to fp32 row by row
    wide_bf16,  // packing "lhkv-2": both of a pair widened to fp32
    wide_fp16,
    dot,  // packing "lhkv-2" of bf16 with bf16 queries: products in bf16, sums in fp32
};

constexpr int kTileSlots = 16;  // slots that one vector of scores covers

// Up to sixteen neighbouring slots of one block, and which of them belong to a context.
struct Tile {
    std::int32_t block;
    std::int32_t position;  // of the token in the tile's first slot
    std::uint16_t part;     // which tile of its block
    std::uint16_t mask;     // bit s: slot s is part of the context
};

// Where K and V lie and how scores are made of them; the same for all jobs of a call.
struct Geometry {
    const char* pool;  // where the layer begins in block 0
    Element element;
    std::int64_t block_bytes, head_bytes, value_bytes;  // value_bytes: from a head's K to its V
    std::int64_t heads, group, key_dim, value_dim;
    std::int64_t key_pad, value_pad;  // rounded up to whole vectors
    float scale;                      // on query . key; positive
    float softcap;                    // scores become softcap * tanh(score / softcap); 0: they do not
};

// A tensor of rows [tokens, Q, dim]; strides in bytes, the elements of a row side by side.
struct Rows {
    char* data;
    Element element;
    std::int64_t token_bytes, head_bytes;
};

// One token of one sequence against some tiles, for some KV heads. Leaves sums that are not divided
// by their weight yet; tops are maxima of log2-scaled scores.
struct DecodeJob {
    const Tile *tiles, *end;
    const Tile* known;  // tiles up to here may be fetched ahead
    std::int64_t head, head_end;
    Rows query;                 // its token is the first
    float *sum, *top, *weight;  // [Q, value_pad], [Q], [Q]; only rows of these heads are written
};

// Some neighbouring query tokens of one sequence against its tiles, for one KV head.
struct PrefillJob {
    const Tile *tiles, *end;
    std::int64_t head, tokens;
    std::int32_t position;  // of the first query token
    std::int32_t window;    // positions that a query sees, its own included; 0: all before it
    Rows query, out;        // begin at the first of these tokens
    float* lse;             // may be null; rows as in `out`, Q floats a token
    const float* sinks;     // may be null; a logit a query head that takes weight and has no value
};

// Results of the splits of one query head, `stride` heads apart -> one row.
struct MergeJob {
    const float *sum, *top, *weight;
    std::int64_t splits, stride, value_dim, value_pad;
    const float* sink;  // may be null
    char* out;
    Element element;
    float* lse;  // may be null
};

// One head's row of a query or key, and what it becomes at its position.
struct RotateJob {
    const char* from;
    char* to;
    Element element;
    std::int64_t dim, rotary;  // the first `rotary` elements are turned; even
    const float *cos, *sin;    // [rotary]
};
constexpr std::int64_t kMostDims = 1024;  // of a row that is turned

struct Kernels {
    // Bytes of scratch memory that one thread needs for such jobs.
    std::int64_t (*decode_scratch)(const Geometry&);
    std::int64_t (*prefill_scratch)(const Geometry&, std::int64_t tokens);
    void (*decode)(const Geometry&, const DecodeJob&, char* scratch);
    void (*prefill)(const Geometry&, const PrefillJob&, char* scratch);
    void (*merge)(const MergeJob&);
    void (*rotate)(const RotateJob&);
    // `dim` elements as fp32; `to` has room for whole vectors of sixteen, which are written.
    void (*widen)(const char* from, Element element, std::int64_t dim, float* to);
    void (*read)(const char* data, std::int64_t bytes, std::int64_t streams, bool ahead);
    // A thread calls these around its prefill jobs.
    void (*begin)();
    void (*end)();
};

bool supported(Isa isa);
// What the environment variable KVIST_ISA names, else, or where that is none of these, the highest that
// the processor has. Read at each call.
Isa chosen_isa();
const char* isa_name(Isa isa);
// The kernels for some arithmetic that `isa`, which is supported, may use.
const Kernels& kernels(Isa isa, Arithmetic arithmetic);

// What each isa_*.cpp offers; null where it has nothing of its own.
const Kernels* portable_kernels(Arithmetic arithmetic);
#ifdef KVIST_X86
const Kernels* avx2_kernels(Arithmetic arithmetic);
const Kernels* avx512_kernels(Arithmetic arithmetic);
const Kernels* avx512bf16_kernels(Arithmetic arithmetic);
const Kernels* amx_kernels(Arithmetic arithmetic);
#endif

}  // namespace kvist
