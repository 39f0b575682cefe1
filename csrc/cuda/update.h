// Updates by the rules of rules.h on a CUDA device over a chunk of several segments, on raw device pointers: the bits of
// cpu_update.h. For bindings.cpp.
#pragma once

#include <cstdint>
#include <vector>

#include "../rules.h"

namespace gemini::cuda {

// Where a kernel is enqueued: a device, and a cudaStream_t of it (null: the default one).
struct Stream {
    int device;
    void* handle;
};

// Elements [begin, end) of the arrays share their scalars: the params of one group inside a chunk.
struct Segment {
    int64_t begin;
    int64_t end;
    Scalars scalars;
    uint32_t dither;  // of compact states: where the Weyl sequence of these elements begins
};

// Enqueues the update and returns; nothing waits. `grad_scale`, if it is not null, is a float
// in device memory that replaces the scalars' own (what clipping left there); `stop`, if it is not null, an int there: the
// update does nothing at all if it is not zero when the kernel runs (a gradient was not finite). Segments ascend and do
// not overlap. Throws std::runtime_error with CUDA's own words.
void update(const Stream& stream, const Arrays& arrays, Dtype grad_dtype, const std::vector<Segment>& segments,
            const float* grad_scale, const int* stop);

// The same of compact states, whose segments begin with a block of 64 elements.
void update_compact(const Stream& stream, const Arrays& arrays, Dtype grad_dtype, const std::vector<Segment>& segments,
                    const float* grad_scale, const int* stop);

// fp32 -> bf16 hi + int16 lo, and the exact inverse, enqueued likewise.
void split_master(const Stream& stream, const void* master, void* hi, void* lo, int64_t n);
void join_master(const Stream& stream, const void* hi, const void* lo, void* out, int64_t n);

}  // namespace gemini::cuda
