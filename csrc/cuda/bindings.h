// For csrc/bindings.cpp: adds the CUDA kernels to the module, in a build that has them.
#pragma once

#include <pybind11/pybind11.h>

namespace gemini::cuda {

void bind(pybind11::module_& m);

}  // namespace gemini::cuda
