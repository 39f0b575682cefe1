// The kernels of update.h: one pass over a chunk, as many segments as it has, bound by the memory of the device.
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "check.cuh"
#include "compact_body.cuh"
#include "update_body.cuh"

namespace gemini::cuda {
namespace {

template <class Rule, Dtype Grad, bool Split, bool Aligned>
__global__ void __launch_bounds__(kThreads) update_kernel(const __grid_constant__ Launch<Rule> launch) {
    thread_of_launch<Grad, Split, Aligned>(launch, blockIdx.x, static_cast<int>(threadIdx.x));
}

template <Dtype Grad, bool Split, class Rule>
void start(cudaStream_t stream, const Launch<Rule>& launch, bool aligned) {
    const dim3 blocks(static_cast<unsigned>(launch.first_block[launch.count]));
    if (aligned) update_kernel<Rule, Grad, Split, true><<<blocks, kThreads, 0, stream>>>(launch);
    else update_kernel<Rule, Grad, Split, false><<<blocks, kThreads, 0, stream>>>(launch);
    check(cudaGetLastError(), "starting the kernel of an update");
}

template <Dtype Grad, class Rule>
void start(cudaStream_t stream, const Launch<Rule>& launch, bool aligned) {
    if (launch.arrays.residual != nullptr) start<Grad, true>(stream, launch, aligned);
    else start<Grad, false>(stream, launch, aligned);
}

template <class Rule, Dtype Grad, bool Aligned>
__global__ void __launch_bounds__(kThreads) compact_kernel(const __grid_constant__ Launch<Rule> launch) {
    if (launch.stop != nullptr && *launch.stop != 0) return;
    int number;
    const int64_t at = place_in(launch, blockIdx.x, static_cast<int>(threadIdx.x), number);
    const auto& segment = launch.segments[number];
    CompactThread<Grad, Aligned, Rule> thread;
    thread.begin(launch.arrays, segment, at, launch.grad_scale != nullptr ? *launch.grad_scale : segment.rule.grad_scale);
#pragma unroll
    for (int k = 0; k < Rule::kStates; ++k) {
#pragma unroll
        for (int lane = 1; lane < kThreadsPerScale; lane *= 2) {
            const uint32_t other = __shfl_xor_sync(0xffffffffu, thread.largest[k], lane);
            thread.largest[k] = other > thread.largest[k] ? other : thread.largest[k];
        }
    }
    thread.end(launch.arrays, segment.begin, launch.dithers[number]);
}

template <Dtype Grad, class Rule>
void start_compact(cudaStream_t stream, const Launch<Rule>& launch, bool aligned) {
    if constexpr (Rule::kSquares == kNotCompact) {
        throw std::invalid_argument("a rule without a compact form");
    } else {
        const dim3 blocks(static_cast<unsigned>(launch.first_block[launch.count]));
        if (aligned) compact_kernel<Rule, Grad, true><<<blocks, kThreads, 0, stream>>>(launch);
        else compact_kernel<Rule, Grad, false><<<blocks, kThreads, 0, stream>>>(launch);
        check(cudaGetLastError(), "starting the kernel of a compact update");
    }
}

__global__ void __launch_bounds__(kThreads) split_kernel(const float* master, uint16_t* hi, uint16_t* lo, int64_t n) {
    const int64_t stride = int64_t{gridDim.x} * kThreads;
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < n; i += stride) split(master[i], hi[i], lo[i]);
}

__global__ void __launch_bounds__(kThreads) join_kernel(const uint16_t* hi, const uint16_t* lo, float* out, int64_t n) {
    const int64_t stride = int64_t{gridDim.x} * kThreads;
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < n; i += stride) out[i] = join(hi[i], lo[i]);
}

unsigned blocks_for(int64_t n) {
    const int64_t blocks = (n + kThreads - 1) / kThreads;
    return static_cast<unsigned>(blocks < 65536 ? blocks : 65536);
}

}  // namespace

void update(const Stream& stream, const Arrays& arrays, Dtype grad_dtype, const std::vector<Segment>& segments,
            const float* grad_scale, const int* stop) {
    const OnDevice device(stream.device);
    const auto on = static_cast<cudaStream_t>(stream.handle);
    for_each_launch(arrays, segments, grad_scale, stop, [&](const auto& launch, bool aligned) {
        switch (grad_dtype) {
            case Dtype::f32: return start<Dtype::f32>(on, launch, aligned);
            case Dtype::bf16: return start<Dtype::bf16>(on, launch, aligned);
            case Dtype::f16: return start<Dtype::f16>(on, launch, aligned);
        }
    });
}

void update_compact(const Stream& stream, const Arrays& arrays, Dtype grad_dtype, const std::vector<Segment>& segments,
                    const float* grad_scale, const int* stop) {
    const OnDevice device(stream.device);
    const auto on = static_cast<cudaStream_t>(stream.handle);
    for_each_launch(arrays, segments, grad_scale, stop, [&](const auto& launch, bool aligned) {
        switch (grad_dtype) {
            case Dtype::f32: return start_compact<Dtype::f32>(on, launch, aligned);
            case Dtype::bf16: return start_compact<Dtype::bf16>(on, launch, aligned);
            case Dtype::f16: return start_compact<Dtype::f16>(on, launch, aligned);
        }
    });
}

void split_master(const Stream& stream, const void* master, void* hi, void* lo, int64_t n) {
    if (n == 0) return;
    const OnDevice device(stream.device);
    split_kernel<<<blocks_for(n), kThreads, 0, static_cast<cudaStream_t>(stream.handle)>>>(
        static_cast<const float*>(master), static_cast<uint16_t*>(hi), static_cast<uint16_t*>(lo), n);
    check(cudaGetLastError(), "starting the split kernel");
}

void join_master(const Stream& stream, const void* hi, const void* lo, void* out, int64_t n) {
    if (n == 0) return;
    const OnDevice device(stream.device);
    join_kernel<<<blocks_for(n), kThreads, 0, static_cast<cudaStream_t>(stream.handle)>>>(
        static_cast<const uint16_t*>(hi), static_cast<const uint16_t*>(lo), static_cast<float*>(out), n);
    check(cudaGetLastError(), "starting the join kernel");
}

}  // namespace gemini::cuda
