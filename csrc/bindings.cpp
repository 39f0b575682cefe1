// The Python face of the native code, and the only file that knows pybind11. Pointers are integers, checked by
// gemini/kernels; gemini/kernels/native.py alone loads this one. The GIL is released around all work.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>

#include "checksum.h"
#include "cpu_grad.h"
#include "cpu_update.h"
#include "host_sums.h"
#include "nvme_io.h"
#include "stream.h"
#include "thread_pool.h"

namespace py = pybind11;
using namespace gemini;

namespace {

using Address = uintptr_t;

void* at(Address address) { return reinterpret_cast<void*>(address); }

// For the tests of the pool: runs a parallel_for that only counts, and throws in the piece that holds `fail_at`.
int64_t probe_pool(int64_t n, int64_t align, int64_t fail_at) {
    std::atomic<int64_t> counted{0};
    parallel_for(n, align, [&](int64_t begin, int64_t end) {
        if (begin <= fail_at && fail_at < end) throw std::runtime_error("probe_pool was told to fail");
        counted += end - begin;
    });
    return counted;
}

// Also for them: how many threads run the pieces of a parallel_for over n elements, when each piece takes a millisecond.
size_t probe_width(int64_t n) {
    std::mutex mutex;
    std::set<std::thread::id> threads;
    parallel_for(n, 1, [&](int64_t, int64_t) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        const std::lock_guard<std::mutex> lock(mutex);
        threads.insert(std::this_thread::get_id());
    });
    return threads.size();
}

}  // namespace

PYBIND11_MODULE(_C, m) {
    using nogil = py::call_guard<py::gil_scoped_release>;
    // Raised when a signature below changes: a library left over from another version is then refused, not misused.
    m.attr("INTERFACE") = 10;

    py::register_exception_translator([](std::exception_ptr thrown) {
        try {
            if (thrown) std::rethrow_exception(thrown);
        } catch (const IoError& error) {
            PyErr_SetObject(PyExc_OSError, py::make_tuple(error.code, error.what()).ptr());
        }
    });

    py::enum_<Isa>(m, "Isa").value("scalar", Isa::scalar).value("avx2", Isa::avx2).value("avx512", Isa::avx512);
    py::enum_<Dtype>(m, "Dtype").value("f32", Dtype::f32).value("bf16", Dtype::bf16).value("f16", Dtype::f16);
    m.def("runs_here", &runs_here);
    m.def("set_num_threads", &set_num_threads);
    m.def("num_threads", &num_threads);
    m.def("limit_threads", &limit_threads);
    m.def("flush_mode", &flush_mode);
    m.def("set_flush_mode", &set_flush_mode);
    m.def("probe_pool", &probe_pool, nogil());
    m.def("probe_width", &probe_width, nogil());

    py::class_<Scalars>(m, "Scalars").def(py::init(&make_scalars));

    m.def("update",
          [](Isa isa, Address weights, Address residual, const std::vector<Address>& states, Address grad,
             Dtype grad_dtype, int64_t n, const Scalars& scalars) {
              update(isa, arrays_at(weights, residual, grad, states), grad_dtype, n, scalars);
          },
          nogil());
    m.def("update_compact",
          [](Isa isa, Address weights, Address residual, const std::vector<Address>& states,
             const std::vector<Address>& scales, Address grad, Dtype grad_dtype, int64_t n, const Scalars& scalars,
             uint32_t dither) {
              update_compact(isa, compact_arrays_at(weights, residual, grad, states, scales), grad_dtype, n, scalars, dither);
          },
          nogil());
    m.def("split_master",
          [](Isa isa, Address master, Address hi, Address lo, int64_t n) {
              split_master(isa, at(master), at(hi), at(lo), n);
          },
          nogil());
    m.def("join_master",
          [](Isa isa, Address hi, Address lo, Address out, int64_t n) { join_master(isa, at(hi), at(lo), at(out), n); },
          nogil());
    m.def("split_master24",
          [](Isa isa, Address master, Address hi, Address lo, int64_t n) {
              split_master24(isa, at(master), at(hi), at(lo), n);
          },
          nogil());
    m.def("join_master24",
          [](Isa isa, Address hi, Address lo, Address out, int64_t n) { join_master24(isa, at(hi), at(lo), at(out), n); },
          nogil());
    m.def("copy_grad",
          [](Isa isa, Address dst, Dtype dst_dtype, Address src, Dtype src_dtype, int64_t n) {
              return copy_grad(isa, at(dst), dst_dtype, at(src), src_dtype, n);
          },
          nogil());
    m.def("accumulate_grad",
          [](Isa isa, Address acc, Address src, Dtype src_dtype, int64_t n) {
              return accumulate_grad(isa, at(acc), at(src), src_dtype, n);
          },
          nogil());
    m.def("accumulate_rounded",
          [](Isa isa, Address acc, Address rounded, Address src, Dtype src_dtype, int64_t n) {
              return accumulate_rounded(isa, at(acc), at(rounded), at(src), src_dtype, n);
          },
          nogil());
    m.def("sum_grad24",
          [](Isa isa, Address hi, Address lo, Address src, Dtype src_dtype, int64_t n, bool adding) {
              return sum_grad24(isa, at(hi), at(lo), at(src), src_dtype, n, adding);
          },
          nogil());
    m.def("sum_squares",
          [](Isa isa, Address src, Dtype src_dtype, int64_t n) { return sum_squares(isa, at(src), src_dtype, n); },
          nogil());
    py::class_<Landed, std::shared_ptr<Landed>>(m, "Landed").def("sums", &Landed::sums);
    py::class_<HostSums>(m, "HostSums")
        .def(py::init([](const std::vector<Address>& areas, int64_t area_bytes) {
            std::vector<void*> places;
            for (const Address area : areas) places.push_back(at(area));
            return std::make_unique<HostSums>(std::move(places), area_bytes);
        }))
        .def("land",
             [](HostSums& host, Isa isa, Address copying, Address adding, Address src, Dtype src_dtype, int64_t n,
                int64_t piece, Address dst, Dtype dst_dtype, Address lo, bool is_added) {
                 return host.land(isa, at(copying), at(adding), at(src), src_dtype, n, piece, at(dst), dst_dtype,
                                  at(lo), is_added);
             },
             nogil());
    m.def("stream_rmw3",
          [](Isa isa, Address a, Address b, Address c, Address d, int64_t n) {
              stream_rmw3(isa, at(a), at(b), at(c), at(d), n);
          },
          nogil());

    if (has_crc32())  // elsewhere there is no such function
        m.def("crc32",
              [](Address data, size_t num_bytes, uint32_t crc) { return crc32(at(data), num_bytes, crc); },
              nogil());

    py::class_<IoQueue>(m, "IoQueue")
        .def(py::init<int>())
        .def("submit_read",
             [](IoQueue& queue, int fd, Address memory, size_t num_bytes, int64_t offset, bool urgent) {
                 return queue.submit_read(fd, at(memory), num_bytes, offset, urgent);
             },
             nogil())
        .def("submit_write",
             [](IoQueue& queue, int fd, Address memory, size_t num_bytes, int64_t offset, bool urgent) {
                 return queue.submit_write(fd, at(memory), num_bytes, offset, urgent);
             },
             nogil())
        .def("wait", &IoQueue::wait, nogil())
        .def("done", &IoQueue::done, nogil())
        .def("close", &IoQueue::close, nogil());
}
