// Runs the bodies of the CUDA kernels on the host, thread after thread and phase after phase, for test_cuda_bodies.py: the
// text that is compiled for the device, with the bits that a machine without a GPU can check.
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
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

template <Doing What, Dtype Source, bool Aligned>
void run_block(void* dst, void* lo, const void* src, int64_t block, int64_t n, double* blocks) {
    WarpShared shared;
    double sums[kLanes] = {};
    const int64_t begin = block * kBlock, end = begin + kBlock < n ? begin + kBlock : n;
    for (int64_t at = begin; at < end; at += kStep) {
        for (int lane = 0; lane < kLanes; ++lane)
            GradLane<What, Source, Aligned>::take(shared, lane, dst, lo, src, at + lane * kPerThread, n);
        for (int lane = 0; lane < kLanes; ++lane) add_squares<squared_in<What, Source>()>(shared, lane, sums[lane]);
    }
    for (int lane = 0; lane < kLanes; ++lane) shared.lanes[lane] = sums[lane];
    for (int half = kLanes / 2; half > 0; half /= 2)
        for (int lane = 0; lane < kLanes; ++lane) add_lanes(shared, lane, half);
    blocks[block] = shared.lanes[0];
}

// What the thread block that comes last does with the sums of blocks.
void add_tiles(const NormPlaces& places, int64_t count) {
    for (int64_t first = 0; first < count; first += kTileBlocks) {
        double sum = 0.0;
        for (int64_t i = first; i < count && i < first + kTileBlocks; ++i) sum = add(sum, places.blocks[i]);
        places.tiles[first / kTileBlocks] = sum;
        if (!is_finite(sum)) *places.nonfinite = 1;
    }
}

// A kernel is given what cuLaunchKernel is given: the number of blocks and where each of its arguments stands.
using Arguments = void* const*;
using Kernel = std::function<void(int64_t blocks, Arguments)>;
std::map<std::string, Kernel> kernels;

template <class T>
T& argument(Arguments arguments, int number) { return *static_cast<T*>(arguments[number]); }

void expect(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
}

template <Doing What, Dtype Source, bool Aligned>
void run_grad(int64_t blocks, Arguments arguments) {
    const auto n = argument<int64_t>(arguments, 3);
    const auto& places = argument<NormPlaces>(arguments, 4);
    const int64_t of_norm = (n + kBlock - 1) / kBlock;
    expect(blocks == (of_norm + kThreads / kLanes - 1) / (kThreads / kLanes), "blocks of a gradient kernel");
    expect(*places.arrived == 0, "nobody has arrived");
    void *dst = argument<void*>(arguments, 0), *lo = argument<void*>(arguments, 1);
    for (int64_t block = 0; block < of_norm; ++block)
        run_block<What, Source, Aligned>(dst, lo, argument<const void*>(arguments, 2), block, n, places.blocks);
    add_tiles(places, of_norm);
}

const char* name_of(Dtype dtype) {
    return dtype == Dtype::f32 ? "gemini::Dtype::f32" : dtype == Dtype::bf16 ? "gemini::Dtype::bf16" : "gemini::Dtype::f16";
}

std::string said(bool value) { return value ? "true" : "false"; }

template <class Rule, Dtype Grad, bool Aligned>
void add_update(const std::string& rule) {
    const auto run = [](auto body) {
        return [body](int64_t blocks, Arguments arguments) {
            const auto& launch = argument<Launch<Rule>>(arguments, 0);
            expect(launch.count > 0 && launch.first_block[launch.count] == blocks, "blocks of an update");
            expect(launch.arrays.num_states == Rule::kStates, "an update with states of another rule");
            body(launch);
        };
    };
    const std::string start = "<gemini::" + rule + ", " + name_of(Grad) + ", ", end = said(Aligned) + ">";
    kernels["update_kernel" + start + "true, " + end] = run([](const auto& l) { run_launch<Grad, true, Aligned>(l); });
    kernels["update_kernel" + start + "false, " + end] = run([](const auto& l) { run_launch<Grad, false, Aligned>(l); });
    if constexpr (Rule::kSquares != kNotCompact)
        kernels["compact_kernel" + start + end] = run([](const auto& l) { run_compact<Grad, Aligned>(l); });
}

