// The kernels for any processor; see CMakeLists.txt for the options.
#include "prefill.hpp"

const kvist::Kernels* kvist::portable_kernels(Arithmetic arithmetic) { return in_fp32(arithmetic); }
