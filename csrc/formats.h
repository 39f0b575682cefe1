// The number formats of the kernels: fp32, bf16, fp16 and the bf16 split master, as integer operations on whole
// tiles. Each loop does one conversion between an array and a small L1 temporary, because a loop which mixes 16-bit
// and 32-bit elements with floating point work is where auto-vectorisers give up. For cpu_update.cpp and cpu_grad.cpp.
#pragma once

#include <cstdint>
#include <cstring>

#include "isa.h"

namespace gemini {

enum class Dtype : int { f32 = 0, bf16 = 1, f16 = 2 };

// Tensors arrive as raw bytes: any C++ type may alias them, and a source (a slice of a file) may sit at any address.
typedef float f32_t __attribute__((may_alias, aligned(1)));
typedef uint16_t u16_t __attribute__((may_alias, aligned(1)));
typedef int16_t i16_t __attribute__((may_alias, aligned(1)));
typedef uint8_t u8_t __attribute__((may_alias, aligned(1)));
typedef int8_t i8_t __attribute__((may_alias, aligned(1)));

GEMINI_INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

GEMINI_INLINE float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

GEMINI_INLINE uint32_t select_bits(bool condition, uint32_t yes, uint32_t no) {
    const uint32_t mask = 0u - static_cast<uint32_t>(condition);
    return (yes & mask) | (no & ~mask);
}

// fp16 -> fp32 bits, exact, without F16C (AVX2 machines may lack it) and without a subnormal fp32 on the way
// (flush-to-zero must not touch it): a subnormal half is its mantissa, an integer, times 2^-24.
GEMINI_INLINE uint32_t half_to_bits(uint32_t half) {
    const uint32_t magnitude = half & 0x7fffu;
    const uint32_t subnormal = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
    uint32_t bits = (magnitude << 13) + (112u << 23);             // rebias the exponent: 127 - 15
    bits += select_bits(magnitude >= 0x7c00u, 112u << 23, 0u);    // inf and NaN keep an all-ones exponent
    bits = select_bits(magnitude < 0x0400u, subnormal, bits);
    return bits | ((half & 0x8000u) << 16);
}

// A source of gradients in one format: load() gives n of its elements as fp32, in `scratch` if they had to be widened.
struct F32 {
    using Element = f32_t;
    GEMINI_INLINE const f32_t* load(f32_t*, const Element* src, int64_t) { return src; }
};

struct BF16 {
    using Element = u16_t;
    GEMINI_INLINE const f32_t* load(f32_t* __restrict scratch, const Element* __restrict src, int64_t n) {
        GEMINI_INDEPENDENT
        for (int64_t i = 0; i < n; ++i) scratch[i] = float_of(static_cast<uint32_t>(src[i]) << 16);
        return scratch;
    }
};

struct F16 {
    using Element = u16_t;
    GEMINI_INLINE const f32_t* load(f32_t* __restrict scratch, const Element* __restrict src, int64_t n) {
        GEMINI_INDEPENDENT
        for (int64_t i = 0; i < n; ++i) scratch[i] = float_of(half_to_bits(src[i]));
        return scratch;
    }
};

// Split master: fp32 bits = (hi << 16) + sign_extend(lo), modulo 2^32.
GEMINI_INLINE void join_tile(f32_t* __restrict out, const u16_t* __restrict hi, const i16_t* __restrict lo, int64_t n) {
    GEMINI_INDEPENDENT
    for (int64_t i = 0; i < n; ++i)
        out[i] = float_of((static_cast<uint32_t>(hi[i]) << 16) + static_cast<uint32_t>(static_cast<int32_t>(lo[i])));
}

// hi rounds half away from zero: then lo always fits 16 bits. A NaN would be rounded into the sign: make it canonical.
GEMINI_INLINE void split_tile(u16_t* __restrict hi, i16_t* __restrict lo, const f32_t* __restrict master, int64_t n) {
    GEMINI_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) {
        uint32_t bits = bits_of(master[i]);
        bits = select_bits((bits & 0x7fffffffu) > 0x7f800000u, 0x7fc00000u, bits);
        hi[i] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
        lo[i] = static_cast<int16_t>(static_cast<uint16_t>(bits));
    }
}

}  // namespace gemini
