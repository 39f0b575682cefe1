// Adam and AdamW on the CPU, and the bf16 split master, on raw pointers. One update is, in plain IEEE fp32,
//
//     g = float(grad) * grad_scale              m = m + (g - m) * c1
//     g = g + wd * p        (Adam with L2)      v = v * beta2 + (c2 * g) * g
//     p = p * decay         (AdamW)             d = sqrt(v) * inv_sqrt_bc2 + eps
//                                               p = p + (neg_step * m) / d
//
// with the scalars computed in double by the caller and rounded once. Neither the instruction set nor the number
// of threads changes a bit. Arrays must not overlap. For bindings.cpp; gemini/kernels_reference.py is the definition.
#pragma once

#include <cstdint>

#include "formats.h"
#include "isa.h"

namespace gemini {

struct AdamScalars {
    float c1;            // 1 - beta1
    float c2;            // 1 - beta2
    float beta2;
    float decay;         // 1 - lr * weight_decay
    float wd;            // weight_decay
    float neg_step;      // -lr / (1 - beta1^step)
    float inv_sqrt_bc2;  // 1 / sqrt(1 - beta2^step)
    float eps;
    float grad_scale;
    bool decoupled;      // true: AdamW, false: Adam with L2
};

// weights: fp32 with residual == nullptr, or bf16 with int16 residuals. All arrays hold n elements.
void adam_update(Isa isa, void* weights, void* residual, void* exp_avg, void* exp_avg_sq, const void* grad,
                 Dtype grad_dtype, int64_t n, const AdamScalars& scalars);

// fp32 -> bf16 hi + int16 lo (a NaN becomes 0x7fc0, 0), and the exact inverse.
void split_master(Isa isa, const void* master, void* hi, void* lo, int64_t n);
void join_master(Isa isa, const void* hi, const void* lo, void* out, int64_t n);

}  // namespace gemini