template <class Rule, Dtype Grad>
void add_updates(const std::string& rule) {
    add_update<Rule, Grad, true>(rule);
    add_update<Rule, Grad, false>(rule);
}

template <class Rule>
void add_rule(const std::string& rule) {
    add_updates<Rule, Dtype::f32>(rule);
    add_updates<Rule, Dtype::bf16>(rule);
    add_updates<Rule, Dtype::f16>(rule);
}

template <Doing What, Dtype Source>
void add_grad(const std::string& doing) {
    const std::string start = "grad_kernel<gemini::cuda::Doing::" + doing + ", " + name_of(Source) + ", ";
    kernels[start + "true>"] = run_grad<What, Source, true>;
    kernels[start + "false>"] = run_grad<What, Source, false>;
}

template <Doing What>
void add_grads(const std::string& doing) {
    add_grad<What, Dtype::f32>(doing);
    add_grad<What, Dtype::bf16>(doing);
    add_grad<What, Dtype::f16>(doing);
}

void run_split(int64_t, Arguments arguments) {
    for (int64_t i = 0; i < argument<int64_t>(arguments, 3); ++i)
        split(argument<const float*>(arguments, 0)[i], argument<uint16_t*>(arguments, 1)[i],
              argument<uint16_t*>(arguments, 2)[i]);
}

void run_join(int64_t, Arguments arguments) {
    for (int64_t i = 0; i < argument<int64_t>(arguments, 3); ++i)
        argument<float*>(arguments, 2)[i] =
            join(argument<const uint16_t*>(arguments, 0)[i], argument<const uint16_t*>(arguments, 1)[i]);
}

void run_clip(int64_t, Arguments arguments) {
    const auto tiles = argument<const double*>(arguments, 0);
    const auto ends = argument<const int64_t*>(arguments, 1);
    const auto count = argument<int64_t>(arguments, 2);
    const auto totals = argument<double*>(arguments, 4);
    for (int64_t i = 0; i < count; ++i) totals[i] = total(tiles, i == 0 ? 0 : ends[i - 1], ends[i]);
    clip(totals, count, argument<double>(arguments, 3), argument<ClipPlaces>(arguments, 5));
}

const bool all_are_there = [] {
    add_rule<Adam<true>>("Adam<true>"), add_rule<Adam<false>>("Adam<false>"), add_rule<Sgd>("Sgd");
    add_rule<PlainSgd>("PlainSgd"), add_rule<Lion>("Lion"), add_rule<Average>("Average");
    add_grads<Doing::read>("read"), add_grads<Doing::copy>("copy"), add_grads<Doing::widen>("widen");
    add_grads<Doing::accumulate>("accumulate"), add_grads<Doing::first24>("first24"), add_grads<Doing::add24>("add24");
    kernels["split_kernel"] = run_split, kernels["join_kernel"] = run_join, kernels["clip_kernel"] = run_clip;
    return true;
}();

}  // namespace

// 0, or what was wrong with the launch.
extern "C" const char* run(const char* kernel, int64_t blocks, Arguments arguments) {
    const auto found = kernels.find(kernel);
    if (found == kernels.end()) return "there is no such kernel";
    try {
        found->second(blocks, arguments);
    } catch (const std::invalid_argument& wrong) {
        static std::string told;
        return (told = wrong.what()).c_str();
    }
    return nullptr;
}

// The names of all kernels, a line each.
extern "C" const char* names() {
    static std::string all;
    if (all.empty())
        for (const auto& kernel : kernels) all += kernel.first + "\n";
    return all.c_str();
}

// How many of the 65536 values of bf16 (1) and fp16 (2) have another square than their conversion to double times itself.
extern "C" int other_squares(int dtype) {
    int found = 0;
    for (uint32_t bits = 0; bits < 65536; ++bits) {
        const float x = dtype == 1 ? Format<Dtype::bf16>::widen(bits) : Format<Dtype::f16>::widen(bits);
        const double square = dtype == 1 ? square_of<Dtype::bf16>(x) : square_of<Dtype::f16>(x);
        const double wanted = static_cast<double>(x) * static_cast<double>(x);
        if (wanted != wanted ? square == square : std::memcmp(&square, &wanted, sizeof square) != 0) ++found;
    }
    return found;
}
