// Gradients arriving in a chunk, on raw pointers: copy, accumulate and sum of squares, each in one pass, each giving
// the squared norm of what is now there. The sum is a fixed tree, so that neither threads, tiling nor instruction set
// change a bit: blocks of 4096 elements from the tensor's start; in a block lane j of 32 adds (double)x * (double)x of
// elements j, j + 32, ... in order; lanes are added pairwise, 16 apart, then 8, 4, 2, 1; blocks are added in order
// inside a tile of 2^20 elements. One double per tile is returned. A non-finite element makes its tile non-finite.
// For bindings.cpp.
#pragma once

#include <cstdint>
#include <vector>

#include "formats.h"
#include "isa.h"

namespace gemini {

constexpr int64_t kNormBlock = 4096;
constexpr int64_t kNormLanes = 32;
constexpr int64_t kNormTile = int64_t{1} << 20;

// dst = src; dst is fp32 or of src's format. src may sit at any address. They must not overlap.
std::vector<double> copy_grad(Isa isa, void* dst, Dtype dst_dtype, const void* src, Dtype src_dtype, int64_t n);

// acc (fp32) += float(src); the sums are those of the new acc.
std::vector<double> accumulate_grad(Isa isa, void* acc, const void* src, Dtype src_dtype, int64_t n);

// The same, and `rounded` (bf16) is the new acc, rounded half to even (NaN: 0x7FC0); the sums are those of `rounded`.
std::vector<double> accumulate_rounded(Isa isa, void* acc, void* rounded, const void* src, Dtype src_dtype, int64_t n);

// The 24 bits of hi (bf16) and lo (int8) += float(src), rounded to them, or = float(src) without `adding`; the sums are
// those of hi.
std::vector<double> sum_grad24(Isa isa, void* hi, void* lo, const void* src, Dtype src_dtype, int64_t n, bool adding);

std::vector<double> sum_squares(Isa isa, const void* src, Dtype src_dtype, int64_t n);

}  // namespace gemini
