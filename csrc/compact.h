// Compact states: what an element of one becomes in a byte, and back; gemini/kernels_compact.py defines the bits. One
// text for the CPU kernels (F is float) and the CUDA kernels (F is their float that is never contracted), as rules.h.
//
// 64 elements of a param share a scale, a power of two kept as its biased exponent. In units of it a signed state is
// sign(c) (c / 127)^2, an average of squares (c / 255)^4. Averages of squares are rounded up where the fraction exceeds
// a threshold out of a Weyl sequence of element and step: rounding to the nearest would freeze them.
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

// The biased exponent of the power of two at or above the largest magnitude of a block, given the bits of that.
GEMINI_RULE uint32_t exponent_of(uint32_t largest) {
    const uint32_t up = (largest + 0x7fffffu) >> 23;
    return up < 253u ? up : 253u;
}

GEMINI_RULE float scale_of(uint32_t exponent) { return number_of(exponent << 23); }
GEMINI_RULE float inverse_of(uint32_t exponent) { return number_of((254u - exponent) << 23); }

template <class F>
GEMINI_RULE F decode_signed(int32_t code, float scale) {
    const F c = static_cast<float>(code);
    const F magnitude = number_of(raw_of(plain(c)) & 0x7fffffffu);
    return c * magnitude * F(0x1.040c2p-14f) * F(scale);
}

template <class F>
GEMINI_RULE F decode_square(int32_t code, float scale) {
    const F c = static_cast<float>(code), square = c * c;
    return square * square * F(0x1.040a14p-32f) * F(scale);
}

// Of a value in units of its scale, without its sign: at most 1, and NaN is 1 (magnitudes are in the order of their bits).
template <class F>
GEMINI_RULE F magnitude_in(F value, float inverse) {
    const uint32_t x = raw_of(plain(F(number_of(raw_of(plain(value)) & 0x7fffffffu)) * F(inverse)));
    return number_of(x < 0x3f800000u ? x : 0x3f800000u);
}

// 127 times the square root, to a hundredth of a code: of a guess r at the inverse root, e = 1 - x r^2 says how far it
// is off, and x r (1 - e)^(-1/2) is the root; three terms of that.
template <class F>
GEMINI_RULE int32_t encode_signed(F value, float inverse) {
    const F x = magnitude_in(value, inverse);
    const F r = number_of(0x5F375000u - (raw_of(plain(x)) >> 1));
    const F t = x * r, e = F(1.f) - t * r;
    const F y = t * (F(127.f) + e * (F(63.5f) + e * F(47.625f))) + F(8388608.f);  // to an integer, half to even
    const int32_t code = static_cast<int32_t>(raw_of(plain(y)) & 0xffu);
    const int32_t negative = 0 - static_cast<int32_t>(value < 0.f);
    return (code ^ negative) - negative;
}

// 255 times the fourth root, to three hundredths of a code: four terms of x r^3 (1 - e)^(-3/4), with e = 1 - x r^4.
// `sequence`: of the element, `index * kPerIndex + dither`.
template <class F>
GEMINI_RULE int32_t encode_square(F value, float inverse, uint32_t sequence) {
    const F x = magnitude_in(value, inverse);
    const F r = number_of(0x4F582000u - (raw_of(plain(x)) >> 2));
    const F t = x * r * (r * r), e = F(1.f) - t * r;
    const F y = t * (F(255.f) + e * (F(191.25f) + e * (F(167.34375f) + e * F(153.3984375f))));
    const int32_t floor = static_cast<int32_t>(plain(y)), below = floor < 254 ? floor : 254;
    const F a = static_cast<float>(below), b = a + F(1.f);
    const F a2 = a * a, b2 = b * b, low = a2 * a2, high = b2 * b2;
    const F threshold = F(number_of(sequence >> 9 | 0x3f800000u)) - F(1.f);
    const int32_t code = below + static_cast<int32_t>(x * F(4228250625.f) - low > threshold * (high - low));
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

}  // namespace gemini
