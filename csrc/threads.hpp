// How many threads there may be, and which of them this is.
#pragma once

#ifdef _OPENMP
#include <omp.h>
#endif

namespace kvist {

inline int most_threads() {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

inline int this_thread() {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

inline int team_threads() {
#ifdef _OPENMP
    return omp_get_num_threads();
#else
    return 1;
#endif
}

}  // namespace kvist
