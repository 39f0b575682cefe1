// The kernels of cpu_update.h: a tile of 512 elements at a time, so that conversions go through L1 and the arithmetic
// stays one simple loop that every compiler vectorises. Memory-bound: what counts is bytes and one pass.
#include "cpu_update.h"

#include <algorithm>

#include "compact.h"
#include "thread_pool.h"

namespace gemini {
namespace {

constexpr int64_t kTile = 512;
constexpr int64_t kCut = 64;  // threads meet at cache lines of every array, also of the 16-bit ones

template <class Rule>
struct Update {
    Arrays arrays;
    Rule rule;
};

template <size_t>
using State = f32_t*;

template <class Rule, size_t... I>
GEMINI_INLINE void update_tile(const Rule& given, f32_t* __restrict weights, const f32_t* __restrict grad, int64_t n,
                               std::index_sequence<I...>, State<I> __restrict... states) {
    const Rule rule = given;
    GEMINI_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) {
        float p = weights[i], own[] = {states[i]..., 0.f};
        rule.update(p, grad[i] * rule.grad_scale, own[I]...);
        weights[i] = p;
        ((states[i] = own[I]), ...);
    }
}

template <class Rule, class Grad, bool Split>
struct UpdateKernel {
    using Args = Update<Rule>;

    template <int VectorBytes>
    GEMINI_INLINE void range(const Args& a, int64_t begin, int64_t end) {
        part(a, begin, end, std::make_index_sequence<Rule::kStates>());
    }

    template <size_t... I>
    GEMINI_INLINE void part(const Args& a, int64_t begin, int64_t end, std::index_sequence<I...> states) {
        alignas(64) float widened[kTile];
        alignas(64) float p[kTile];
        for (int64_t at = begin; at < end; at += kTile) {
            const int64_t n = std::min(kTile, end - at);
            const f32_t* g = Grad::load(widened, static_cast<const typename Grad::Element*>(a.arrays.grad) + at, n);
            if (Split) {
                u16_t* hi = static_cast<u16_t*>(a.arrays.weights) + at;
                i16_t* lo = static_cast<i16_t*>(a.arrays.residual) + at;
                join_tile(p, hi, lo, n);
                update_tile(a.rule, p, g, n, states, static_cast<f32_t*>(a.arrays.states[I]) + at...);
                split_tile(hi, lo, p, n);
            } else {
                f32_t* weights = static_cast<f32_t*>(a.arrays.weights) + at;
                update_tile(a.rule, weights, g, n, states, static_cast<f32_t*>(a.arrays.states[I]) + at...);
            }
        }
    }
};

// ---- compact states --------------------------------------------------------------------------------------------------

template <class Rule>
struct CompactUpdate {
    Arrays arrays;
    Rule rule;
    uint32_t dither;
};

GEMINI_INLINE void join24_tile(f32_t* __restrict out, const u16_t* __restrict hi, const i8_t* __restrict lo, int64_t n) {
    GEMINI_INDEPENDENT
    for (int64_t i = 0; i < n; ++i)
        out[i] = joined24(hi[i], lo[i]);
}

GEMINI_INLINE void split24_tile(u16_t* __restrict hi, i8_t* __restrict lo, const f32_t* __restrict master, int64_t n) {
    GEMINI_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t bits = bits24_of(bits_of(master[i]));
        hi[i] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
        lo[i] = static_cast<int8_t>(static_cast<uint8_t>(bits >> 8));
    }
}

template <bool Square>
GEMINI_INLINE void decode_block(f32_t* __restrict out, const u8_t* __restrict codes, float scale, int64_t n) {
    GEMINI_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) {
        if (Square) out[i] = decode_square<float>(codes[i], scale);
        else out[i] = decode_signed<float>(static_cast<int8_t>(codes[i]), scale);
    }
}

// What each element of a block adds to the Weyl sequence.
struct Weyl {
    alignas(64) uint32_t steps[kCompactBlock];
    constexpr Weyl() : steps{} {
        for (uint32_t i = 0; i < kCompactBlock; ++i) steps[i] = i * kPerIndex;
    }
};
constexpr Weyl kWeyl;

GEMINI_INLINE uint32_t largest_of(const f32_t* __restrict values, int64_t n) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; ++i) largest = std::max(largest, bits_of(values[i]) & 0x7fffffffu);
    return largest;
}

