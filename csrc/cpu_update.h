// Updates by the rules of rules.h on the CPU, and the bf16 split master, on raw pointers.
//
// All is plain IEEE fp32 in the written order: neither the instruction set nor the number of threads changes a bit.
// Arrays must not overlap. For bindings.cpp.
#pragma once

#include <cstdint>

#include "isa.h"
#include "rules.h"

namespace gemini {

// All arrays hold n elements.
void update(Isa isa, const Arrays& arrays, Dtype grad_dtype, int64_t n, const Scalars& scalars);

// The same of compact states (compact.h): `dither` begins the Weyl sequence of these n elements, which begin with a block.
void update_compact(Isa isa, const Arrays& arrays, Dtype grad_dtype, int64_t n, const Scalars& scalars, uint32_t dither);

// fp32 -> bf16 hi + int16 lo (a NaN becomes 0x7fc0, 0), and the exact inverse.
void split_master(Isa isa, const void* master, void* hi, void* lo, int64_t n);
void join_master(Isa isa, const void* hi, const void* lo, void* out, int64_t n);

// The same with an int8 lo: a master of 24 bits, to nearest even.
void split_master24(Isa isa, const void* master, void* hi, void* lo, int64_t n);
void join_master24(Isa isa, const void* hi, const void* lo, void* out, int64_t n);

}  // namespace gemini
