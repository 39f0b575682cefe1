// The benchmark's yardstick, cut and threaded exactly as the Adam kernels are.
#include "stream.h"

#include "formats.h"
#include "thread_pool.h"

namespace gemini {
namespace {

struct Streams {
    f32_t *a, *b, *c;
    const f32_t* d;
};

struct StreamKernel {
    using Args = Streams;

    template <int VectorBytes>
    GEMINI_INLINE void range(const Streams& s, int64_t begin, int64_t end) {
        f32_t *__restrict a = s.a, *__restrict b = s.b, *__restrict c = s.c;
        const f32_t* __restrict d = s.d;
        GEMINI_INDEPENDENT
        for (int64_t i = begin; i < end; ++i) {
            a[i] = a[i] + d[i];
            b[i] = b[i] + d[i];
            c[i] = c[i] + d[i];
        }
    }
};

}  // namespace

void stream_rmw3(Isa isa, void* a, void* b, void* c, const void* d, int64_t n) {
    const Streams args{static_cast<f32_t*>(a), static_cast<f32_t*>(b), static_cast<f32_t*>(c),
                       static_cast<const f32_t*>(d)};
    const RangeFn<StreamKernel> range = select<StreamKernel>(isa);
    parallel_for(n, 64, [&](int64_t begin, int64_t end) { range(args, begin, end); });
}

}  // namespace gemini
