// Adam on a CUDA device over a chunk of several segments, on raw device pointers: the bits of cpu_adam.h. For bindings.cpp.
#pragma once

#include <cstdint>

#include "../cpu_adam.h"

namespace gemini::cuda {

// Where a kernel is enqueued: a device, and a cudaStream_t of it (null: the default one).
struct Stream {
    int device;
    void* handle;
};

// Elements [begin, end) of the arrays share their hyperparameters: the params of one group inside a chunk.
struct AdamSegment {
    int64_t begin;
    int64_t end;
    AdamScalars scalars;
};

// The arrays of a chunk, on one device: weights are fp32 with residual == nullptr, or bf16 with int16 residuals.
struct AdamArrays {
    void* weights;
    void* residual;
    void* exp_avg;
    void* exp_avg_sq;
    const void* grad;
};

// Enqueues the update and returns; nothing waits. `grad_scale`, if it is not null, is a float
// in device memory that replaces the scalars' own (what clipping left there); `stop`, if it is not null, an int there: the
// update does nothing at all if it is not zero when the kernel runs (a gradient was not finite). Segments ascend and do
// not overlap. Throws std::runtime_error with CUDA's own words.
void adam_update(const Stream& stream, const AdamArrays& arrays, Dtype grad_dtype, const AdamSegment* segments, int count,
                 const float* grad_scale, const int* stop);

// fp32 -> bf16 hi + int16 lo, and the exact inverse, enqueued likewise.
void split_master(const Stream& stream, const void* master, void* hi, void* lo, int64_t n);
void join_master(const Stream& stream, const void* hi, const void* lo, void* out, int64_t n);

}  // namespace gemini::cuda
