// Reads memory as fast as a loop can, and prints bytes a second of each pass of several loops.
// usage: read_loops THREADS BYTES ROUNDS

#define _GNU_SOURCE
#include <omp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

typedef uint64_t vec __attribute__((vector_size(64)));

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

// One run from beginning to end, eight lines at a time.
static uint64_t straight(const vec *p, size_t lines, size_t ahead) {
    vec a = {0}, b = {0}, c = {0}, d = {0};
    for (size_t i = 0; i + 8 <= lines; i += 8) {
        if (ahead)
            for (int k = 0; k < 8; ++k) __builtin_prefetch(p + i + ahead + k, 0, 2);
        a ^= p[i] ^ p[i + 4];
        b ^= p[i + 1] ^ p[i + 5];
        c ^= p[i + 2] ^ p[i + 6];
        d ^= p[i + 3] ^ p[i + 7];
    }
    a ^= b ^ c ^ d;
    return a[0] ^ a[1] ^ a[2] ^ a[3] ^ a[4] ^ a[5] ^ a[6] ^ a[7];
}

// Four runs side by side: more pages, and so more of the hardware's prefetchers, at work.
static uint64_t four(const vec *p, size_t lines, size_t ahead) {
    size_t part = lines / 4;
    vec a = {0}, b = {0}, c = {0}, d = {0};
    for (size_t i = 0; i + 2 <= part; i += 2) {
        if (ahead)
            for (int k = 0; k < 4; ++k) __builtin_prefetch(p + k * part + i + ahead, 0, 2);
        a ^= p[i] ^ p[i + 1];
        b ^= p[part + i] ^ p[part + i + 1];
        c ^= p[2 * part + i] ^ p[2 * part + i + 1];
        d ^= p[3 * part + i] ^ p[3 * part + i + 1];
    }
    a ^= b ^ c ^ d;
    return a[0] ^ a[1] ^ a[2] ^ a[3] ^ a[4] ^ a[5] ^ a[6] ^ a[7];
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    int threads = atoi(argv[1]);
    size_t bytes = strtoull(argv[2], 0, 10) / (64 * 8 * threads) * (64 * 8 * threads);
    int rounds = atoi(argv[3]);
    size_t lines = bytes / 64 / threads;
    size_t page = 1 << 21;
    vec *data = aligned_alloc(page, (bytes + page - 1) / page * page);
    if (!data) return 1;
    madvise(data, bytes, MADV_HUGEPAGE);
    struct {
        const char *name;
        uint64_t (*read)(const vec *, size_t, size_t);
        size_t ahead;
    } loops[] = {
        {"one run", straight, 0},   {"one run, prefetch 2 KiB", straight, 32},
        {"one run, prefetch 8 KiB", straight, 128},
        {"four runs", four, 0},     {"four runs, prefetch 8 KiB", four, 128},
    };
    omp_set_num_threads(threads);
#pragma omp parallel
    {
        vec *mine = data + omp_get_thread_num() * lines;
        for (size_t i = 0; i < lines; ++i) mine[i] = (vec){i, 1, 2, 3, 4, 5, 6, 7};
    }
    uint64_t sink = 0;
    printf("{");
    int count = sizeof loops / sizeof *loops;
    for (int l = 0; l < count; ++l) {
        printf("%s\"%s\": [", l ? ", " : "", loops[l].name);
        for (int r = 0; r < rounds; ++r) {
            double start_s = now_s();
#pragma omp parallel reduction(^ : sink)
            sink ^= loops[l].read(data + omp_get_thread_num() * lines, lines, loops[l].ahead);
            printf("%s%.0f", r ? ", " : "", bytes / (now_s() - start_s));
        }
        printf("]");
    }
    printf("}\n");
    fprintf(stderr, "%llu\n", (unsigned long long)sink);
    free(data);
    return 0;
}
