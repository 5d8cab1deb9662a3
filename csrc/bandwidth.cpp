// How fast this machine reads memory: what every figure in GB/s is compared with.
#include <chrono>
#include <cstdint>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "check.hpp"
#include "isa.hpp"

namespace nb = nanobind;

namespace {

using namespace kvist;

// Seconds that all threads took to read `data` once, each a share of its own, side by side.
double read_seconds(nb::handle object, Isa isa, std::int64_t streams, bool ahead) {
    Sizes sizes("read_seconds");
    const Tensor data("data", object);
    const Size count = sizes.symbol("n");
    sizes.shape("data", data, {count});
    sizes.type("data", data, Type::f32);
    sizes.contiguous("data", data, 1);
    sizes.require(streams == 1 || streams == 2 || streams == 4, "streams", "must be 1, 2 or 4");
    sizes.require(supported(isa), "isa", "is ", isa_name(isa), ", which this processor does not have");
    const Kernels& kernels = kvist::kernels(isa, Arithmetic::rows);
    const char* const begin = data.data();
    const std::int64_t bytes = count.value() * 4;

    nb::gil_scoped_release release;
    const auto start = std::chrono::steady_clock::now();
#pragma omp parallel
    {
#ifdef _OPENMP
        const int thread = omp_get_thread_num(), team = omp_get_num_threads();
#else
        const int thread = 0, team = 1;
#endif
        const std::int64_t from = bytes / team * thread, to = bytes / team * (thread + 1);
        kernels.read(begin + from, to - from, streams, ahead);
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

void bind_bandwidth(nb::module_& module) {
    module.def("read_seconds", &read_seconds, nb::arg("data"), nb::arg("isa"), nb::arg("streams"), nb::arg("ahead"),
               "Seconds to read fp32 [n] once with all threads, as 1, 2 or 4 streams a thread, with software "
               "prefetches or without.");
}
