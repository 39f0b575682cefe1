// What one thread of an update's kernel does: eight elements, aligned, each array in loads and stores of 16 bytes.
//
// Without anything of the launch in it, so that the same text runs on the host for the tests, thread by thread.
#pragma once

#include "bits.cuh"
#include "../rules.h"

namespace gemini::cuda {

constexpr int kPerThread = 8;
constexpr int kThreads = 256;
constexpr int64_t kPerBlock = int64_t{kPerThread} * kThreads;
constexpr int kMaxSegments = 44;  // a launch's arguments stay under 4 KB, what every architecture takes

// The argument of a launch, as gemini/kernels/cuda.py packs it. Segments ascend and do not overlap: the params of one group
// inside a chunk, which share their scalars. `grad_scale`, if it is not null, replaces the scalars' own (what clipping left
// in device memory); if `stop` is not null and not 0 when the kernel runs, it does nothing (a gradient was not finite).
template <class Rule>
struct Launch {
    struct Part {
        int64_t begin;
        int64_t end;
        Rule rule;
    };
    Arrays arrays;
    const float* grad_scale;
    const int* stop;
    int count;
    Part segments[kMaxSegments];
    uint32_t dithers[kMaxSegments];  // of compact states
    int64_t first_block[kMaxSegments + 1];  // of each segment; the last one is the number of all
};
static_assert(sizeof(Launch<Adam<true>>) <= 4096, "arguments of a kernel");

#if defined(__CUDACC__)
using Sixteen = uint4;
#else
struct alignas(16) Sixteen {
    uint32_t x, y, z, w;
};
#endif
static_assert(sizeof(Sixteen) == 16 && alignof(Sixteen) == 16, "what one thread loads or stores at once");

GEMINI_DEVICE void store_sixteen(Sixteen* to, Sixteen part) {
#if defined(__CUDA_ARCH__)
    __stwb(to, part);  // an ordinary store: of an assignment nvcc 13.0 may make four narrow ones
#else
    *to = part;
#endif
}

// Eight elements from a multiple of 8 of a 16-byte aligned array, as they stand in memory: 32 bits, or two in 32.
template <class Element>
struct Octet {
    static constexpr int kWords = static_cast<int>(sizeof(Element)) * kPerThread / 4;
    uint32_t words[kWords];

    GEMINI_DEVICE void load(const void* array, int64_t at) {
        const Sixteen* from = reinterpret_cast<const Sixteen*>(static_cast<const Element*>(array) + at);
#pragma unroll
        for (int i = 0; i < kWords; i += 4) {
            const Sixteen part = from[i / 4];
            words[i] = part.x, words[i + 1] = part.y, words[i + 2] = part.z, words[i + 3] = part.w;
        }
    }

    GEMINI_DEVICE void store(void* array, int64_t at) const {
        Sixteen* to = reinterpret_cast<Sixteen*>(static_cast<Element*>(array) + at);
#pragma unroll
        for (int i = 0; i < kWords; i += 4) {
            store_sixteen(to + i / 4, Sixteen{words[i], words[i + 1], words[i + 2], words[i + 3]});
        }
    }

    GEMINI_DEVICE Element get(int i) const {
        return static_cast<Element>(sizeof(Element) == 4 ? words[i] : words[i / 2] >> (i % 2 * 16));
    }

