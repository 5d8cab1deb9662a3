#include "isa.hpp"

#include <cstdlib>
#include <cstring>

#if defined(KVIST_X86) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvist {
namespace {

#ifdef KVIST_X86
// Tiles are large, so a process has to ask for room to save them in. Asking twice does no harm.
bool tiles_permitted() {
#ifdef __linux__
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

// AMX has no name in __builtin_cpu_supports of the compilers we build with: leaf 7, EDX.
bool has_tiles() {
    unsigned a = 7, b = 0, c = 0, d = 0;
    __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;
    return (d & kBf16) != 0 && (d & kTile) != 0 && (d & kInt8) != 0;
}
#endif

const Kernels* own(Isa isa, Arithmetic arithmetic) {
    switch (isa) {
        case Isa::portable: return portable_kernels(arithmetic);
#ifdef KVIST_X86
        case Isa::avx2: return avx2_kernels(arithmetic);
        case Isa::avx512: return avx512_kernels(arithmetic);
        case Isa::avx512bf16: return avx512bf16_kernels(arithmetic);
        case Isa::amx: return amx_kernels(arithmetic);
#endif
        default: return nullptr;
    }
}

}  // namespace

const char* isa_name(Isa isa) {
    static constexpr const char* kNames[kIsas] = {"portable", "avx2", "avx512", "avx512bf16", "amx"};
    return kNames[static_cast<int>(isa)];
}

bool supported(Isa isa) {
#ifdef KVIST_X86
    __builtin_cpu_init();
    static const bool kAvx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                              __builtin_cpu_supports("bmi2");
    static const bool kAvx512 = kAvx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                                __builtin_cpu_supports("avx512vl");
    static const bool kBf16 = kAvx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
    static const bool kAmx = kBf16 && has_tiles() && tiles_permitted();
    switch (isa) {
        case Isa::portable: return true;
        case Isa::avx2: return kAvx2;
        case Isa::avx512: return kAvx512;
        case Isa::avx512bf16: return kBf16;
        case Isa::amx: return kAmx;
    }
    return false;
#else
    return isa == Isa::portable;
#endif
}

Isa chosen_isa() {
    const char* const asked = std::getenv("KVIST_ISA");
    Isa highest = Isa::portable;
    for (int level = 0; level < kIsas; ++level) {
        const auto isa = static_cast<Isa>(level);
        if (!supported(isa)) continue;
        if (asked != nullptr && std::strcmp(asked, isa_name(isa)) == 0) return isa;
        highest = isa;
    }
    return highest;
}

const Kernels& kernels(Isa isa, Arithmetic arithmetic) {
    for (int level = static_cast<int>(isa); level > 0; --level) {
        if (const Kernels* const found = own(static_cast<Isa>(level), arithmetic)) return *found;
    }
    return *own(Isa::portable, arithmetic);
}

}  // namespace kvist
