// The Adam kernels of cpu_adam.h: a tile of 512 elements at a time, so that conversions go through L1 and the
// arithmetic stays one simple loop that every compiler vectorises. Memory-bound: what counts is bytes and one pass.
#include "cpu_adam.h"

#include <algorithm>
#include <cmath>

#include "thread_pool.h"

namespace gemini {
namespace {

constexpr int64_t kTile = 512;
constexpr int64_t kCut = 64;  // threads meet at cache lines of every array, also of the 16-bit ones

struct Adam {
    void* weights;
    void* residual;
    f32_t* exp_avg;
    f32_t* exp_avg_sq;
    const void* grad;
    AdamScalars scalars;
};

template <bool Decoupled>
GEMINI_INLINE void update_tile(f32_t* __restrict weights, f32_t* __restrict exp_avg, f32_t* __restrict exp_avg_sq,
                               const f32_t* __restrict grad, int64_t n, const AdamScalars& s) {
    const float c1 = s.c1, c2 = s.c2, beta2 = s.beta2, decay = s.decay, wd = s.wd, neg_step = s.neg_step;
    const float inv_sqrt_bc2 = s.inv_sqrt_bc2, eps = s.eps, grad_scale = s.grad_scale;
    GEMINI_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) {
        float p = weights[i], m = exp_avg[i], v = exp_avg_sq[i];
        float g = grad[i] * grad_scale;
        if (!Decoupled) g = g + wd * p;
        m = m + (g - m) * c1;
        v = v * beta2 + (c2 * g) * g;
        const float d = std::sqrt(v) * inv_sqrt_bc2 + eps;
        if (Decoupled) p = p * decay;
        p = p + (neg_step * m) / d;
        weights[i] = p;
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
    }
}

template <class Grad, bool Split, bool Decoupled>
struct AdamKernel {
    using Args = Adam;

    template <int VectorBytes>
    GEMINI_INLINE void range(const Adam& a, int64_t begin, int64_t end) {
        alignas(64) float widened[kTile];
        alignas(64) float p[kTile];
        for (int64_t at = begin; at < end; at += kTile) {
            const int64_t n = std::min(kTile, end - at);
            f32_t* m = a.exp_avg + at;
            f32_t* v = a.exp_avg_sq + at;
            const f32_t* g = Grad::load(widened, static_cast<const typename Grad::Element*>(a.grad) + at, n);
            if (Split) {
                u16_t* hi = static_cast<u16_t*>(a.weights) + at;
                i16_t* lo = static_cast<i16_t*>(a.residual) + at;
                join_tile(p, hi, lo, n);
                update_tile<Decoupled>(p, m, v, g, n, a.scalars);
                split_tile(hi, lo, p, n);
            } else {
                update_tile<Decoupled>(static_cast<f32_t*>(a.weights) + at, m, v, g, n, a.scalars);
            }
        }
    }
};

template <class Kernel>
void run(Isa isa, const typename Kernel::Args& args, int64_t n) {
    const RangeFn<Kernel> range = select<Kernel>(isa);
    parallel_for(n, kCut, [&](int64_t begin, int64_t end) { range(args, begin, end); });
}

template <class Grad>
void adam_with_grad(Isa isa, const Adam& a, int64_t n) {
    const bool split = a.residual != nullptr;
    if (split && a.scalars.decoupled) return run<AdamKernel<Grad, true, true>>(isa, a, n);
    if (split) return run<AdamKernel<Grad, true, false>>(isa, a, n);
    if (a.scalars.decoupled) return run<AdamKernel<Grad, false, true>>(isa, a, n);
    return run<AdamKernel<Grad, false, false>>(isa, a, n);
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

void adam_update(Isa isa, void* weights, void* residual, void* exp_avg, void* exp_avg_sq, const void* grad,
                 Dtype grad_dtype, int64_t n, const AdamScalars& scalars) {
    const Adam a{weights, residual, static_cast<f32_t*>(exp_avg), static_cast<f32_t*>(exp_avg_sq), grad, scalars};
    switch (grad_dtype) {
        case Dtype::f32: return adam_with_grad<F32>(isa, a, n);
        case Dtype::bf16: return adam_with_grad<BF16>(isa, a, n);
        case Dtype::f16: return adam_with_grad<F16>(isa, a, n);
    }
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