template <bool Square>
GEMINI_INLINE void encode_block(u8_t* __restrict codes, const f32_t* __restrict values, float inverse, uint32_t dither,
                                int64_t n) {
    alignas(64) int32_t wide[kCompactBlock];
    GEMINI_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) {
        if (Square) wide[i] = encode_square<float>(values[i], inverse, kWeyl.steps[i] + dither);
        else wide[i] = encode_signed<float>(values[i], inverse);
    }
    GEMINI_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) codes[i] = static_cast<uint8_t>(wide[i]);
}

// Whole blocks with a length that the compiler knows.
template <bool Square>
GEMINI_INLINE void decode_tile(f32_t* out, const u8_t* codes, const u8_t* scales, int64_t n) {
    int64_t at = 0;
    for (; at + kCompactBlock <= n; at += kCompactBlock)
        decode_block<Square>(out + at, codes + at, scale_of(scales[at / kCompactBlock]), kCompactBlock);
    if (at < n) decode_block<Square>(out + at, codes + at, scale_of(scales[at / kCompactBlock]), n - at);
}

// The scales of all blocks first: one reduction does not wait for another.
template <bool Square>
GEMINI_INLINE void encode_tile(u8_t* codes, u8_t* scales, const f32_t* values, uint32_t dither, int64_t n) {
    const int64_t whole = n / kCompactBlock, left = n % kCompactBlock;
    uint32_t exponents[kTile / kCompactBlock + 1];
    for (int64_t b = 0; b < whole; ++b) exponents[b] = exponent_of(largest_of(values + b * kCompactBlock, kCompactBlock));
    if (left != 0) exponents[whole] = exponent_of(largest_of(values + whole * kCompactBlock, left));
    for (int64_t b = 0; b < whole + (left != 0); ++b) scales[b] = static_cast<uint8_t>(exponents[b]);
    for (int64_t b = 0, at = 0; b < whole; ++b, at += kCompactBlock)
        encode_block<Square>(codes + at, values + at, inverse_of(exponents[b]), dither + static_cast<uint32_t>(at) * kPerIndex,
                             kCompactBlock);
    const int64_t at = whole * kCompactBlock;
    if (left != 0)
        encode_block<Square>(codes + at, values + at, inverse_of(exponents[whole]),
                             dither + static_cast<uint32_t>(at) * kPerIndex, left);
}

template <class Rule, class Grad>
struct CompactKernel {
    using Args = CompactUpdate<Rule>;

    template <int VectorBytes>
    GEMINI_INLINE void range(const Args& a, int64_t begin, int64_t end) {
        part(a, begin, end, std::make_index_sequence<Rule::kStates>());
    }

    template <size_t K>
    static constexpr bool kIsSquare = (Rule::kSquares >> K & 1) != 0;

    template <size_t... I>
    GEMINI_INLINE void part(const Args& a, int64_t begin, int64_t end, std::index_sequence<I...> states) {
        alignas(64) float widened[kTile];
        alignas(64) float p[kTile];
        alignas(64) float own[Rule::kStates + 1][kTile];
        for (int64_t at = begin; at < end; at += kTile) {
            const int64_t n = std::min(kTile, end - at), block = at / kCompactBlock;
            [[maybe_unused]] const uint32_t dither = a.dither + static_cast<uint32_t>(at) * kPerIndex;
            const f32_t* g = Grad::load(widened, static_cast<const typename Grad::Element*>(a.arrays.grad) + at, n);
            u16_t* hi = static_cast<u16_t*>(a.arrays.weights) + at;
            i8_t* lo = static_cast<i8_t*>(a.arrays.residual) + at;
            [[maybe_unused]] const auto codes = [&](size_t k) { return static_cast<u8_t*>(a.arrays.states[k]) + at; };
            [[maybe_unused]] const auto scales = [&](size_t k) { return static_cast<u8_t*>(a.arrays.scales[k]) + block; };
            join24_tile(p, hi, lo, n);
            (decode_tile<kIsSquare<I>>(own[I], codes(I), scales(I), n), ...);
            update_tile(a.rule, p, g, n, states, own[I]...);
            (encode_tile<kIsSquare<I>>(codes(I), scales(I), own[I], dither, n), ...);
            split24_tile(hi, lo, p, n);
        }
    }
};

template <class Kernel>
void run(Isa isa, const typename Kernel::Args& args, int64_t n) {
    const RangeFn<Kernel> range = select<Kernel>(isa);
    parallel_for(n, kCut, [&](int64_t begin, int64_t end) { range(args, begin, end); });
}

