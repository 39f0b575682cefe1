// The native worker threads: blocking std::thread workers, never OpenMP (a second OpenMP pool beside torch's makes
// both spin). parallel_for() cuts [0, n) at multiples of `align` and gives the pieces to whoever is free, the caller
// included; since every kernel's result is independent of the cuts, so is it of the threads. For the CPU kernels.
#pragma once

#include <cstdint>
#include <functional>

namespace gemini {

using RangeTask = std::function<void(int64_t begin, int64_t end)>;

// Runs task over [0, n); returns when all of it has run. Ranges below `inline_below` elements (waking a thread would
// cost more than the work, which the kernel knows), a pool or a limit of one thread and a forked child (whose
// workers stayed in the parent) run it in the calling thread. Workers take the caller's flush-to-zero mode. Any number
// of threads may call at once. The first exception of a piece is thrown here, after every running piece has ended.
void parallel_for(int64_t n, int64_t align, const RangeTask& task, int64_t inline_below = 32 * 1024);

// Threads that work on one parallel_for, the caller counted; at least 1. Workers are started when first needed.
void set_num_threads(int num_threads);
int num_threads();

// The same for the parallel_for calls of the calling thread alone, the caller counted; never more than the pool has.
// 0: no limit of its own, as every thread begins.
void limit_threads(int limit);

// The flush-to-zero and denormals-are-zero bits of the calling thread's floating point control register; 0 where the
// processor is not known.
unsigned flush_mode();
void set_flush_mode(unsigned mode);

}  // namespace gemini
