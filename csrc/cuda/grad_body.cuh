// What a warp of the gradient kernels does with one block of 4096 elements, in steps of 256 that go through shared memory:
// loads are 16 bytes wide, and each lane still adds every 32nd square in order, as gemini/kernels.sum_squares defines it.
//
// Each phase is a function of one lane; between phases the lanes meet. On the host the tests run lane after lane.
#pragma once

#include "bits.cuh"
#include "compact_body.cuh"
#include "update_body.cuh"

namespace gemini::cuda {

constexpr int kLanes = 32;
constexpr int kStep = kLanes * kPerThread;
constexpr int64_t kBlock = 4096, kTile = int64_t{1} << 20;
constexpr int kTileBlocks = static_cast<int>(kTile / kBlock);

enum class Doing : int { read, copy, widen, accumulate, first24, add24 };

// Where one launch leaves what it finds; all in device memory. `blocks` holds a double per 4096 elements of the tensor,
// `tiles` one per 2^20; `arrived` is 0 before and after. `nonfinite` becomes 1 if a tile's sum is not finite, and is
// left alone otherwise: several launches may share it.
struct NormPlaces {
    double* blocks;
    double* tiles;
    unsigned* arrived;
    int* nonfinite;
};

// One number each, in device memory; nonfinite is 0 or 1.
struct ClipPlaces {
    double* norm;
    float* factor;
    int* nonfinite;
};

// What of a warp is in shared memory.
struct WarpShared {
    float values[kStep];
    double lanes[kLanes];
};

template <Doing What, Dtype Source, bool Aligned>
struct GradLane {
    using Element = typename Format<Source>::Element;
    static constexpr bool kIn24 = What == Doing::first24 || What == Doing::add24;

    // Eight elements from `at`, done with and left for the squares.
    static GEMINI_DEVICE void take(WarpShared& shared, int lane, void* dst, void* lo, const void* src, int64_t at, int64_t n) {
        float values[kPerThread];
        if (Aligned && at + kPerThread <= n) {
            Octet<Element> octet;
            octet.load(src, at);
#pragma unroll
            for (int i = 0; i < kPerThread; ++i) values[i] = Format<Source>::widen(octet.get(i));
            if (What == Doing::copy) octet.store(dst, at);
            if (kIn24) {
                Octet<uint16_t> upper;
                Bytes lower;
                if (What == Doing::add24) upper.load(dst, at), lower.load(lo, at);
#pragma unroll
                for (int i = 0; i < kPerThread; ++i) {
                    uint16_t hi = What == Doing::add24 ? upper.get(i) : 0;
                    uint8_t byte = What == Doing::add24 ? lower.get(i) : 0;
                    values[i] = sum24(hi, byte, values[i]);
                    upper.set(i, hi), lower.set(i, byte);
                }
                upper.store(dst, at), lower.store(lo, at);
            }
            if (What == Doing::widen || What == Doing::accumulate) {
                Octet<uint32_t> whole;
                if (What == Doing::accumulate) {
                    whole.load(dst, at);
#pragma unroll
                    for (int i = 0; i < kPerThread; ++i) values[i] = add(float_of(whole.get(i)), values[i]);
                }
#pragma unroll
                for (int i = 0; i < kPerThread; ++i) whole.set(i, bits_of(values[i]));
                whole.store(dst, at);
            }
        } else {
#pragma unroll
            for (int i = 0; i < kPerThread; ++i) values[i] = at + i < n ? one(dst, lo, src, at + i) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) shared.values[lane * kPerThread + i] = values[i];
    }

    // hi and lo become those of the sum (or of the value alone); returns what hi is.
    static GEMINI_DEVICE float sum24(uint16_t& hi, uint8_t& lo, float value) {
        if (What == Doing::add24) value = add(joined24(hi, static_cast<int8_t>(lo)), value);
        const uint32_t bits = bits24_of(bits_of(value));
        hi = static_cast<uint16_t>((bits + 0x8000u) >> 16);
        lo = static_cast<uint8_t>(bits >> 8);
        return float_of(static_cast<uint32_t>(hi) << 16);
    }