template <class Rule, class Grad>
void run_rule(Isa isa, const Update<Rule>& a, int64_t n) {
    if (a.arrays.residual != nullptr) run<UpdateKernel<Rule, Grad, true>>(isa, a, n);
    else run<UpdateKernel<Rule, Grad, false>>(isa, a, n);
}

struct Master {
    f32_t* full;
    u16_t* hi;
    i16_t* lo;
};

struct SplitKernel {
    using Args = Master;

    template <int VectorBytes>
    GEMINI_INLINE void range(const Master& a, int64_t begin, int64_t end) {
        split_tile(a.hi + begin, a.lo + begin, a.full + begin, end - begin);
    }
};

struct JoinKernel {
    using Args = Master;

    template <int VectorBytes>
    GEMINI_INLINE void range(const Master& a, int64_t begin, int64_t end) {
        join_tile(a.full + begin, a.hi + begin, a.lo + begin, end - begin);
    }
};

}  // namespace

void update(Isa isa, const Arrays& arrays, Dtype grad_dtype, int64_t n, const Scalars& scalars) {
    with_rule(scalars, arrays, [&](auto rule) {
        using Rule = decltype(rule);
        const Update<Rule> a{arrays, rule};
        switch (grad_dtype) {
            case Dtype::f32: return run_rule<Rule, F32>(isa, a, n);
            case Dtype::bf16: return run_rule<Rule, BF16>(isa, a, n);
            case Dtype::f16: return run_rule<Rule, F16>(isa, a, n);
        }
    });
}

void update_compact(Isa isa, const Arrays& arrays, Dtype grad_dtype, int64_t n, const Scalars& scalars,
                    uint32_t dither) {
    with_rule(scalars, arrays, [&](auto rule) {
        using Rule = decltype(rule);
        if constexpr (Rule::kSquares == kNotCompact) {
            throw std::invalid_argument("a rule without a compact form");
        } else {
            const CompactUpdate<Rule> a{arrays, rule, dither};
            switch (grad_dtype) {
                case Dtype::f32: return run<CompactKernel<Rule, F32>>(isa, a, n);
                case Dtype::bf16: return run<CompactKernel<Rule, BF16>>(isa, a, n);
                case Dtype::f16: return run<CompactKernel<Rule, F16>>(isa, a, n);
            }
        }
    });
}

namespace {

struct Master24 {
    f32_t* full;
    u16_t* hi;
    i8_t* lo;
};

struct Split24Kernel {
    using Args = Master24;

    template <int VectorBytes>
    GEMINI_INLINE void range(const Master24& a, int64_t begin, int64_t end) {
        split24_tile(a.hi + begin, a.lo + begin, a.full + begin, end - begin);
    }
};

struct Join24Kernel {
    using Args = Master24;

    template <int VectorBytes>
    GEMINI_INLINE void range(const Master24& a, int64_t begin, int64_t end) {
        join24_tile(a.full + begin, a.hi + begin, a.lo + begin, end - begin);
    }
};

}  // namespace

void split_master24(Isa isa, const void* master, void* hi, void* lo, int64_t n) {
    f32_t* full = static_cast<f32_t*>(const_cast<void*>(master));  // read only in this direction
    run<Split24Kernel>(isa, {full, static_cast<u16_t*>(hi), static_cast<i8_t*>(lo)}, n);
}

void join_master24(Isa isa, const void* hi, const void* lo, void* out, int64_t n) {
    u16_t* upper = static_cast<u16_t*>(const_cast<void*>(hi));
    run<Join24Kernel>(isa, {static_cast<f32_t*>(out), upper, static_cast<i8_t*>(const_cast<void*>(lo))}, n);
}

void split_master(Isa isa, const void* master, void* hi, void* lo, int64_t n) {
    f32_t* full = static_cast<f32_t*>(const_cast<void*>(master));  // read only in this direction
    run<SplitKernel>(isa, {full, static_cast<u16_t*>(hi), static_cast<i16_t*>(lo)}, n);
}

void join_master(Isa isa, const void* hi, const void* lo, void* out, int64_t n) {
    run<JoinKernel>(isa,
                    {static_cast<f32_t*>(out), static_cast<u16_t*>(const_cast<void*>(hi)),
                     static_cast<i16_t*>(const_cast<void*>(lo))},
                    n);
}

}  // namespace gemini
