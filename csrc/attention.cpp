// Paged attention, cut into jobs, and the jobs shared out among threads.
//
//     decode    (sequence, split of 256 tokens, KV head)  -> sums, then one row a query head
//     prefill   (sequence, some query tokens, KV head)    -> rows
//
// Neither the batch nor the number of threads enters the arithmetic of a result: they only decide
// who computes which job. What a job does stands in attend.hpp and prefill.hpp; how calls come here, and what they
// are checked for, in step_attention.cpp.
#include "attention.hpp"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "threads.hpp"

namespace kvist {
namespace {

// Below so many bytes of K and V, waking the threads costs more than they save.
constexpr std::int64_t kParallelBytes = 64 << 10;

// Of a decode: one part in so many is left over when each thread has its share, in so many pieces a thread.
// A piece costs 2-3 us: its first tiles were not fetched ahead, and what is fetched behind its last is not used.
constexpr std::int64_t kLeftOver = 8, kPiecesLeft = 2;

// Rows of a prefill's job: enough that K and V, read once for all of them, cost little; more where
// every thread still gets several jobs.
constexpr std::int64_t kJobRows = 192, kMostJobRows = 576, kJobsPerThread = 8;

// ---- decode

// Where a share of the work begins: `done` tile-heads of the whole come before it. Whole heads of a
// split, so that it is one job's.
struct Place {
    std::int64_t split, head;
};

Place place_of(const std::vector<Contexts::Split>& splits, const std::vector<std::int64_t>& before,
               std::int64_t heads, std::int64_t done) {
    if (done >= before.back() * heads) return Place{static_cast<std::int64_t>(splits.size()), 0};
    const auto above = std::upper_bound(before.begin(), before.end(), done / heads);
    const std::int64_t split = above - before.begin() - 1;
    const std::int64_t tiles = before[split + 1] - before[split];
    return Place{split, (done - before[split] * heads) / tiles};
}

}  // namespace

void run_decode(const Call& call, const Fresh* fresh, Workspace& workspace) {
    const Contexts& contexts = *call.contexts;
    const Geometry& g = call.geometry;
    const std::int64_t queries = call.queries(), heads = g.heads;
    const auto& splits = contexts.splits();
    const auto count = static_cast<std::int64_t>(splits.size());

    const Workspace::Use use(workspace);
    std::vector<std::int64_t> before(count + 1, 0);  // tiles of all splits before one
    for (std::int64_t s = 0; s < count; ++s) before[s + 1] = before[s] + splits[s].end - splits[s].begin;
    const std::int64_t work = before.back() * heads;
    const std::int64_t work_bytes = work * kTileSlots * (g.key_dim + g.value_dim) * element_bytes(g.element);
    const int threads = work_bytes < kParallelBytes ? 1 : most_threads();

    // Partial results lie as [split][Q]; the parts of one query head are Q apart.
    const std::int64_t scratch_bytes = up(call.kernels->decode_scratch(g), 64);
    char* const memory = workspace.reserve(threads * scratch_bytes + count * queries * (g.value_pad + 2) * 4 + 64);
    auto* const sums = reinterpret_cast<float*>(memory + threads * scratch_bytes);
    float* const tops = sums + count * queries * g.value_pad;
    float* const weights = tops + count * queries;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        const int thread = this_thread(), team = team_threads();
        char* const scratch = memory + thread * scratch_bytes;
        const auto attend = [&](std::int64_t begin, std::int64_t behind) {
            const Place from = place_of(splits, before, heads, begin), to = place_of(splits, before, heads, behind);
            for (std::int64_t s = from.split; s <= to.split && s < count; ++s) {
                const std::int64_t head = s == from.split ? from.head : 0, end = s == to.split ? to.head : heads;
                if (head >= end) continue;
                const std::int64_t r = splits[s].sequence, at = s * queries;
                Rows asked = call.query;
                asked.data += contexts.query_start(r) * asked.token_bytes;
                if (fresh != nullptr) {
                    if (s + 1 == contexts.first_split(r + 1)) put_heads(*fresh, contexts.query_start(r), head, end);
                    if (s + 1 < count && s + 2 == contexts.first_split(splits[s + 1].sequence + 1)) {
                        expect_heads(*fresh, contexts.query_start(splits[s + 1].sequence), 0, heads);
                    }
                }
                call.kernels->decode(g,
                                     DecodeJob{contexts.tiles() + splits[s].begin, contexts.tiles() + splits[s].end,
                                               contexts.tiles() + contexts.first(r + 1), head, end, asked,
                                               sums + at * g.value_pad, tops + at, weights + at},
                                     scratch);
            }
        };
        // A share of its own for each thread, in one piece, since a piece's beginning is slow; the rest goes to
        // whoever is done first.
        const std::int64_t own = team > 1 ? work - work / kLeftOver : work, pieces = team * kPiecesLeft;
        attend(own * thread / team, own * (thread + 1) / team);
        if (team > 1) {
#pragma omp for schedule(dynamic) nowait
            for (std::int64_t i = 0; i < pieces; ++i) {
                attend(own + (work - own) * i / pieces, own + (work - own) * (i + 1) / pieces);
            }
        }
#pragma omp barrier
#pragma omp for schedule(static)
        for (std::int64_t i = 0; i < contexts.num_decodes() * queries; ++i) {
            const std::int64_t r = i / queries, q = i % queries, at = contexts.first_split(r) * queries + q;
            const std::int64_t token = contexts.query_start(r);
            call.kernels->merge(MergeJob{sums + at * g.value_pad, tops + at, weights + at,
                                         contexts.first_split(r + 1) - contexts.first_split(r), queries, g.value_dim,
                                         g.value_pad, call.sinks ? call.sinks + q : nullptr,
                                         call.out.data + token * call.out.token_bytes + q * call.out.head_bytes,
                                         call.out.element, call.lse ? call.lse + token * queries + q : nullptr});
        }
    }
}

