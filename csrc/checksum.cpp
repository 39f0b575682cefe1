// Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction" (Intel, 2009),
// bit-reflected: four lanes are folded over the data, then into one, and that into 32 bits by Barrett reduction. Lanes
// have 128 bits, or four times as many where the CPU multiplies these at once. The constants are x to the power of the
// distance in bits, modulo the polynomial of zlib.
#include "checksum.h"

#include <stdexcept>

#include "isa.h"

#if defined(GEMINI_X86)
#include <immintrin.h>
#define GEMINI_CLMUL __attribute__((target("pclmul,sse4.1")))
#define GEMINI_WIDE_CLMUL __attribute__((target("vpclmulqdq,pclmul,avx512f")))
#endif

namespace gemini {

#if defined(GEMINI_X86)
namespace {

GEMINI_CLMUL inline __m128i load(const __m128i* at) { return _mm_loadu_si128(at); }

// Moves a lane ahead over the data, by the distance that the two constants stand for, and adds what is there.
GEMINI_CLMUL inline __m128i fold(__m128i lane, __m128i by, __m128i next) {
    const __m128i low = _mm_clmulepi64_si128(lane, by, 0x00), high = _mm_clmulepi64_si128(lane, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

// What comes behind four lanes: they become one, the rest of the data joins it, and 32 bits are left.
GEMINI_CLMUL uint32_t reduced(__m128i a, __m128i b, __m128i c, __m128i d, const __m128i* at, const __m128i* end) {
    const __m128i by16 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0), by4 = _mm_set_epi64x(0, 0x0163cd6124);
    const __m128i barrett = _mm_set_epi64x(0x01f7011641, 0x01db710641), words = _mm_setr_epi32(~0, 0, ~0, 0);
    a = fold(fold(fold(a, by16, b), by16, c), by16, d);
    for (; at < end; ++at) a = fold(a, by16, load(at));
    a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, by16, 0x10));
    a = _mm_xor_si128(_mm_srli_si128(a, 4), _mm_clmulepi64_si128(_mm_and_si128(a, words), by4, 0x00));
    const __m128i quotient = _mm_and_si128(_mm_clmulepi64_si128(_mm_and_si128(a, words), barrett, 0x10), words);
    a = _mm_xor_si128(a, _mm_clmulepi64_si128(quotient, barrett, 0x00));
    return ~static_cast<uint32_t>(_mm_extract_epi32(a, 1));
}

GEMINI_CLMUL uint32_t by_clmul(const __m128i* at, const __m128i* end, uint32_t crc) {
    const __m128i by64 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
    __m128i a = _mm_xor_si128(load(at), _mm_cvtsi32_si128(static_cast<int>(~crc)));
    __m128i b = load(at + 1), c = load(at + 2), d = load(at + 3);
    for (at += 4; end - at >= 4; at += 4) {
        a = fold(a, by64, load(at));
        b = fold(b, by64, load(at + 1));
        c = fold(c, by64, load(at + 2));
        d = fold(d, by64, load(at + 3));
    }
    return reduced(a, b, c, d, at, end);
}

GEMINI_WIDE_CLMUL inline __m512i wide(const __m128i* at) { return _mm512_loadu_si512(at); }

GEMINI_WIDE_CLMUL inline __m512i fold(__m512i lane, __m512i by, __m512i next) {
    const __m512i low = _mm512_clmulepi64_epi128(lane, by, 0x00), high = _mm512_clmulepi64_epi128(lane, by, 0x11);
    return _mm512_ternarylogic_epi64(low, high, next, 0x96);  // xor of the three
}

GEMINI_WIDE_CLMUL uint32_t by_wide_clmul(const __m128i* at, const __m128i* end, uint32_t crc) {
    const __m512i by256 = _mm512_broadcast_i32x4(_mm_set_epi64x(0x01322d1430, 0x011542778a));
    const __m512i by64 = _mm512_broadcast_i32x4(_mm_set_epi64x(0x01c6e41596, 0x0154442bd4));
    __m512i a = _mm512_xor_si512(wide(at), _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(~crc))));
    __m512i b = wide(at + 4), c = wide(at + 8), d = wide(at + 12);
    for (at += 16; end - at >= 16; at += 16) {
        a = fold(a, by256, wide(at));
        b = fold(b, by256, wide(at + 4));
        c = fold(c, by256, wide(at + 8));
        d = fold(d, by256, wide(at + 12));
    }
    a = fold(fold(fold(a, by64, b), by64, c), by64, d);
    for (; end - at >= 4; at += 4) a = fold(a, by64, wide(at));
    return reduced(_mm512_extracti32x4_epi32(a, 0), _mm512_extracti32x4_epi32(a, 1), _mm512_extracti32x4_epi32(a, 2),
                   _mm512_extracti32x4_epi32(a, 3), at, end);
}

}  // namespace

bool has_crc32() { return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"); }
#else
bool has_crc32() { return false; }
#endif

uint32_t crc32(const void* data, size_t num_bytes, uint32_t crc) {
    if (num_bytes % 16 || num_bytes < 64) throw std::invalid_argument("crc32 is of 64 bytes or more, a multiple of 16");
#if defined(GEMINI_X86)
    const __m128i* const begin = static_cast<const __m128i*>(data);
    const __m128i* const end = begin + num_bytes / 16;
    static const bool is_wide = __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx512f");
    if (is_wide && num_bytes >= 256) return by_wide_clmul(begin, end, crc);
    if (has_crc32()) return by_clmul(begin, end, crc);
#endif
    throw std::invalid_argument("this CPU has no carry-less multiplication");
}

}  // namespace gemini
