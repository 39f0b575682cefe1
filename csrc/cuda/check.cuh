// CUDA's errors as C++ exceptions.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace gemini::cuda {

inline void check(cudaError_t error, const char* doing) {
    if (error != cudaSuccess) throw std::runtime_error(std::string(doing) + ": " + cudaGetErrorString(error));
}

}  // namespace gemini::cuda
