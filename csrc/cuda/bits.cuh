// The arithmetic of rules.h and the number formats of formats.h for device code, one element at a time.
//
// Every operation is an intrinsic that rounds to nearest and is never contracted, whatever the compiler is told; division
// and square root are the correctly rounded ones, and subnormal numbers are kept. The same text compiles for the host
// (-ffp-contract=off), where tests/native runs it against the CPU kernels: what a machine without a card can prove.
#pragma once

#include <cmath>

#include "../formats.h"

#if defined(__CUDACC__)
#define GEMINI_DEVICE __host__ __device__ __forceinline__
#else
#define GEMINI_DEVICE inline
#endif

namespace gemini::cuda {

#if defined(__CUDA_ARCH__)
GEMINI_DEVICE float add(float a, float b) { return __fadd_rn(a, b); }
GEMINI_DEVICE float sub(float a, float b) { return __fsub_rn(a, b); }
GEMINI_DEVICE float mul(float a, float b) { return __fmul_rn(a, b); }
GEMINI_DEVICE float div(float a, float b) { return __fdiv_rn(a, b); }
GEMINI_DEVICE float root(float a) { return __fsqrt_rn(a); }
GEMINI_DEVICE double add(double a, double b) { return __dadd_rn(a, b); }
GEMINI_DEVICE double mul(double a, double b) { return __dmul_rn(a, b); }
GEMINI_DEVICE double div(double a, double b) { return __ddiv_rn(a, b); }
GEMINI_DEVICE double root(double a) { return __dsqrt_rn(a); }
GEMINI_DEVICE float narrow(double a) { return __double2float_rn(a); }
GEMINI_DEVICE uint32_t bits_of(float value) { return __float_as_uint(value); }
GEMINI_DEVICE float float_of(uint32_t bits) { return __uint_as_float(bits); }
GEMINI_DEVICE double double_of(uint32_t high, uint32_t low) {
    return __hiloint2double(static_cast<int>(high), static_cast<int>(low));
}
#else
GEMINI_DEVICE float add(float a, float b) { return a + b; }
GEMINI_DEVICE float sub(float a, float b) { return a - b; }
GEMINI_DEVICE float mul(float a, float b) { return a * b; }
GEMINI_DEVICE float div(float a, float b) { return a / b; }
GEMINI_DEVICE float root(float a) { return std::sqrt(a); }
GEMINI_DEVICE double add(double a, double b) { return a + b; }
GEMINI_DEVICE double mul(double a, double b) { return a * b; }
GEMINI_DEVICE double div(double a, double b) { return a / b; }
GEMINI_DEVICE double root(double a) { return std::sqrt(a); }
GEMINI_DEVICE float narrow(double a) { return static_cast<float>(a); }
GEMINI_DEVICE uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}
GEMINI_DEVICE float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
GEMINI_DEVICE double double_of(uint32_t high, uint32_t low) {
    const uint64_t bits = static_cast<uint64_t>(high) << 32 | low;
    double value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
#endif

// A float for rules.h.
struct Rounded {
    float value;
    Rounded() = default;
    GEMINI_DEVICE Rounded(float of) : value(of) {}
    friend GEMINI_DEVICE Rounded operator+(Rounded a, Rounded b) { return add(a.value, b.value); }
    friend GEMINI_DEVICE Rounded operator-(Rounded a, Rounded b) { return sub(a.value, b.value); }
    friend GEMINI_DEVICE Rounded operator*(Rounded a, Rounded b) { return mul(a.value, b.value); }
    friend GEMINI_DEVICE Rounded operator/(Rounded a, Rounded b) { return div(a.value, b.value); }
    friend GEMINI_DEVICE bool operator<(Rounded a, Rounded b) { return a.value < b.value; }
    friend GEMINI_DEVICE bool operator>(Rounded a, Rounded b) { return a.value > b.value; }
    friend GEMINI_DEVICE Rounded root(Rounded a) { return root(a.value); }
    friend GEMINI_DEVICE Rounded select(bool condition, Rounded yes, Rounded no) { return condition ? yes : no; }
    friend GEMINI_DEVICE float plain(Rounded a) { return a.value; }
};

// fp16 -> fp32, exact: a subnormal half is its mantissa, an integer, times 2^-24; inf and NaN keep their payload.
GEMINI_DEVICE float float_of_half(uint32_t half) {
    const uint32_t magnitude = half & 0x7fffu, sign = (half & 0x8000u) << 16;
    uint32_t bits = (magnitude << 13) + (112u << 23);
    if (magnitude >= 0x7c00u) bits += 112u << 23;
    if (magnitude < 0x0400u) bits = bits_of(mul(static_cast<float>(static_cast<int32_t>(magnitude)), 0x1p-24f));
    return float_of(bits | sign);
}

// An element of an array in one of the three formats, as it stands in memory, to fp32.
template <Dtype>
struct Format;

template <>
struct Format<Dtype::f32> {
    using Element = uint32_t;
    static GEMINI_DEVICE float widen(Element bits) { return float_of(bits); }
};

template <>
struct Format<Dtype::bf16> {
    using Element = uint16_t;
    static GEMINI_DEVICE float widen(Element bits) { return float_of(static_cast<uint32_t>(bits) << 16); }
};

template <>
struct Format<Dtype::f16> {
    using Element = uint16_t;
    static GEMINI_DEVICE float widen(Element bits) { return float_of_half(bits); }
};

// The split master: fp32 bits = (hi << 16) + sign_extend(lo), modulo 2^32.
GEMINI_DEVICE float join(uint16_t hi, uint16_t lo) {
    return float_of((static_cast<uint32_t>(hi) << 16) + static_cast<uint32_t>(static_cast<int32_t>(static_cast<int16_t>(lo))));
}

// hi rounds half away from zero; a NaN becomes canonical.
GEMINI_DEVICE void split(float master, uint16_t& hi, uint16_t& lo) {
    uint32_t bits = bits_of(master);
    if ((bits & 0x7fffffffu) > 0x7f800000u) bits = 0x7fc00000u;
    hi = static_cast<uint16_t>((bits + 0x8000u) >> 16);
    lo = static_cast<uint16_t>(bits);
}

}  // namespace gemini::cuda
