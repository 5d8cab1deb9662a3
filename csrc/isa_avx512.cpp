// The kernels for processors of level x86-64-v4; see CMakeLists.txt for the options.
#include "prefill.hpp"

const kvist::Kernels* kvist::avx512_kernels(Arithmetic arithmetic) { return in_fp32(arithmetic); }
