// The memory stream Adam is measured against: reads four fp32 arrays and writes three, and does next to no work.
// Used by benchmarks/cpu_adam.py only.
#pragma once

#include <cstdint>

#include "isa.h"

namespace gemini {

// a += d, b += d, c += d; fp32 arrays of n elements.
void stream_rmw3(Isa isa, void* a, void* b, void* c, const void* d, int64_t n);

}  // namespace gemini
