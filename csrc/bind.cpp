// The door between Python and the CPU kernels: names and documentation only.
// What each kernel does stands in its own file; what it may be given is checked with check.hpp.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace nb = nanobind;

void bind_blocks(nb::module_& module);
void bind_attention(nb::module_& module);
void bind_linear(nb::module_& module);
void bind_stack(nb::module_& module);

namespace {

std::string compiler() {
#if defined(__clang__)
    return std::string("clang ") + __clang_version__;
#elif defined(__GNUC__)
    return std::string("gcc ") + __VERSION__;
#else
    return "unknown";
#endif
}

// What every instruction in this library may assume; kernels choose more at run time.
std::vector<std::string> baseline_isa() {
    std::vector<std::string> names;
#ifdef __SSE2__
    names.emplace_back("sse2");
#endif
#ifdef __AVX2__
    names.emplace_back("avx2");
#endif
#ifdef __AVX512F__
    names.emplace_back("avx512f");
#endif
#ifdef __ARM_NEON
    names.emplace_back("neon");
#endif
    return names;
}

// What this processor offers beyond it.
std::vector<std::string> processor_isa() {
    std::vector<std::string> names;
#if defined(__x86_64__) || defined(__i386__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) names.emplace_back("avx2");
    if (__builtin_cpu_supports("fma")) names.emplace_back("fma");
    if (__builtin_cpu_supports("avx512f")) names.emplace_back("avx512f");
    if (__builtin_cpu_supports("avx512bw")) names.emplace_back("avx512bw");
    if (__builtin_cpu_supports("avx512vnni")) names.emplace_back("avx512vnni");
    if (__builtin_cpu_supports("avx512bf16")) names.emplace_back("avx512bf16");
#endif
    return names;
}

nb::dict build_info() {
    nb::dict info;
    info["version"] = KVIST_VERSION;
    info["compiler"] = compiler();
#ifdef _OPENMP
    info["openmp"] = true;
    info["threads"] = omp_get_max_threads();
#else
    info["openmp"] = false;
    info["threads"] = 1;
#endif
    info["baseline_isa"] = baseline_isa();
    info["processor_isa"] = processor_isa();
    return info;
}

}  // namespace

NB_MODULE(_C, module) {
    module.doc() = "CPU kernels over paged KV memory. Import torch first: one OpenMP runtime serves both.";
    module.def("version", [] { return std::string(KVIST_VERSION); },
               "Version of kvist that this library was built for.");
    module.def("build_info", &build_info,
               "How this library was built and what the processor offers: version, compiler, openmp, "
               "threads, baseline_isa, processor_isa.");
    bind_blocks(module);
    bind_attention(module);
    bind_linear(module);
    bind_stack(module);
}
