// One body, three compilations. A kernel is written once as a struct with a static
// `range<VectorBytes>(args, begin, end)` of plain loops; select<Kernel>(isa) hands back that body compiled
// for the baseline of the machine ("scalar"), AVX2 or AVX-512. Which one runs never changes a bit: all is
// plain IEEE arithmetic in the written order, and the build forbids contraction (-ffp-contract=off).
// For cpu_update.cpp, cpu_grad.cpp and stream.cpp.
#pragma once

#include <cstdint>
#include <stdexcept>

#if defined(__FAST_MATH__)
#error "built with -ffast-math: the kernels would no longer give the bits they promise"
#endif

#if defined(__x86_64__)
#define GEMINI_X86 1
#endif

// Bodies must end up inside a function that carries the target attribute; a call would run at SSE2 speed.
#define GEMINI_INLINE static inline __attribute__((always_inline))

// "No two pointers of this loop overlap" (the caller has checked): without it the vectoriser gives up on 5 arrays.
#if defined(__clang__)
#define GEMINI_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define GEMINI_INDEPENDENT _Pragma("GCC ivdep")
#endif

#if defined(GEMINI_X86)
#define GEMINI_AVX2 __attribute__((target("avx2")))
#if defined(__clang__)
#define GEMINI_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#else
// Features by name, since arch= names fell back to SSE2 on some CPUs; the width, since some tunings stop at 256 bits.
#define GEMINI_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif
#endif

namespace gemini {

enum class Isa : int { scalar = 0, avx2 = 1, avx512 = 2 };

inline bool runs_here(Isa isa) {
    switch (isa) {
        case Isa::scalar:
            return true;
#if defined(GEMINI_X86)
        case Isa::avx2:
            return __builtin_cpu_supports("avx2");
        case Isa::avx512:
            return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
        default:  // Python may make one of any number
            return false;
    }
}

template <class Kernel>
using RangeFn = void (*)(const typename Kernel::Args&, int64_t begin, int64_t end);

template <class Kernel>
void range_scalar(const typename Kernel::Args& args, int64_t begin, int64_t end) {
    Kernel::template range<16>(args, begin, end);
}

#if defined(GEMINI_X86)
template <class Kernel>
GEMINI_AVX2 void range_avx2(const typename Kernel::Args& args, int64_t begin, int64_t end) {
    Kernel::template range<32>(args, begin, end);
}

template <class Kernel>
GEMINI_AVX512 void range_avx512(const typename Kernel::Args& args, int64_t begin, int64_t end) {
    Kernel::template range<64>(args, begin, end);
}
#endif

template <class Kernel>
RangeFn<Kernel> select(Isa isa) {
    if (!runs_here(isa)) throw std::invalid_argument("this CPU cannot run the requested instruction set");
#if defined(GEMINI_X86)
    if (isa == Isa::avx512) return range_avx512<Kernel>;
    if (isa == Isa::avx2) return range_avx2<Kernel>;
#endif
    return range_scalar<Kernel>;
}

}  // namespace gemini
