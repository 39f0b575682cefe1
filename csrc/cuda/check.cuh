// CUDA's errors as C++ exceptions, and the device that a call is for.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace gemini::cuda {

inline void check(cudaError_t error, const char* doing) {
    if (error != cudaSuccess) throw std::runtime_error(std::string(doing) + ": " + cudaGetErrorString(error));
}

// Kernels are launched on the current device of the thread, which must be the stream's. What it was comes back.
class OnDevice {
public:
    explicit OnDevice(int device) {
        check(cudaGetDevice(&before_), "asking for the current device");
        if (device != before_) check(cudaSetDevice(device), "choosing the device");
        changed_ = device != before_;
    }
    ~OnDevice() {
        if (changed_) cudaSetDevice(before_);
    }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

private:
    int before_ = 0;
    bool changed_ = false;
};

}  // namespace gemini::cuda
