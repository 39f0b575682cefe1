// Gradients that leave a GPU through a few areas of host memory, and are copied or added to their planes there by the
// kernels of cpu_grad.h, all in the order of CUDA's streams: one stream copies, another calls the kernels as host
// functions, and events between them say which area is full and which is free again. Nobody waits, and all that comes
// before a piece of work was given to CUDA before it, so no order of theirs can stand still. For bindings.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cpu_grad.h"

namespace gemini {

// What the kernels return for one gradient, piece after piece; complete when its work on the second stream is over.
class Landed {
public:
    explicit Landed(size_t num_sums) : sums_(num_sums) {}
    std::vector<double> sums() const;  // throws std::runtime_error with the first thing that went wrong on the host
    void keep(size_t at, const std::vector<double>& sums);
    void fail(const char* why);

private:
    std::vector<double> sums_;
    std::string error_;
};

class HostSums {
public:
    // Areas of `area_bytes` each, which this alone uses, in the CUDA context that is current. Throws std::runtime_error
    // where there is no driver, or none that has such functions.
    HostSums(std::vector<void*> areas, int64_t area_bytes);
    ~HostSums();
    HostSums(const HostSums&) = delete;
    HostSums& operator=(const HostSums&) = delete;

    // Gives work to two streams: n elements of device memory, `piece` at a time (of whole norm tiles, or all). Without
    // `lo` dst = src, or fp32 dst += src; with it the 24 bits of dst and lo. Memory stays until `adding` has come so
    // far. Throws std::runtime_error if CUDA refuses; what it was given before is then under way. One thread at a time.
    std::shared_ptr<Landed> land(Isa isa, void* copying, void* adding, const void* src, Dtype src_dtype, int64_t n,
                                 int64_t piece, void* dst, Dtype dst_dtype, void* lo, bool is_added);

private:
    std::vector<void*> areas_, full_, free_;  // events by area
    const int64_t area_bytes_;
    void* context_ = nullptr;
    int64_t next_ = 0;
};

}  // namespace gemini
