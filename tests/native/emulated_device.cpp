// Runs the bodies of the CUDA kernels on the host, thread after thread and phase after phase, for test_cuda_bodies.py:
// the text that nvcc compiles for the device, with the bits that a machine without a GPU can check.
#include <type_traits>
#include <vector>

#include "../../csrc/cuda/update_body.cuh"
#include "../../csrc/cuda/compact_body.cuh"
#include "../../csrc/cuda/grad_body.cuh"

using namespace gemini;
using namespace gemini::cuda;

namespace {

template <Dtype Grad, bool Split, bool Aligned, class Rule>
void run_launch(const Launch<Rule>& launch) {
    for (int64_t block = 0; block < launch.first_block[launch.count]; ++block)
        for (int thread = 0; thread < kThreads; ++thread) thread_of_launch<Grad, Split, Aligned>(launch, block, thread);
}

template <Dtype Grad, class Rule>
void run_launch(const Launch<Rule>& launch, bool aligned) {
    const bool split = launch.arrays.residual != nullptr;
    if (split && aligned) return run_launch<Grad, true, true>(launch);
    if (split) return run_launch<Grad, true, false>(launch);
    if (aligned) return run_launch<Grad, false, true>(launch);
    run_launch<Grad, false, false>(launch);
}

template <Dtype Grad, bool Aligned, class Rule>
void run_compact(const Launch<Rule>& launch) {
    if (launch.stop != nullptr && *launch.stop != 0) return;
    for (int64_t block = 0; block < launch.first_block[launch.count]; ++block)
        for (int first = 0; first < kThreads; first += kThreadsPerScale) {
            CompactThread<Grad, Aligned, Rule> threads[kThreadsPerScale];
            uint32_t largest[Rule::kStates + 1] = {};
            int number = 0;
            for (int i = 0; i < kThreadsPerScale; ++i) {
                const int64_t at = place_in(launch, block, first + i, number);
                threads[i].begin(launch.arrays, launch.segments[number], at,
                                 launch.grad_scale != nullptr ? *launch.grad_scale : launch.segments[number].rule.grad_scale);
                for (int k = 0; k < Rule::kStates; ++k) largest[k] = std::max(largest[k], threads[i].largest[k]);
            }
            for (auto& thread : threads) {
                std::copy(largest, largest + Rule::kStates, thread.largest);
                thread.end(launch.arrays, launch.segments[number].begin, launch.dithers[number]);
            }
        }
}

template <Dtype Grad, class Rule>
void run_compact(const Launch<Rule>& launch, bool aligned) {
    if constexpr (Rule::kSquares != kNotCompact) {
        if (aligned) return run_compact<Grad, true>(launch);
        run_compact<Grad, false>(launch);
    }
}

template <Doing What, Dtype Source, bool Aligned>
void run_block(void* dst, void* lo, const void* src, int64_t block, int64_t n, double* blocks) {
    WarpShared shared;
    double sums[kLanes] = {};
    const int64_t begin = block * kBlock, end = begin + kBlock < n ? begin + kBlock : n;
    for (int64_t at = begin; at < end; at += kStep) {
        for (int lane = 0; lane < kLanes; ++lane)
            GradLane<What, Source, Aligned>::take(shared, lane, dst, lo, src, at + lane * kPerThread, n);
        for (int lane = 0; lane < kLanes; ++lane) add_squares(shared, lane, sums[lane]);
    }
    for (int lane = 0; lane < kLanes; ++lane) shared.lanes[lane] = sums[lane];
    for (int half = kLanes / 2; half > 0; half /= 2)
        for (int lane = 0; lane < kLanes; ++lane) add_lanes(shared, lane, half);
    blocks[block] = shared.lanes[0];
}

template <Doing What, Dtype Source>
void run_grad(void* dst, void* lo, const void* src, int64_t n, double* blocks) {
    const bool aligned = (reinterpret_cast<uintptr_t>(dst) | reinterpret_cast<uintptr_t>(src)) % sizeof(Sixteen) == 0 &&
                         reinterpret_cast<uintptr_t>(lo) % sizeof(Eight) == 0;
    for (int64_t block = 0; block * kBlock < n; ++block) {
        if (aligned) run_block<What, Source, true>(dst, lo, src, block, n, blocks);
        else run_block<What, Source, false>(dst, lo, src, block, n, blocks);
    }
}

template <Dtype Source>
void run_grad(int doing, void* dst, void* lo, const void* src, int64_t n, double* blocks) {
    switch (static_cast<Doing>(doing)) {
        case Doing::read: return run_grad<Doing::read, Source>(dst, lo, src, n, blocks);
        case Doing::copy: return run_grad<Doing::copy, Source>(dst, lo, src, n, blocks);
        case Doing::widen: return run_grad<Doing::widen, Source>(dst, lo, src, n, blocks);
        case Doing::accumulate: return run_grad<Doing::accumulate, Source>(dst, lo, src, n, blocks);
        case Doing::first24: return run_grad<Doing::first24, Source>(dst, lo, src, n, blocks);
        case Doing::add24: return run_grad<Doing::add24, Source>(dst, lo, src, n, blocks);
    }
}

}  // namespace