    static GEMINI_DEVICE float one(void* dst, void* lo, const void* src, int64_t at) {
        const Element bits = static_cast<const Element*>(src)[at];
        float value = Format<Source>::widen(bits);
        if (What == Doing::copy) static_cast<Element*>(dst)[at] = bits;
        if (kIn24) value = sum24(static_cast<uint16_t*>(dst)[at], static_cast<uint8_t*>(lo)[at], value);
        if (What == Doing::accumulate) value = add(float_of(static_cast<uint32_t*>(dst)[at]), value);
        if (What == Doing::widen || What == Doing::accumulate) static_cast<uint32_t*>(dst)[at] = bits_of(value);
        return value;
    }
};

// The exact square of a value that has the 8 or 11 bits of bf16 or fp16: its fraction is squared in fp32, which holds that,
// and the double is put together out of integers. Cards for games do 1 double operation in the time of 64 others; this
// takes none, where converting and multiplying take two.
template <Dtype Source>
GEMINI_DEVICE double square_of(float x) {
    const uint32_t bits = bits_of(x) & 0x7fffffffu, exponent = bits >> 23;
    const float one = float_of((bits & 0x7fffffu) | 0x3f800000u);  // [1, 2)
    const bool is_tiny = Source == Dtype::bf16 && exponent == 0;   // a subnormal number, whose fraction begins with 0
    const float fraction = is_tiny ? sub(one, 1.0f) : one;
    const uint32_t square = bits_of(mul(fraction, fraction));
    // From fp32's bias to the double's 896 more, and twice the exponent without its own bias of 127.
    uint32_t high = (square >> 3) + ((is_tiny ? 1u : exponent) << 21) + ((896u - 254u) << 20);
    if (square == 0 || (Source == Dtype::f16 && bits == 0)) high = 0;
    if (exponent == 255) high = 0x7ff00000u | (bits & 0x7fffffu) >> 3;
    return double_of(high, Source == Dtype::f16 && bits != 0 ? square << 29 : 0u);
}

template <>
GEMINI_DEVICE double square_of<Dtype::f32>(float x) {
    return mul(static_cast<double>(x), static_cast<double>(x));
}

// In which format the values are whose squares are added up, or f32 where doubles are quick: there two operations of them
// are fewer instructions (A100, H100, B200).
template <Doing What, Dtype Source>
GEMINI_DEVICE constexpr Dtype squared_in() {
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000)
    return Dtype::f32;
#else
    return What == Doing::accumulate ? Dtype::f32
           : What == Doing::first24 || What == Doing::add24 ? Dtype::bf16 : Source;
#endif
}

// The squares of a step; what lies beyond the end is +0.0, which changes nothing.
template <Dtype In>
GEMINI_DEVICE void add_squares(const WarpShared& shared, int lane, double& sum) {
#pragma unroll
    for (int row = 0; row < kPerThread; ++row) sum = add(sum, square_of<In>(shared.values[row * kLanes + lane]));
}

// One round of adding lanes pairwise: 16 apart, 8, 4, 2, 1.
GEMINI_DEVICE void add_lanes(WarpShared& shared, int lane, int half) {
    if (lane < half) shared.lanes[lane] = add(shared.lanes[lane], shared.lanes[lane + half]);
}

GEMINI_DEVICE bool is_finite(double value) { return value - value == 0.0; }

// Sums in their order, as the host adds them.
GEMINI_DEVICE double total(const double* sums, int64_t first, int64_t last) {
    double sum = 0.0;
    for (int64_t i = first; i < last; ++i) sum = add(sum, sums[i]);
    return sum;
}

// From the sum of each gradient what clipping to `max_norm` multiplies gradients by: norm is the root of the sum of all, in
// order, factor is min(1, max_norm / (norm + 1e-6)), rounded to fp32 once; where the norm is not finite it is 1.
GEMINI_DEVICE void clip(const double* totals, int64_t count, double max_norm, const ClipPlaces& places) {
    const double norm = root(total(totals, 0, count));
    const double coefficient = div(max_norm, add(norm, 1e-6));
    const bool clips = is_finite(norm) && coefficient < 1.0;
    *places.norm = norm;
    *places.factor = clips ? narrow(coefficient) : 1.0f;
    *places.nonfinite = is_finite(norm) ? 0 : 1;
}

}  // namespace gemini::cuda
