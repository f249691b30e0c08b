// Which instruction set runs, and the functions that others call.
#include "native.h"

#include "pool.h"

namespace {

using overspill::Kernels;

constexpr int PORTABLE = 0, AVX2 = 1, AVX512 = 2;

bool has(int which) {
#ifdef OVERSPILL_X86
    if (which == AVX2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (which == AVX512)
        return has(AVX2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
    return which == PORTABLE;
}

const Kernels& kernels(int which) {
#ifdef OVERSPILL_X86
    if (which == AVX512) return overspill::avx512;
    if (which == AVX2) return overspill::avx2;
#endif
    return overspill::portable;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// Grows with every change of what others call.
EXPORT int overspill_version() { return 4; }

// Whether this machine has an instruction set: 0 portable, 1 AVX2, 2 AVX-512.
EXPORT int overspill_has(int which) { return has(which); }

EXPORT void overspill_run_adam(const overspill_elements* on, const overspill_adam* h, int which, int threads) {
    const Kernels& found = kernels(which);
    overspill::share(on->count, threads, [&](std::int64_t begin, std::int64_t end) { found.adam(*on, *h, begin, end); });
}

EXPORT void overspill_run_sgd(const overspill_elements* on, const overspill_sgd* h, int which, int threads) {
    const Kernels& found = kernels(which);
    overspill::share(on->count, threads, [&](std::int64_t begin, std::int64_t end) { found.sgd(*on, *h, begin, end); });
}

EXPORT void overspill_run_adagrad(const overspill_elements* on, const overspill_adagrad* h, int which, int threads) {
    const Kernels& found = kernels(which);
    overspill::share(on->count, threads,
                     [&](std::int64_t begin, std::int64_t end) { found.adagrad(*on, *h, begin, end); });
}
