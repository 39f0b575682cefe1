// The Python face of the CUDA kernels; gemini/kernels/cuda.py is the only module that calls it. Compiled with or without
// them: what is missing is missing, and HAS_CUDA says so.
#include "bindings.h"

#if defined(GEMINI_CUDA)

#include <pybind11/stl.h>

#include <tuple>
#include <vector>

#include "grad.h"
#include "update.h"

namespace py = pybind11;

namespace gemini::cuda {
namespace {

using Address = uintptr_t;

template <class T = void>
T* at(Address address) { return reinterpret_cast<T*>(address); }

Stream stream_of(int device, Address handle) { return {device, at(handle)}; }

}  // namespace

void bind(py::module_& m) {
    using nogil = py::call_guard<py::gil_scoped_release>;
    py::class_<Segment>(m, "CudaSegment").def(py::init([](int64_t begin, int64_t end, const Scalars& scalars,
                                                           uint32_t dither) {
        return Segment{begin, end, scalars, dither};
    }), py::arg("begin"), py::arg("end"), py::arg("scalars"), py::arg("dither") = 0u);
    py::class_<NormPlaces>(m, "CudaNormPlaces")
        .def(py::init([](Address blocks, Address tiles, Address arrived, Address nonfinite) {
            return NormPlaces{at<double>(blocks), at<double>(tiles), at<unsigned>(arrived), at<int>(nonfinite)};
        }));
    m.def("cuda_update",
          [](int device, Address stream, Address weights, Address residual, const std::vector<Address>& states,
             Address grad, Dtype grad_dtype, const std::vector<Segment>& segments, Address grad_scale, Address stop) {
              update(stream_of(device, stream), arrays_at(weights, residual, grad, states), grad_dtype, segments,
                     at<float>(grad_scale), at<int>(stop));
          },
          nogil());
    m.def("cuda_update_compact",
          [](int device, Address stream, Address weights, Address residual, const std::vector<Address>& states,
             const std::vector<Address>& scales, Address grad, Dtype grad_dtype, const std::vector<Segment>& segments,
             Address grad_scale, Address stop) {
              update_compact(stream_of(device, stream), compact_arrays_at(weights, residual, grad, states, scales),
                             grad_dtype, segments, at<float>(grad_scale), at<int>(stop));
          },
          nogil());
    m.def("cuda_split_master",
          [](int device, Address stream, Address master, Address hi, Address lo, int64_t n) {
              split_master(stream_of(device, stream), at(master), at(hi), at(lo), n);
          },
          nogil());
    m.def("cuda_join_master",
          [](int device, Address stream, Address hi, Address lo, Address out, int64_t n) {
              join_master(stream_of(device, stream), at(hi), at(lo), at(out), n);
          },
          nogil());
    m.def("cuda_copy_grad",
          [](int device, Address stream, Address dst, Dtype dst_dtype, Address src, Dtype src_dtype, int64_t n,
             const NormPlaces& places) {
              copy_grad(stream_of(device, stream), at(dst), dst_dtype, at(src), src_dtype, n, places);
          },
          nogil());
    m.def("cuda_accumulate_grad",
          [](int device, Address stream, Address acc, Address src, Dtype src_dtype, int64_t n, const NormPlaces& places) {
              accumulate_grad(stream_of(device, stream), at(acc), at(src), src_dtype, n, places);
          },
          nogil());
    m.def("cuda_sum_grad24",
          [](int device, Address stream, Address hi, Address lo, Address src, Dtype src_dtype, int64_t n, bool adding,
             const NormPlaces& places) {
              sum_grad24(stream_of(device, stream), at(hi), at(lo), at(src), src_dtype, n, adding, places);
          },
          nogil());
    m.def("cuda_sum_squares",
          [](int device, Address stream, Address src, Dtype src_dtype, int64_t n, const NormPlaces& places) {
              sum_squares(stream_of(device, stream), at(src), src_dtype, n, places);
          },
          nogil());
    m.def("cuda_clip_factor",
          [](int device, Address stream, Address tiles, Address ends, int64_t count, double max_norm, Address totals,
             Address norm, Address factor, Address nonfinite) {
              clip_factor(stream_of(device, stream), at<double>(tiles), at<int64_t>(ends), count, max_norm,
                          at<double>(totals), {at<double>(norm), at<float>(factor), at<int>(nonfinite)});
          },
          nogil());
}

}  // namespace gemini::cuda

#endif
