// The gradient kernels of grad.h. Blocks of 4096 are summed by warps anywhere on the device; the thread block that comes
// last adds them to tiles in their order, so that one kernel does it all and no bit depends on who came when.
#include <cuda_runtime.h>

#include "check.cuh"
#include "grad.h"
#include "grad_body.cuh"

namespace gemini::cuda {
namespace {

constexpr int kWarps = kThreads / kLanes;

__device__ void add_tiles(const NormPlaces& places, int64_t blocks, double (*shared)[kTileBlocks]) {
    const int warp = static_cast<int>(threadIdx.x) / kLanes, lane = static_cast<int>(threadIdx.x) % kLanes;
    for (int64_t tile = warp; tile * kTileBlocks < blocks; tile += kWarps) {
        const int64_t first = tile * kTileBlocks;
        const int count = static_cast<int>(blocks - first < kTileBlocks ? blocks - first : kTileBlocks);
        for (int i = lane; i < count; i += kLanes) shared[warp][i] = __ldcg(places.blocks + first + i);
        __syncwarp();
        if (lane == 0) {
            double sum = 0.0;
            for (int i = 0; i < count; ++i) sum = add(sum, shared[warp][i]);
            places.tiles[tile] = sum;
            if (!is_finite(sum)) *places.nonfinite = 1;
        }
        __syncwarp();
    }
}

template <Doing What, Dtype Source, bool Aligned>
__global__ void __launch_bounds__(kThreads) grad_kernel(void* dst, void* lo, const void* src, int64_t n,
                                                        NormPlaces places) {
    __shared__ union Shared {
        WarpShared warps[kWarps];
        double tiles[kWarps][kTileBlocks];
        __device__ Shared() {}
    } shared;
    const int warp = static_cast<int>(threadIdx.x) / kLanes, lane = static_cast<int>(threadIdx.x) % kLanes;
    const int64_t blocks = (n + kBlock - 1) / kBlock, block = int64_t{blockIdx.x} * kWarps + warp;
    if (block < blocks) {
        WarpShared& own = shared.warps[warp];
        const int64_t begin = block * kBlock, end = begin + kBlock < n ? begin + kBlock : n;
        double sum = 0.0;
        for (int64_t at = begin; at < end; at += kStep) {
            GradLane<What, Source, Aligned>::take(own, lane, dst, lo, src, at + lane * kPerThread, n);
            __syncwarp();
            add_squares(own, lane, sum);
            __syncwarp();
        }
        own.lanes[lane] = sum;
        for (int half = kLanes / 2; half > 0; half /= 2) {
            __syncwarp();
            add_lanes(own, lane, half);
        }
        if (lane == 0) places.blocks[block] = own.lanes[0];
    }
    __shared__ bool is_last;
    __threadfence();  // the sums above are seen by whoever sees this block counted
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(places.arrived, 1u) == gridDim.x - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    add_tiles(places, blocks, shared.tiles);
    if (threadIdx.x == 0) *places.arrived = 0;
}

template <Doing What, Dtype Source>
void start(const Stream& stream, void* dst, void* lo, const void* src, int64_t n, const NormPlaces& places) {
    if (n == 0) return;
    const OnDevice device(stream.device);
    const bool aligned = reinterpret_cast<uintptr_t>(dst) % sizeof(Sixteen) == 0 &&
                         reinterpret_cast<uintptr_t>(lo) % sizeof(Eight) == 0 &&
                         reinterpret_cast<uintptr_t>(src) % sizeof(Sixteen) == 0;
    const auto on = static_cast<cudaStream_t>(stream.handle);
    const auto blocks = static_cast<unsigned>((n + kBlock * kWarps - 1) / (kBlock * kWarps));
    if (aligned) grad_kernel<What, Source, true><<<blocks, kThreads, 0, on>>>(dst, lo, src, n, places);
    else grad_kernel<What, Source, false><<<blocks, kThreads, 0, on>>>(dst, lo, src, n, places);
    check(cudaGetLastError(), "starting a gradient kernel");
}

template <Doing What>
void start_from(const Stream& stream, void* dst, const void* src, Dtype src_dtype, int64_t n, const NormPlaces& places,
                void* lo = nullptr) {
    switch (src_dtype) {
        case Dtype::f32: return start<What, Dtype::f32>(stream, dst, lo, src, n, places);
        case Dtype::bf16: return start<What, Dtype::bf16>(stream, dst, lo, src, n, places);
        case Dtype::f16: return start<What, Dtype::f16>(stream, dst, lo, src, n, places);
    }
}

__global__ void __launch_bounds__(kThreads) clip_kernel(const double* tiles, const int64_t* ends, int64_t count,
                                                        double max_norm, double* totals, ClipPlaces places) {
    for (int64_t i = threadIdx.x; i < count; i += kThreads) totals[i] = total(tiles, i == 0 ? 0 : ends[i - 1], ends[i]);
    __syncthreads();
    if (threadIdx.x == 0) clip(totals, count, max_norm, places);
}

}  // namespace

void copy_grad(const Stream& stream, void* dst, Dtype dst_dtype, const void* src, Dtype src_dtype, int64_t n, const NormPlaces& places) {
    if (dst_dtype == src_dtype) start_from<Doing::copy>(stream, dst, src, src_dtype, n, places);
    else start_from<Doing::widen>(stream, dst, src, src_dtype, n, places);
}

void accumulate_grad(const Stream& stream, void* acc, const void* src, Dtype src_dtype, int64_t n, const NormPlaces& places) {
    start_from<Doing::accumulate>(stream, acc, src, src_dtype, n, places);
}

void sum_grad24(const Stream& stream, void* hi, void* lo, const void* src, Dtype src_dtype, int64_t n, bool adding,
                const NormPlaces& places) {
    if (adding) start_from<Doing::add24>(stream, hi, src, src_dtype, n, places, lo);
    else start_from<Doing::first24>(stream, hi, src, src_dtype, n, places, lo);
}

void sum_squares(const Stream& stream, const void* src, Dtype src_dtype, int64_t n, const NormPlaces& places) {
    start_from<Doing::read>(stream, nullptr, src, src_dtype, n, places);
}

void clip_factor(const Stream& stream, const double* tiles, const int64_t* ends, int64_t count, double max_norm,
                 double* totals, const ClipPlaces& places) {
    const OnDevice device(stream.device);
    clip_kernel<<<1, kThreads, 0, static_cast<cudaStream_t>(stream.handle)>>>(tiles, ends, count, max_norm, totals, places);
    check(cudaGetLastError(), "starting the clip kernel");
}

}  // namespace gemini::cuda
