// The kernels for processors that multiply pairs of bf16 (AVX512_BF16); see CMakeLists.txt.
#include "prefill.hpp"

const kvist::Kernels* kvist::avx512bf16_kernels(Arithmetic arithmetic) {
    return arithmetic == Arithmetic::dot ? table<Dot>() : nullptr;
}
