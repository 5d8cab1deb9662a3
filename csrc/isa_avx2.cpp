// The kernels for processors of level x86-64-v3; see CMakeLists.txt for the options.
#include "prefill.hpp"

const kvist::Kernels* kvist::avx2_kernels(Arithmetic arithmetic) { return in_fp32(arithmetic); }
