// The kernels of cpu_update.h: a tile of 512 elements at a time, so that conversions go through L1 and the arithmetic
// stays one simple loop that every compiler vectorises. Memory-bound: what counts is bytes and one pass.
#include "cpu_update.h"

#include <algorithm>

#include "thread_pool.h"

namespace gemini {
namespace {

constexpr int64_t kTile = 512;
constexpr int64_t kCut = 64;  // threads meet at cache lines of every array, also of the 16-bit ones

template <class Rule>
struct Update {
    Arrays arrays;
    Rule rule;
};

template <size_t>
using State = f32_t*;

template <class Rule, size_t... I>
GEMINI_INLINE void update_tile(const Rule& given, f32_t* __restrict weights, const f32_t* __restrict grad, int64_t n,
                               std::index_sequence<I...>, State<I> __restrict... states) {
    const Rule rule = given;
    GEMINI_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) {
        float p = weights[i], own[] = {states[i]..., 0.f};
        rule.update(p, grad[i] * rule.grad_scale, own[I]...);
        weights[i] = p;
        ((states[i] = own[I]), ...);
    }
}

template <class Rule, class Grad, bool Split>
struct UpdateKernel {
    using Args = Update<Rule>;

    template <int VectorBytes>
    GEMINI_INLINE void range(const Args& a, int64_t begin, int64_t end) {
        part(a, begin, end, std::make_index_sequence<Rule::kStates>());
    }

    template <size_t... I>
    GEMINI_INLINE void part(const Args& a, int64_t begin, int64_t end, std::index_sequence<I...> states) {
        alignas(64) float widened[kTile];
        alignas(64) float p[kTile];
        for (int64_t at = begin; at < end; at += kTile) {
            const int64_t n = std::min(kTile, end - at);
            const f32_t* g = Grad::load(widened, static_cast<const typename Grad::Element*>(a.arrays.grad) + at, n);
            if (Split) {
                u16_t* hi = static_cast<u16_t*>(a.arrays.weights) + at;
                i16_t* lo = static_cast<i16_t*>(a.arrays.residual) + at;
                join_tile(p, hi, lo, n);
                update_tile(a.rule, p, g, n, states, static_cast<f32_t*>(a.arrays.states[I]) + at...);
                split_tile(hi, lo, p, n);
            } else {
                f32_t* weights = static_cast<f32_t*>(a.arrays.weights) + at;
                update_tile(a.rule, weights, g, n, states, static_cast<f32_t*>(a.arrays.states[I]) + at...);
            }
        }
    }
};

template <class Kernel>
void run(Isa isa, const typename Kernel::Args& args, int64_t n) {
    const RangeFn<Kernel> range = select<Kernel>(isa);
    parallel_for(n, kCut, [&](int64_t begin, int64_t end) { range(args, begin, end); });
}

template <class Rule, class Grad>
void run_rule(Isa isa, const Update<Rule>& a, int64_t n) {
    if (a.arrays.residual != nullptr) run<UpdateKernel<Rule, Grad, true>>(isa, a, n);
    else run<UpdateKernel<Rule, Grad, false>>(isa, a, n);
}

struct Master {
    f32_t* full;
    u16_t* hi;
    i16_t* lo;
};

struct SplitKernel {
    using Args = Master;

    template <int VectorBytes>
    GEMINI_INLINE void range(const Master& a, int64_t begin, int64_t end) {
        split_tile(a.hi + begin, a.lo + begin, a.full + begin, end - begin);
    }
};

struct JoinKernel {
    using Args = Master;

    template <int VectorBytes>
    GEMINI_INLINE void range(const Master& a, int64_t begin, int64_t end) {
        join_tile(a.full + begin, a.hi + begin, a.lo + begin, end - begin);
    }
};

}  // namespace

void update(Isa isa, const Arrays& arrays, Dtype grad_dtype, int64_t n, const Scalars& scalars) {
    with_rule(scalars, arrays, [&](auto rule) {
        using Rule = decltype(rule);
        const Update<Rule> a{arrays, rule};
        switch (grad_dtype) {
            case Dtype::f32: return run_rule<Rule, F32>(isa, a, n);
            case Dtype::bf16: return run_rule<Rule, BF16>(isa, a, n);
            case Dtype::f16: return run_rule<Rule, F16>(isa, a, n);
        }
    });
}

void split_master(Isa isa, const void* master, void* hi, void* lo, int64_t n) {
    f32_t* full = static_cast<f32_t*>(const_cast<void*>(master));  // read only in this direction
    run<SplitKernel>(isa, {full, static_cast<u16_t*>(hi), static_cast<i16_t*>(lo)}, n);
}

void join_master(Isa isa, const void* hi, const void* lo, void* out, int64_t n) {
    run<JoinKernel>(isa,
                    {static_cast<f32_t*>(out), static_cast<u16_t*>(const_cast<void*>(hi)),
                     static_cast<i16_t*>(const_cast<void*>(lo))},
                    n);
}

}  // namespace gemini
