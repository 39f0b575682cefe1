// The kernels of gradients: copy or add, with the sums of squares in the same pass, the bits of ../cpu_grad.h. Blocks of
// 4096 are summed by warps anywhere on the device; the thread block that comes last adds them to tiles in their order, so
// that one kernel does it all and no bit depends on who came when. Launched by gemini/kernels/cuda.py.
#include "grad_body.cuh"

namespace gemini::cuda {

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
            add_squares<squared_in<What, Source>()>(own, lane, sum);
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

__global__ void __launch_bounds__(kThreads) clip_kernel(const double* tiles, const int64_t* ends, int64_t count,
                                                        double max_norm, double* totals, ClipPlaces places) {
    for (int64_t i = threadIdx.x; i < count; i += kThreads) totals[i] = total(tiles, i == 0 ? 0 : ends[i - 1], ends[i]);
    __syncthreads();
    if (threadIdx.x == 0) clip(totals, count, max_norm, places);
}

}  // namespace gemini::cuda
