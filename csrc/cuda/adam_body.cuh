// What one thread of the Adam kernel does: eight elements, aligned, each array in loads and stores of 16 bytes.
//
// Without anything of the launch in it, so that the same text runs on the host for the tests, thread by thread.
#pragma once

#include "adam.h"
#include "bits.cuh"

namespace gemini::cuda {

constexpr int kPerThread = 8;
constexpr int kThreads = 256;
constexpr int64_t kPerBlock = int64_t{kPerThread} * kThreads;
constexpr int kMaxSegments = 48;  // a launch's arguments stay under 4 KB, what every architecture takes

struct AdamLaunch {
    AdamArrays arrays;
    const float* grad_scale;
    const int* stop;
    int count;
    AdamSegment segments[kMaxSegments];
    int64_t first_block[kMaxSegments + 1];  // of each segment; the last one is the number of all
};
static_assert(sizeof(AdamLaunch) <= 4096, "arguments of a kernel");

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

template <bool Split, bool Decoupled>
GEMINI_DEVICE void adam_element(uint32_t& weight, uint16_t& residual, uint32_t& m_bits, uint32_t& v_bits, float g,
                                const AdamScalars& s, float grad_scale) {
    float p = Split ? join(static_cast<uint16_t>(weight), residual) : float_of(weight);
    float m = float_of(m_bits), v = float_of(v_bits);
    adam<Decoupled>(p, m, v, g, s, grad_scale);
    m_bits = bits_of(m);
    v_bits = bits_of(v);
    if (Split) {
        uint16_t hi;
        split(p, hi, residual);
        weight = hi;
    } else {
        weight = bits_of(p);
    }
}

// `at`: a multiple of 8; what of [at, at + 8) lies in the segment is updated.
template <Dtype Grad, bool Split, bool Decoupled, bool Aligned>
GEMINI_DEVICE void adam_thread(const AdamArrays& a, const AdamSegment& segment, int64_t at, float grad_scale) {
    using Weight = std::conditional_t<Split, uint16_t, uint32_t>;
    using Gradient = typename Format<Grad>::Element;
    if (Aligned && segment.begin <= at && at + kPerThread <= segment.end) {
        Octet<Weight> w;
        Octet<uint16_t> r;
        Octet<uint32_t> m, v;
        Octet<Gradient> g;
        w.load(a.weights, at);
        if (Split) r.load(a.residual, at);
        m.load(a.exp_avg, at);
        v.load(a.exp_avg_sq, at);
        g.load(a.grad, at);
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) {
            uint32_t weight = w.get(i), m_bits = m.get(i), v_bits = v.get(i);
            uint16_t residual = Split ? r.get(i) : uint16_t{0};
            adam_element<Split, Decoupled>(weight, residual, m_bits, v_bits, Format<Grad>::widen(g.get(i)),
                                           segment.scalars, grad_scale);
            w.set(i, static_cast<Weight>(weight));
            if (Split) r.set(i, residual);
            m.set(i, m_bits);
            v.set(i, v_bits);
        }
        w.store(a.weights, at);
        if (Split) r.store(a.residual, at);
        m.store(a.exp_avg, at);
        v.store(a.exp_avg_sq, at);
        return;
    }
    const int64_t begin = at > segment.begin ? at : segment.begin;
    const int64_t end = at + kPerThread < segment.end ? at + kPerThread : segment.end;
    for (int64_t i = begin; i < end; ++i) {
        uint16_t none = 0;
        uint16_t& residual = Split ? static_cast<uint16_t*>(a.residual)[i] : none;
        uint32_t weight = static_cast<Weight*>(a.weights)[i];
        adam_element<Split, Decoupled>(weight, residual, static_cast<uint32_t*>(a.exp_avg)[i],
                                       static_cast<uint32_t*>(a.exp_avg_sq)[i],
                                       Format<Grad>::widen(static_cast<const Gradient*>(a.grad)[i]), segment.scalars,
                                       grad_scale);
        static_cast<Weight*>(a.weights)[i] = static_cast<Weight>(weight);
    }
}

// A thread of the launch.
template <Dtype Grad, bool Split, bool Aligned>
GEMINI_DEVICE void adam_of_launch(const AdamLaunch& launch, int64_t block, int thread) {
    if (launch.stop != nullptr && *launch.stop != 0) return;
    int number = 0;
    while (block >= launch.first_block[number + 1]) ++number;
    const AdamSegment& segment = launch.segments[number];
    const int64_t first = segment.begin - segment.begin % kPerThread;
    const int64_t at = first + (block - launch.first_block[number]) * kPerBlock + int64_t{thread} * kPerThread;
    if (at >= segment.end) return;
    const float grad_scale = launch.grad_scale != nullptr ? *launch.grad_scale : segment.scalars.grad_scale;
    if (segment.scalars.decoupled) adam_thread<Grad, Split, true, Aligned>(launch.arrays, segment, at, grad_scale);
    else adam_thread<Grad, Split, false, Aligned>(launch.arrays, segment, at, grad_scale);
}

// Splits segments into launches and calls `run(launch, whether everything is aligned)` for each.
template <class Run>
void for_each_launch(const AdamArrays& arrays, const AdamSegment* segments, int count, const float* grad_scale,
                     const int* stop, Run run) {
    bool aligned = true;
    for (const void* array : {static_cast<const void*>(arrays.weights), static_cast<const void*>(arrays.residual),
                              static_cast<const void*>(arrays.exp_avg), static_cast<const void*>(arrays.exp_avg_sq),
                              arrays.grad})
        aligned = aligned && reinterpret_cast<uintptr_t>(array) % sizeof(Sixteen) == 0;
    AdamLaunch launch{arrays, grad_scale, stop, 0, {}, {}};
    for (int i = 0; i < count; ++i) {
        const AdamSegment& segment = segments[i];
        if (segment.end <= segment.begin) continue;
        const int64_t span = segment.end - (segment.begin - segment.begin % kPerThread);
        launch.segments[launch.count] = segment;
        launch.first_block[launch.count + 1] = launch.first_block[launch.count] + (span + kPerBlock - 1) / kPerBlock;
        if (++launch.count == kMaxSegments) {
            run(launch, aligned);
            launch.count = 0;
        }
    }
    if (launch.count > 0) run(launch, aligned);
}

}  // namespace gemini::cuda
