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

#include "held.hpp"
#include "isa.hpp"

namespace nb = nanobind;

void bind_attention(nb::module_& module);
void bind_linear(nb::module_& module);
void bind_stack(nb::module_& module);
void bind_bandwidth(nb::module_& module);
void bind_write(nb::module_& module);

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

// Instruction sets that there are kernels for and that this processor has, in ascending order.
std::vector<std::string> processor_isa() {
    std::vector<std::string> names;
    for (int level = 0; level < kvist::kIsas; ++level) {
        const auto isa = static_cast<kvist::Isa>(level);
        if (kvist::supported(isa)) names.emplace_back(kvist::isa_name(isa));
    }
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
    info["isa"] = processor_isa();
    return info;
}

}  // namespace

NB_MODULE(_C, module) {
    // An engine lives until its process ends, and its kernels with it.
    nb::set_leak_warnings(false);
    module.doc() = "CPU kernels over paged KV memory. Import torch first: one OpenMP runtime serves both.";
    module.def("version", [] { return std::string(KVIST_VERSION); },
               "Version of kvist that this library was built for.");
    module.def("build_info", &build_info,
               "How this library was built and what the processor offers: version, compiler, openmp, "
               "threads, isa.");
    module.def("held_bytes", [] { return kvist::held_bytes.load(std::memory_order_relaxed); },
               "Bytes that kernels hold from the system now, in this process: workspaces and buffers of stacks. Packed "
               "weights are tensors and not counted.");
    nb::enum_<kvist::Isa>(module, "Isa", "Instruction sets that there are kernels for.")
        .value("portable", kvist::Isa::portable)
        .value("avx2", kvist::Isa::avx2)
        .value("avx512", kvist::Isa::avx512)
        .value("avx512bf16", kvist::Isa::avx512bf16)
        .value("amx", kvist::Isa::amx);
    module.def("chosen_isa", &kvist::chosen_isa,
               "What KVIST_ISA names, else, or where the processor has no such set, the highest it has.");
    bind_write(module);
    bind_attention(module);
    bind_linear(module);
    bind_stack(module);
    bind_bandwidth(module);
}