    GEMINI_DEVICE void set(int i, Element bits) {
        if (sizeof(Element) == 4) words[i] = bits;
        else if (i % 2 == 0) words[i / 2] = (words[i / 2] & 0xffff0000u) | bits;
        else words[i / 2] = (words[i / 2] & 0x0000ffffu) | static_cast<uint32_t>(bits) << 16;
    }
};

template <bool Split, class Rule, size_t... I>
GEMINI_DEVICE void update_element(const Rule& rule, uint32_t& weight, uint16_t& residual, uint32_t* states, float g,
                                  float grad_scale, std::index_sequence<I...>) {
    Rounded p = Split ? join(static_cast<uint16_t>(weight), residual) : float_of(weight);
    Rounded own[] = {float_of(states[I])..., 0.f};
    rule.update(p, Rounded(mul(g, grad_scale)), own[I]...);
    ((states[I] = bits_of(own[I].value)), ...);
    if (Split) {
        uint16_t hi;
        split(p.value, hi, residual);
        weight = hi;
    } else {
        weight = bits_of(p.value);
    }
}

// `at`: a multiple of 8; what of [at, at + 8) lies in the segment is updated.
template <Dtype Grad, bool Split, bool Aligned, class Rule>
GEMINI_DEVICE void update_thread(const Arrays& a, const typename Launch<Rule>::Part& segment, int64_t at,
                                 float grad_scale) {
    using Weight = std::conditional_t<Split, uint16_t, uint32_t>;
    using Gradient = typename Format<Grad>::Element;
    constexpr int kStates = Rule::kStates;
    constexpr auto kEach = std::make_index_sequence<kStates>();
    if (Aligned && segment.begin <= at && at + kPerThread <= segment.end) {
        Octet<Weight> w;
        Octet<uint16_t> r;
        Octet<uint32_t> states[kStates + 1];
        Octet<Gradient> g;
        w.load(a.weights, at);
        if (Split) r.load(a.residual, at);
#pragma unroll
        for (int k = 0; k < kStates; ++k) states[k].load(a.states[k], at);
        g.load(a.grad, at);
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) {
            uint32_t weight = w.get(i), own[kStates + 1];
            uint16_t residual = Split ? r.get(i) : uint16_t{0};
#pragma unroll
            for (int k = 0; k < kStates; ++k) own[k] = states[k].get(i);
            update_element<Split>(segment.rule, weight, residual, own, Format<Grad>::widen(g.get(i)), grad_scale, kEach);
            w.set(i, static_cast<Weight>(weight));
            if (Split) r.set(i, residual);
#pragma unroll
            for (int k = 0; k < kStates; ++k) states[k].set(i, own[k]);
        }
        w.store(a.weights, at);
        if (Split) r.store(a.residual, at);
#pragma unroll
        for (int k = 0; k < kStates; ++k) states[k].store(a.states[k], at);
        return;
    }
    const int64_t begin = at > segment.begin ? at : segment.begin;
    const int64_t end = at + kPerThread < segment.end ? at + kPerThread : segment.end;
    for (int64_t i = begin; i < end; ++i) {
        uint16_t none = 0;
        uint16_t& residual = Split ? static_cast<uint16_t*>(a.residual)[i] : none;
        uint32_t weight = static_cast<Weight*>(a.weights)[i], own[kStates + 1];
#pragma unroll
        for (int k = 0; k < kStates; ++k) own[k] = static_cast<uint32_t*>(a.states[k])[i];
        update_element<Split>(segment.rule, weight, residual, own,
                              Format<Grad>::widen(static_cast<const Gradient*>(a.grad)[i]), grad_scale, kEach);
        static_cast<Weight*>(a.weights)[i] = static_cast<Weight>(weight);
#pragma unroll
        for (int k = 0; k < kStates; ++k) static_cast<uint32_t*>(a.states[k])[i] = own[k];
    }
}

// A thread of the launch.
template <Dtype Grad, bool Split, bool Aligned, class Rule>
GEMINI_DEVICE void thread_of_launch(const Launch<Rule>& launch, int64_t block, int thread) {
    if (launch.stop != nullptr && *launch.stop != 0) return;
    int number = 0;
    while (block >= launch.first_block[number + 1]) ++number;
    const auto& segment = launch.segments[number];
    const int64_t first = segment.begin - segment.begin % kPerThread;
    const int64_t at = first + (block - launch.first_block[number]) * kPerBlock + int64_t{thread} * kPerThread;
    if (at >= segment.end) return;
    const float grad_scale = launch.grad_scale != nullptr ? *launch.grad_scale : segment.rule.grad_scale;
    update_thread<Grad, Split, Aligned, Rule>(launch.arrays, segment, at, grad_scale);
}

}  // namespace gemini::cuda
