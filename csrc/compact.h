// Compact states: what an element of one becomes in a byte, and back; gemini/kernels/reference.py defines the bits. One
// text for the CPU kernels (F is float) and the CUDA kernels (F is their float that is never contracted), as rules.h.
//
// 64 elements of a param share a scale, a power of two kept as its biased exponent. Halving the bits of a float is a root
// of it with straight pieces, dividing them by four a fourth root: codes are those, and decoding shifts the bits back.
// Codes of averages of squares are rounded up where the fraction exceeds a threshold out of a Weyl sequence of element and
// step: rounding to the nearest would freeze them.
#pragma once

#include "rules.h"

namespace gemini {

constexpr int64_t kCompactBlock = 64;
constexpr uint32_t kPerIndex = 0x85EBCA6Bu;  // of the Weyl sequence; the caller has added what step and name give

GEMINI_RULE float plain(float x) { return x; }

// The same as in formats.h and cuda/bits.cuh, for both.
GEMINI_RULE uint32_t raw_of(float value) {
#if defined(__CUDA_ARCH__)
    return __float_as_uint(value);
#else
    return bits_of(value);
#endif
}

GEMINI_RULE float number_of(uint32_t bits) {
#if defined(__CUDA_ARCH__)
    return __uint_as_float(bits);
#else
    return float_of(bits);
#endif
}

// The largest value in units of a scale, 63/64; its code is the largest one.
constexpr uint32_t kLimit = 0x3f7c0000u;
// What is added to bits of values in units of the scale, shifted, to have the bits of codes: 1 would have 128, and 256.
constexpr uint32_t kToSigned = 0x23400000u, kToSquare = 0x33a00000u;

// The biased exponent of the least power of two of which the largest magnitude of a block is at most 63/64, given the bits
// of that.
GEMINI_RULE uint32_t exponent_of(uint32_t largest) {
    const uint32_t up = (largest + 0x83ffffu) >> 23;
    return up < 253u ? up : 253u;
}

GEMINI_RULE float scale_of(uint32_t exponent) { return number_of(exponent << 23); }
GEMINI_RULE float inverse_of(uint32_t exponent) { return number_of((254u - exponent) << 23); }

// The bits of a value in units of its scale, given those of its code as a float; of 0 it is 0.
template <int Shift>
GEMINI_RULE uint32_t bits_of_code(uint32_t code, uint32_t to_code) {
    return ((code > to_code ? code : to_code) - to_code) << Shift;
}

template <class F>
GEMINI_RULE F decode_signed(int32_t code, float scale) {
    const uint32_t c = raw_of(static_cast<float>(code));
    return F(number_of(bits_of_code<1>(c & 0x7fffffffu, kToSigned) | (c & 0x80000000u))) * F(scale);
}

template <class F>
GEMINI_RULE F decode_square(int32_t code, float scale) {
    return F(number_of(bits_of_code<2>(raw_of(static_cast<float>(code)), kToSquare))) * F(scale);
}

// The bits of a value in units of its scale, without its sign: at most kLimit, also of NaN.
template <class F>
GEMINI_RULE uint32_t magnitude_in(F value, float inverse) {
    const uint32_t x = raw_of(plain(F(number_of(raw_of(plain(value)) & 0x7fffffffu)) * F(inverse)));
    return x < kLimit ? x : kLimit;
}

template <class F>
GEMINI_RULE int32_t encode_signed(F value, float inverse) {
    const uint32_t sign = (0u - static_cast<uint32_t>(value < 0.f)) & 0x80000000u;  // that of a NaN is not the same everywhere
    const F y = number_of(((magnitude_in(value, inverse) >> 1) + kToSigned) | sign);
    return static_cast<int32_t>(raw_of(plain(y + F(12582912.f))) & 0xffu);  // the byte of an integer, half to even
}

// `sequence`: of the element, `index * kPerIndex + dither`. The threshold has 15 bits, so that what is added is exact.
template <class F>
GEMINI_RULE int32_t encode_square(F value, float inverse, uint32_t sequence) {
    const F y = number_of((magnitude_in(value, inverse) >> 2) + kToSquare);
    const int32_t code = static_cast<int32_t>(plain(y + F(number_of((sequence >> 9 & 0x7fff00u) | 0x3f800000u)))) - 1;
    const uint32_t magnitude = raw_of(plain(value)) & 0x7fffffffu;
    const int32_t least = static_cast<int32_t>(magnitude < 1u ? magnitude : 1u);
    return code > least ? code : least;
}

// 24 bits of a master, to nearest even; a NaN becomes canonical.
GEMINI_RULE uint32_t bits24_of(uint32_t bits) {
    const uint32_t is_nan = 0u - static_cast<uint32_t>((bits & 0x7fffffffu) > 0x7f800000u);
    bits = (0x7fc00000u & is_nan) | (bits & ~is_nan);
    return (bits + 0x7fu + ((bits >> 8) & 1u)) & ~0xffu;
}

// The 24 bits of a master, or of a sum of gradients, from their halves: `lo` is a signed byte.
GEMINI_RULE float joined24(uint32_t hi, int32_t lo) {
    return number_of((hi << 16) + (static_cast<uint32_t>(lo) << 8));
}

}  // namespace gemini
