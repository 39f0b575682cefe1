// The gradient kernels on a CUDA device: copy or add, with the sums of squares in the same pass, the bits of cpu_grad.h.
// And from those sums, without the host, the factor that clips. For bindings.cpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "update.h"

namespace gemini::cuda {

// Where one call leaves what it finds; all in device memory. `blocks` holds a double per 4096 elements of the tensor,
// `tiles` one per 2^20; `arrived` is 0 before and after. `nonfinite` becomes 1 if a tile's sum is not finite, and is
// left alone otherwise: several calls may share it.
struct NormPlaces {
    double* blocks;
    double* tiles;
    unsigned* arrived;
    int* nonfinite;
};

// dst = src (of the same format, or fp32) with the sums of squares of dst; enqueued on `stream`.
void copy_grad(const Stream& stream, void* dst, Dtype dst_dtype, const void* src, Dtype src_dtype, int64_t n, const NormPlaces& places);

// acc (fp32) += src, with those of the new acc.
void accumulate_grad(const Stream& stream, void* acc, const void* src, Dtype src_dtype, int64_t n, const NormPlaces& places);

// The 24 bits of hi (bf16) and lo (int8) += src, rounded to them, or = src without `adding`; with the sums of hi.
void sum_grad24(const Stream& stream, void* hi, void* lo, const void* src, Dtype src_dtype, int64_t n, bool adding,
                const NormPlaces& places);

// Those of src alone.
void sum_squares(const Stream& stream, const void* src, Dtype src_dtype, int64_t n, const NormPlaces& places);

// One number each, in device memory; nonfinite is 0 or 1.
struct ClipPlaces {
    double* norm;
    float* factor;
    int* nonfinite;
};

// What clipping to `max_norm` multiplies gradients by, from the sums of their tiles, those of gradient i before `ends[i]`:
// each gradient's are added in order, then those of all `count`, for which `totals` has room. norm is the root of that,
// factor is min(1, max_norm / (norm + 1e-6)), rounded to fp32 once; where the norm is not finite it is 1.
void clip_factor(const Stream& stream, const double* tiles, const int64_t* ends, int64_t count, double max_norm,
                 double* totals, const ClipPlaces& places);

}  // namespace gemini::cuda
