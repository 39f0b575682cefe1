// What one thread does in the update of compact states (../compact.h): eight elements, of which eight threads in a row
// make a block. In two halves, for between them the threads of a block agree on its scales; without anything of the
// launch in it, so that the same text runs on the host for the tests.
#pragma once

#include "../compact.h"
#include "update_body.cuh"

namespace gemini::cuda {

constexpr int kThreadsPerScale = static_cast<int>(kCompactBlock) / kPerThread;

struct alignas(8) Eight {
    uint32_t x, y;
};

// Eight bytes from a multiple of 8.
struct Bytes {
    uint32_t words[2];

    GEMINI_DEVICE void load(const void* array, int64_t at) {
        const Eight* from = reinterpret_cast<const Eight*>(static_cast<const uint8_t*>(array) + at);
        words[0] = from->x, words[1] = from->y;
    }

    GEMINI_DEVICE void store(void* array, int64_t at) const {
        Eight* to = reinterpret_cast<Eight*>(static_cast<uint8_t*>(array) + at);
        *to = Eight{words[0], words[1]};
    }

    GEMINI_DEVICE uint8_t get(int i) const { return static_cast<uint8_t>(words[i / 4] >> (i % 4 * 8)); }

    GEMINI_DEVICE void set(int i, uint8_t byte) {
        words[i / 4] = (words[i / 4] & ~(0xffu << (i % 4 * 8))) | static_cast<uint32_t>(byte) << (i % 4 * 8);
    }
};

template <Dtype Grad, bool Aligned, class Rule>
struct CompactThread {
    static constexpr int kStates = Rule::kStates;
    using Gradient = typename Format<Grad>::Element;

    uint32_t largest[kStates + 1];  // of each state: the bits of the largest magnitude among these elements

    // First half: decodes, updates, and keeps what comes out. `at`: a multiple of 8 from the begin of the segment.
    GEMINI_DEVICE void begin(const Arrays& a, const typename Launch<Rule>::Part& segment, int64_t at, float grad_scale) {
        at_ = at;
        const int64_t left = segment.end - at;
        count_ = left < 0 ? 0 : left < kPerThread ? static_cast<int>(left) : kPerThread;
#pragma unroll
        for (int k = 0; k <= kStates; ++k) largest[k] = 0;
        if (count_ == 0) return;
        const bool whole = Aligned && count_ == kPerThread && at % kPerThread == 0;
        Octet<uint16_t> weight;
        Bytes residual, codes[kStates + 1];
        Octet<Gradient> grad;
        if (whole) {
            weight.load(a.weights, at), residual.load(a.residual, at), grad.load(a.grad, at);
#pragma unroll
            for (int k = 0; k < kStates; ++k) codes[k].load(a.states[k], at);
        } else {
#pragma unroll
            for (int i = 0; i < kPerThread; ++i) {  // of a length that is known: what is indexed stays in registers
                if (i >= count_) continue;
                weight.set(i, static_cast<const uint16_t*>(a.weights)[at + i]);
                residual.set(i, static_cast<const uint8_t*>(a.residual)[at + i]);
                grad.set(i, static_cast<const Gradient*>(a.grad)[at + i]);
#pragma unroll
                for (int k = 0; k < kStates; ++k) codes[k].set(i, static_cast<const uint8_t*>(a.states[k])[at + i]);
            }
        }
        float scales[kStates + 1];
#pragma unroll
        for (int k = 0; k < kStates; ++k)
            scales[k] = scale_of(static_cast<const uint8_t*>(a.scales[k])[at / kCompactBlock]);
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) {
            if (i >= count_) continue;
            const uint32_t bits = (static_cast<uint32_t>(weight.get(i)) << 16) +
                                  (static_cast<uint32_t>(static_cast<int32_t>(static_cast<int8_t>(residual.get(i)))) << 8);
            Rounded p = float_of(bits), own[kStates + 1];
#pragma unroll
            for (int k = 0; k < kStates; ++k) {
                own[k] = is_square(k) ? decode_square<Rounded>(codes[k].get(i), scales[k])
                                      : decode_signed<Rounded>(static_cast<int8_t>(codes[k].get(i)), scales[k]);
            }
            update(segment.rule, p, mul(Format<Grad>::widen(grad.get(i)), grad_scale), own,
                   std::make_index_sequence<kStates>());
            master_[i] = p.value;
#pragma unroll
            for (int k = 0; k < kStates; ++k) {
                values_[k][i] = own[k].value;
                const uint32_t magnitude = bits_of(own[k].value) & 0x7fffffffu;
                largest[k] = magnitude > largest[k] ? magnitude : largest[k];
            }
        }
    }