// ---- prefill

void run_prefill(const Call& call, Workspace& workspace) {
    const Contexts& contexts = *call.contexts;
    const Geometry& g = call.geometry;
    const std::int64_t queries = call.queries();

    const Workspace::Use use(workspace);
    struct Some {
        std::int64_t sequence, begin, tokens;
    };
    const std::int64_t tokens = contexts.tokens() - contexts.num_decodes();
    const std::int64_t even = tokens * queries / (most_threads() * kJobsPerThread);
    const std::int64_t most = std::max<std::int64_t>(1, std::clamp(even, kJobRows, kMostJobRows) / g.group);
    std::vector<Some> jobs;
    std::int64_t longest = 1;
    for (std::int64_t r = contexts.num_decodes(); r < contexts.sequences(); ++r) {
        for (std::int64_t begin = 0; begin < contexts.queries(r); begin += most) {
            jobs.push_back(Some{r, begin, std::min(most, contexts.queries(r) - begin)});
            longest = std::max(longest, jobs.back().tokens);
        }
    }
    // The longest context first, so that no thread is left with it at the end.
    std::stable_sort(jobs.begin(), jobs.end(), [&](const Some& a, const Some& b) {
        return contexts.position(a.sequence) + a.begin > contexts.position(b.sequence) + b.begin;
    });
    const auto count = static_cast<std::int64_t>(jobs.size()) * g.heads;
    const int threads = static_cast<int>(std::min<std::int64_t>(most_threads(), std::max<std::int64_t>(count, 1)));
    const std::int64_t scratch_bytes = up(call.kernels->prefill_scratch(g, longest), 64);
    char* const memory = workspace.reserve(threads * scratch_bytes);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        char* const scratch = memory + this_thread() * scratch_bytes;
        call.kernels->begin();
#pragma omp for schedule(dynamic)
        for (std::int64_t i = 0; i < count; ++i) {
            const Some& job = jobs[i / g.heads];
            const std::int64_t r = job.sequence, token = contexts.query_start(r) + job.begin;
            Rows asked = call.query, found = call.out;
            asked.data += token * asked.token_bytes;
            found.data += token * found.token_bytes;
            call.kernels->prefill(g,
                                  PrefillJob{contexts.tiles() + contexts.first(r),
                                             contexts.tiles() + contexts.first(r + 1), i % g.heads, job.tokens,
                                             static_cast<std::int32_t>(contexts.position(r) + job.begin),
                                             static_cast<std::int32_t>(contexts.window()), asked, found,
                                             call.lse ? call.lse + token * queries : nullptr, call.sinks},
                                  scratch);
        }
        call.kernels->end();
    }
}

}  // namespace kvist