// `bounds`: begin and end of each segment; `rules`: the name of its rule; `scalars`: those of all, one after the other.
extern "C" void update(void* weights, void* residual, const uintptr_t* states, int num_states, const void* grad,
                       int grad_dtype, const int64_t* bounds, const char* const* rules, const float* scalars,
                       const int* num_scalars, int count, const float* grad_scale, const int* stop) {
    std::vector<Segment> segments;
    for (int i = 0; i < count; scalars += num_scalars[i++])
        segments.push_back({bounds[2 * i], bounds[2 * i + 1], make_scalars(rules[i], {scalars, scalars + num_scalars[i]}), 0});
    const auto address = [](const void* array) { return reinterpret_cast<uintptr_t>(array); };
    const Arrays arrays =
        arrays_at(address(weights), address(residual), address(grad), {states, states + num_states});
    for_each_launch(arrays, segments, grad_scale, stop, [&](const auto& launch, bool aligned) {
        switch (static_cast<Dtype>(grad_dtype)) {
            case Dtype::f32: return run_launch<Dtype::f32>(launch, aligned);
            case Dtype::bf16: return run_launch<Dtype::bf16>(launch, aligned);
            case Dtype::f16: return run_launch<Dtype::f16>(launch, aligned);
        }
    });
}

// The same of compact states.
extern "C" void update_compact(void* weights, void* residual, const uintptr_t* states, const uintptr_t* scales,
                               int num_states, const void* grad, int grad_dtype, const int64_t* bounds,
                               const char* const* rules, const float* scalars, const int* num_scalars,
                               const uint32_t* dithers, int count, const float* grad_scale, const int* stop) {
    std::vector<Segment> segments;
    for (int i = 0; i < count; scalars += num_scalars[i++])
        segments.push_back({bounds[2 * i], bounds[2 * i + 1], make_scalars(rules[i], {scalars, scalars + num_scalars[i]}),
                            dithers[i]});
    const auto address = [](const void* array) { return reinterpret_cast<uintptr_t>(array); };
    const Arrays arrays = compact_arrays_at(address(weights), address(residual), address(grad),
                                            {states, states + num_states}, {scales, scales + num_states});
    for_each_launch(arrays, segments, grad_scale, stop, [&](const auto& launch, bool aligned) {
        switch (static_cast<Dtype>(grad_dtype)) {
            case Dtype::f32: return run_compact<Dtype::f32>(launch, aligned);
            case Dtype::bf16: return run_compact<Dtype::bf16>(launch, aligned);
            case Dtype::f16: return run_compact<Dtype::f16>(launch, aligned);
        }
    });
}

// `doing`: 0 reads, 1 copies, 2 widens, 3 accumulates, 4 and 5 begin and add up in 24 bits, the lower ones in `lo`; `blocks`
// takes a double per 4096 elements.
extern "C" void grad(int doing, void* dst, void* lo, const void* src, int src_dtype, int64_t n, double* blocks) {
    switch (static_cast<Dtype>(src_dtype)) {
        case Dtype::f32: return run_grad<Dtype::f32>(doing, dst, lo, src, n, blocks);
        case Dtype::bf16: return run_grad<Dtype::bf16>(doing, dst, lo, src, n, blocks);
        case Dtype::f16: return run_grad<Dtype::f16>(doing, dst, lo, src, n, blocks);
    }
}

// What the thread block that comes last does with the sums of blocks.
extern "C" void add_tiles(const double* blocks, int64_t count, double* tiles, int* nonfinite) {
    for (int64_t first = 0; first < count; first += kTileBlocks) {
        double sum = 0.0;
        for (int64_t i = first; i < count && i < first + kTileBlocks; ++i) sum = add(sum, blocks[i]);
        tiles[first / kTileBlocks] = sum;
        if (!is_finite(sum)) *nonfinite = 1;
    }
}

extern "C" void clip_factor(const double* tiles, const int64_t* ends, int64_t count, double max_norm, double* totals,
                            double* norm, float* factor, int* nonfinite) {
    for (int64_t i = 0; i < count; ++i) totals[i] = total(tiles, i == 0 ? 0 : ends[i - 1], ends[i]);
    clip(totals, count, max_norm, {norm, factor, nonfinite});
}

extern "C" void split_master(const float* master, uint16_t* hi, uint16_t* lo, int64_t n) {
    for (int64_t i = 0; i < n; ++i) split(master[i], hi[i], lo[i]);
}

extern "C" void join_master(const uint16_t* hi, const uint16_t* lo, float* out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = join(hi[i], lo[i]);
}
