// What a warp of the gradient kernels does with one block of 4096 elements, in steps of 256 that go through shared memory:
// loads are 16 bytes wide, and each lane still adds every 32nd square in order, as gemini/kernels.sum_squares defines it.
//
// Each phase is a function of one lane; between phases the lanes meet. On the host the tests run lane after lane.
#pragma once

#include <type_traits>

#include "bits.cuh"
#include "compact_body.cuh"
#include "grad.h"
#include "update_body.cuh"

namespace gemini::cuda {

constexpr int kLanes = 32;
constexpr int kStep = kLanes * kPerThread;
constexpr int64_t kBlock = 4096, kTile = int64_t{1} << 20;
constexpr int kTileBlocks = static_cast<int>(kTile / kBlock);

enum class Doing : int { read, copy, widen, accumulate, first24, add24 };

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

// The squares of a step; what lies beyond the end is +0.0, which changes nothing.
GEMINI_DEVICE void add_squares(const WarpShared& shared, int lane, double& sum) {
#pragma unroll
    for (int row = 0; row < kPerThread; ++row) {
        const double x = static_cast<double>(shared.values[row * kLanes + lane]);
        sum = add(sum, mul(x, x));
    }
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

// From the sum of each gradient: see clip_factor in grad.h.
GEMINI_DEVICE void clip(const double* totals, int64_t count, double max_norm, const ClipPlaces& places) {
    const double norm = root(total(totals, 0, count));
    const double coefficient = div(max_norm, add(norm, 1e-6));
    const bool clips = is_finite(norm) && coefficient < 1.0;
    *places.norm = norm;
    *places.factor = clips ? narrow(coefficient) : 1.0f;
    *places.nonfinite = is_finite(norm) ? 0 : 1;
}

}  // namespace gemini::cuda
