// Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction" (Intel, 2009), bit-reflected:
// four lanes of 128 bits are folded over the data, then into one, and that into 32 bits by Barrett reduction. The constants are
// those of the paper for the polynomial of zlib.
#include "checksum.h"

#include <stdexcept>

#include "isa.h"

#if defined(GEMINI_X86)
#include <immintrin.h>
#define GEMINI_CLMUL __attribute__((target("pclmul,sse4.1")))
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

GEMINI_CLMUL uint32_t by_clmul(const void* data, size_t num_bytes, uint32_t crc) {
    const __m128i by64 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4), by16 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    const __m128i by4 = _mm_set_epi64x(0, 0x0163cd6124), barrett = _mm_set_epi64x(0x01f7011641, 0x01db710641);
    const __m128i words = _mm_setr_epi32(~0, 0, ~0, 0);
    const __m128i* at = static_cast<const __m128i*>(data);
    const __m128i* const end = at + num_bytes / 16;
    __m128i a = _mm_xor_si128(load(at), _mm_cvtsi32_si128(static_cast<int>(~crc)));
    __m128i b = load(at + 1), c = load(at + 2), d = load(at + 3);
    for (at += 4; end - at >= 4; at += 4) {
        a = fold(a, by64, load(at));
        b = fold(b, by64, load(at + 1));
        c = fold(c, by64, load(at + 2));
        d = fold(d, by64, load(at + 3));
    }
    a = fold(fold(fold(a, by16, b), by16, c), by16, d);
    for (; at < end; ++at) a = fold(a, by16, load(at));
    a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, by16, 0x10));
    a = _mm_xor_si128(_mm_srli_si128(a, 4), _mm_clmulepi64_si128(_mm_and_si128(a, words), by4, 0x00));
    const __m128i quotient = _mm_and_si128(_mm_clmulepi64_si128(_mm_and_si128(a, words), barrett, 0x10), words);
    a = _mm_xor_si128(a, _mm_clmulepi64_si128(quotient, barrett, 0x00));
    return ~static_cast<uint32_t>(_mm_extract_epi32(a, 1));
}

}  // namespace

bool has_crc32() { return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"); }
#else
bool has_crc32() { return false; }
#endif

uint32_t crc32(const void* data, size_t num_bytes, uint32_t crc) {
    if (num_bytes % 16 || num_bytes < 64) throw std::invalid_argument("crc32 is of 64 bytes or more, a multiple of 16");
#if defined(GEMINI_X86)
    if (has_crc32()) return by_clmul(data, num_bytes, crc);
#endif
    throw std::invalid_argument("this CPU has no carry-less multiplication");
}

}  // namespace gemini
