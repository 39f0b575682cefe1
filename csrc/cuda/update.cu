// The kernels of an update: one pass over a chunk, as many segments as it has, bound by the memory of the device. What is
// launched, with which arguments, stands in gemini/kernels/cuda.py.
#include "compact_body.cuh"
#include "update_body.cuh"

namespace gemini::cuda {

template <class Rule, Dtype Grad, bool Split, bool Aligned>
__global__ void __launch_bounds__(kThreads) update_kernel(const __grid_constant__ Launch<Rule> launch) {
    thread_of_launch<Grad, Split, Aligned>(launch, blockIdx.x, static_cast<int>(threadIdx.x));
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

__global__ void __launch_bounds__(kThreads) split_kernel(const float* master, uint16_t* hi, uint16_t* lo, int64_t n) {
    const int64_t stride = int64_t{gridDim.x} * kThreads;
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < n; i += stride) split(master[i], hi[i], lo[i]);
}

__global__ void __launch_bounds__(kThreads) join_kernel(const uint16_t* hi, const uint16_t* lo, float* out, int64_t n) {
    const int64_t stride = int64_t{gridDim.x} * kThreads;
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < n; i += stride) out[i] = join(hi[i], lo[i]);
}

}  // namespace gemini::cuda
