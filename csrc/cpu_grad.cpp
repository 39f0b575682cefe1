// The gradient kernels of cpu_grad.h. Threads fill one double per block; the caller of them all adds blocks to tiles.
#include "cpu_grad.h"

#include <algorithm>
#include <cstring>

#include "compact.h"
#include "thread_pool.h"

namespace gemini {
namespace {

constexpr int64_t kStep = 256;  // elements moved and summed at a time: few, so that memory streams while sums are made
static_assert(kNormBlock % kStep == 0 && kStep % kNormLanes == 0, "a block is whole steps, a step whole rows");

template <int Bytes>
struct Vector {
    static constexpr int kWidth = Bytes / static_cast<int>(sizeof(double));
    typedef double Doubles __attribute__((vector_size(Bytes)));
    typedef float Floats __attribute__((vector_size(Bytes / 2)));
};

// Adds n elements, from a multiple of 32 in the block, to the lanes. Every product is exact in fp64 (24 + 24 bits).
template <int VectorBytes>
GEMINI_INLINE void add_squares(double* __restrict lanes, const f32_t* __restrict x, int64_t n) {
    using V = Vector<VectorBytes>;
    constexpr int kVectors = static_cast<int>(kNormLanes) / V::kWidth;
    typename V::Doubles sums[kVectors];
    std::memcpy(sums, lanes, sizeof sums);
    const int64_t whole = n - n % kNormLanes;
    for (int64_t i = 0; i < whole; i += kNormLanes) {
        for (int k = 0; k < kVectors; ++k) {
            typename V::Floats narrow;
            std::memcpy(&narrow, x + i + k * V::kWidth, sizeof narrow);
            const typename V::Doubles wide = __builtin_convertvector(narrow, typename V::Doubles);
            sums[k] += wide * wide;
        }
    }
    std::memcpy(lanes, sums, sizeof sums);
    // A short last row: the missing elements would add +0.0, which changes nothing.
    for (int64_t i = whole; i < n; ++i) lanes[i - whole] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
}

GEMINI_INLINE double add_lanes(double* lanes) {
    for (int half = static_cast<int>(kNormLanes) / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    return lanes[0];
}

struct Grads {
    void* dst;
    const void* src;
    double* block_sums;
    void* beside = nullptr;  // written as well: bits that dst has no room for, or dst rounded
};

// Step says what happens to a few elements before they are summed, and where they then are as fp32.
template <class Step>
struct NormKernel {
    using Args = Grads;

    template <int VectorBytes>
    GEMINI_INLINE void range(const Grads& a, int64_t begin, int64_t end) {
        alignas(64) float scratch[kStep];
        for (int64_t block = begin; block < end; block += kNormBlock) {
            alignas(64) double lanes[kNormLanes] = {};
            const int64_t stop = std::min(block + kNormBlock, end);
            for (int64_t at = block; at < stop; at += kStep) {
                const int64_t n = std::min(kStep, stop - at);
                add_squares<VectorBytes>(lanes, Step::apply(scratch, a, at, n), n);
            }
            a.block_sums[block / kNormBlock] = add_lanes(lanes);
        }
    }
};

template <class Grad>
GEMINI_INLINE const f32_t* load_at(f32_t* scratch, const void* src, int64_t at, int64_t n) {
    return Grad::load(scratch, static_cast<const typename Grad::Element*>(src) + at, n);
}

template <class Grad>
struct Read {
    GEMINI_INLINE const f32_t* apply(float* scratch, const Grads& a, int64_t at, int64_t n) {
        return load_at<Grad>(scratch, a.src, at, n);
    }
};

template <class Grad>
struct Copy {
    using Element = typename Grad::Element;

    GEMINI_INLINE const f32_t* apply(float* scratch, const Grads& a, int64_t at, int64_t n) {
        const Element* src = static_cast<const Element*>(a.src) + at;
        Element* __restrict dst = static_cast<Element*>(a.dst) + at;
        GEMINI_INDEPENDENT
        for (int64_t i = 0; i < n; ++i) dst[i] = src[i];  // a call of memcpy per step would cost twice the time
        return Grad::load(scratch, src, n);
    }
};

template <class Grad>
struct Widen {
    static_assert(sizeof(typename Grad::Element) < sizeof(float), "fp32 needs no widening");

    GEMINI_INLINE const f32_t* apply(float*, const Grads& a, int64_t at, int64_t n) {
        return load_at<Grad>(static_cast<f32_t*>(a.dst) + at, a.src, at, n);
    }
};

template <class Grad>
struct Accumulate {
    GEMINI_INLINE const f32_t* apply(float* scratch, const Grads& a, int64_t at, int64_t n) {
        const f32_t* __restrict grad = load_at<Grad>(scratch, a.src, at, n);
        f32_t* __restrict acc = static_cast<f32_t*>(a.dst) + at;
        GEMINI_INDEPENDENT
        for (int64_t i = 0; i < n; ++i) acc[i] = acc[i] + grad[i];
        return acc;
    }
};

template <class Grad>
struct AccumulateRounded {
    GEMINI_INLINE const f32_t* apply(float* scratch, const Grads& a, int64_t at, int64_t n) {
        alignas(64) float widened[kStep];
        const f32_t* __restrict grad = load_at<Grad>(widened, a.src, at, n);
        f32_t* __restrict acc = static_cast<f32_t*>(a.dst) + at;
        u16_t* __restrict rounded = static_cast<u16_t*>(a.beside) + at;
        f32_t* __restrict out = scratch;
        GEMINI_INDEPENDENT
        for (int64_t i = 0; i < n; ++i) {
            acc[i] = acc[i] + grad[i];
            const uint32_t bits = bits_of(acc[i]), even = bits + 0x7fffu + (bits >> 16 & 1u);
            const uint32_t kept = select_bits((bits & 0x7fffffffu) > 0x7f800000u, 0x7fc00000u, even);
            out[i] = float_of(kept & 0xffff0000u);
        }
        GEMINI_INDEPENDENT
        for (int64_t i = 0; i < n; ++i) rounded[i] = static_cast<uint16_t>(bits_of(out[i]) >> 16);
        return out;
    }
};

template <class Grad, bool Adding>
struct Sum24 {
    GEMINI_INLINE const f32_t* apply(float* scratch, const Grads& a, int64_t at, int64_t n) {
        alignas(64) float widened[kStep];
        const f32_t* __restrict grad = load_at<Grad>(widened, a.src, at, n);
        u16_t* __restrict hi = static_cast<u16_t*>(a.dst) + at;
        i8_t* __restrict lo = static_cast<i8_t*>(a.beside) + at;
        f32_t* __restrict out = scratch;
        if (Adding) {
            GEMINI_INDEPENDENT
            for (int64_t i = 0; i < n; ++i) out[i] = joined24(hi[i], lo[i]);
        }
        GEMINI_INDEPENDENT
        for (int64_t i = 0; i < n; ++i) out[i] = Adding ? out[i] + grad[i] : grad[i];
        GEMINI_INDEPENDENT
        for (int64_t i = 0; i < n; ++i) {
            const uint32_t bits = bits24_of(bits_of(out[i])), upper = (bits + 0x8000u) >> 16;
            hi[i] = static_cast<uint16_t>(upper);
            lo[i] = static_cast<int8_t>(static_cast<uint8_t>(bits >> 8));
            out[i] = float_of(upper << 16);
        }
        return out;
    }
};

template <class Grad>
using First24 = Sum24<Grad, false>;
template <class Grad>
using Add24 = Sum24<Grad, true>;

template <class Step>
std::vector<double> run(Isa isa, void* dst, const void* src, int64_t n, void* beside = nullptr) {
    std::vector<double> blocks(static_cast<size_t>((n + kNormBlock - 1) / kNormBlock));
    const Grads args{dst, src, blocks.data(), beside};
    const RangeFn<NormKernel<Step>> range = select<NormKernel<Step>>(isa);
    // Gradients land in the middle of backward, where the other cores are torch's: not worth waking them for less.
    parallel_for(n, kNormBlock, [&](int64_t begin, int64_t end) { range(args, begin, end); }, 512 * 1024);

    constexpr size_t kBlocks = static_cast<size_t>(kNormTile / kNormBlock);
    std::vector<double> tiles((blocks.size() + kBlocks - 1) / kBlocks, 0.0);
    for (size_t i = 0; i < blocks.size(); ++i) tiles[i / kBlocks] += blocks[i];
    return tiles;
}

template <template <class> class Step>
std::vector<double> run_from(Isa isa, void* dst, const void* src, Dtype src_dtype, int64_t n, void* beside = nullptr) {
    switch (src_dtype) {
        case Dtype::bf16: return run<Step<BF16>>(isa, dst, src, n, beside);
        case Dtype::f16: return run<Step<F16>>(isa, dst, src, n, beside);
        default: return run<Step<F32>>(isa, dst, src, n, beside);
    }
}

}  // namespace

std::vector<double> copy_grad(Isa isa, void* dst, Dtype dst_dtype, const void* src, Dtype src_dtype, int64_t n) {
    if (dst_dtype == src_dtype) return run_from<Copy>(isa, dst, src, src_dtype, n);
    if (src_dtype == Dtype::bf16) return run<Widen<BF16>>(isa, dst, src, n);
    return run<Widen<F16>>(isa, dst, src, n);
}

std::vector<double> accumulate_grad(Isa isa, void* acc, const void* src, Dtype src_dtype, int64_t n) {
    return run_from<Accumulate>(isa, acc, src, src_dtype, n);
}

std::vector<double> accumulate_rounded(Isa isa, void* acc, void* rounded, const void* src, Dtype src_dtype, int64_t n) {
    return run_from<AccumulateRounded>(isa, acc, src, src_dtype, n, rounded);
}

std::vector<double> sum_grad24(Isa isa, void* hi, void* lo, const void* src, Dtype src_dtype, int64_t n, bool adding) {
    if (adding) return run_from<Add24>(isa, hi, src, src_dtype, n, lo);
    return run_from<First24>(isa, hi, src, src_dtype, n, lo);
}

std::vector<double> sum_squares(Isa isa, const void* src, Dtype src_dtype, int64_t n) {
    return run_from<Read>(isa, nullptr, src, src_dtype, n);
}

}  // namespace gemini