    // Second half: `largest` is that of the whole block now.
    GEMINI_DEVICE void end(const Arrays& a, int64_t begin, uint32_t dither) const {
        if (count_ == 0) return;
        const uint32_t sequence = dither + static_cast<uint32_t>(at_ - begin) * kPerIndex;
        Octet<uint16_t> weight;
        Bytes residual, codes[kStates + 1];
        float inverses[kStates + 1];
#pragma unroll
        for (int k = 0; k < kStates; ++k) {
            const uint32_t exponent = exponent_of(largest[k]);
            inverses[k] = inverse_of(exponent);
            if (at_ % kCompactBlock == 0) static_cast<uint8_t*>(a.scales[k])[at_ / kCompactBlock] = static_cast<uint8_t>(exponent);
        }
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) {
            if (i >= count_) continue;
            const uint32_t bits = bits24_of(bits_of(master_[i]));
            weight.set(i, static_cast<uint16_t>((bits + 0x8000u) >> 16));
            residual.set(i, static_cast<uint8_t>(bits >> 8));
#pragma unroll
            for (int k = 0; k < kStates; ++k) {
                const int32_t code =
                    is_square(k) ? encode_square<Rounded>(values_[k][i], inverses[k],
                                                          sequence + static_cast<uint32_t>(i) * kPerIndex)
                                 : encode_signed<Rounded>(values_[k][i], inverses[k]);
                codes[k].set(i, static_cast<uint8_t>(code));
            }
        }
        if (Aligned && count_ == kPerThread && at_ % kPerThread == 0) {
            weight.store(a.weights, at_), residual.store(a.residual, at_);
#pragma unroll
            for (int k = 0; k < kStates; ++k) codes[k].store(a.states[k], at_);
            return;
        }
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) {
            if (i >= count_) continue;
            static_cast<uint16_t*>(a.weights)[at_ + i] = weight.get(i);
            static_cast<uint8_t*>(a.residual)[at_ + i] = residual.get(i);
#pragma unroll
            for (int k = 0; k < kStates; ++k) static_cast<uint8_t*>(a.states[k])[at_ + i] = codes[k].get(i);
        }
    }

private:
    static constexpr GEMINI_DEVICE bool is_square(int k) { return (Rule::kSquares >> k & 1) != 0; }

    template <size_t... I>
    GEMINI_DEVICE static void update(const Rule& rule, Rounded& p, float g, Rounded* own, std::index_sequence<I...>) {
        rule.update(p, Rounded(g), own[I]...);
    }

    int64_t at_;
    int count_;
    float master_[kPerThread], values_[kStates + 1][kPerThread];
};

// The segment of a thread block, and where a thread of it begins. Segments begin with a block of elements.
template <class Rule>
GEMINI_DEVICE int64_t place_in(const Launch<Rule>& launch, int64_t block, int thread, int& number) {
    number = 0;
    while (block >= launch.first_block[number + 1]) ++number;
    return launch.segments[number].begin + (block - launch.first_block[number]) * kPerBlock + int64_t{thread} * kPerThread;
}

}  // namespace gemini::cuda
