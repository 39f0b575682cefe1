// The driver's functions are looked up when they are first needed: nothing here links CUDA.
#include "host_sums.h"

#include <dlfcn.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>

#include "thread_pool.h"

namespace gemini {
namespace {

using HostFunction = void (*)(void*);

struct Driver {
    int (*get_context)(void**);
    int (*set_context)(void*);
    int (*create_event)(void**, unsigned);
    int (*destroy_event)(void*);
    int (*record)(void* event, void* stream);
    int (*wait)(void* stream, void* event, unsigned);
    int (*copy_out)(void* into, uintptr_t source, size_t num_bytes, void* stream);
    int (*call)(void* stream, HostFunction function, void* data);
};

template <class Function>
void look_up(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (!function) throw std::runtime_error(std::string("the CUDA driver has no ") + name);
}

const Driver& driver() {
    static const Driver found = [] {
        void* library = dlopen("libcuda.so.1", RTLD_NOW);
        if (!library) throw std::runtime_error("there is no CUDA driver");
        Driver made;
        look_up(library, "cuCtxGetCurrent", made.get_context);
        look_up(library, "cuCtxSetCurrent", made.set_context);
        look_up(library, "cuEventCreate", made.create_event);
        look_up(library, "cuEventDestroy_v2", made.destroy_event);
        look_up(library, "cuEventRecord", made.record);
        look_up(library, "cuStreamWaitEvent", made.wait);
        look_up(library, "cuMemcpyDtoHAsync_v2", made.copy_out);
        look_up(library, "cuLaunchHostFunc", made.call);
        return made;
    }();
    return found;
}

void check(int error, const char* doing) {
    if (error) throw std::runtime_error(std::string(doing) + ": error " + std::to_string(error) + " of the CUDA driver");
}

// The context is a setting of each thread; what it was comes back.
class InContext {
public:
    explicit InContext(void* wanted) {
        check(driver().get_context(&before_), "asking for the context");
        if ((is_other_ = before_ != wanted)) check(driver().set_context(wanted), "choosing the context");
    }
    ~InContext() {
        if (is_other_) driver().set_context(before_);
    }

private:
    void* before_ = nullptr;
    bool is_other_ = false;
};

struct Piece {
    Isa isa;
    void* dst;
    Dtype dst_dtype;
    void* lo;
    const void* src;
    Dtype src_dtype;
    int64_t n;
    bool is_added;
    unsigned mode;
    std::shared_ptr<Landed> landed;
    size_t at;  // of its sums among them
};

// On a thread of CUDA's, which knows neither Python nor our floating point mode, and must see no exception.
void add(void* given) {
    const std::unique_ptr<Piece> piece(static_cast<Piece*>(given));
    const Piece& p = *piece;
    const unsigned before = flush_mode();
    set_flush_mode(p.mode);
    try {
        const std::vector<double> sums =
            p.lo         ? sum_grad24(p.isa, p.dst, p.lo, p.src, p.src_dtype, p.n, p.is_added)
            : p.is_added ? accumulate_grad(p.isa, p.dst, p.src, p.src_dtype, p.n)
                         : copy_grad(p.isa, p.dst, p.dst_dtype, p.src, p.src_dtype, p.n);
        p.landed->keep(p.at, sums);
    } catch (const std::exception& error) {
        p.landed->fail(error.what());
    }
    set_flush_mode(before);
}

int64_t size_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

void* moved(void* from, int64_t num_bytes) { return from ? static_cast<char*>(from) + num_bytes : nullptr; }

}  // namespace

std::vector<double> Landed::sums() const {
    if (!error_.empty()) throw std::runtime_error(error_);
    return sums_;
}

void Landed::keep(size_t at, const std::vector<double>& sums) {
    std::copy(sums.begin(), sums.end(), sums_.begin() + static_cast<std::ptrdiff_t>(at));
}

void Landed::fail(const char* why) {
    if (error_.empty()) error_ = why;
}

HostSums::HostSums(std::vector<void*> areas, int64_t area_bytes)
    : areas_(std::move(areas)), area_bytes_(area_bytes) {
    constexpr unsigned kWithoutTimes = 2;  // CU_EVENT_DISABLE_TIMING
    check(driver().get_context(&context_), "asking for the context");
    for (size_t i = 0; i < 2 * areas_.size(); ++i) {
        void* event = nullptr;
        check(driver().create_event(&event, kWithoutTimes), "making an event");
        (i % 2 ? full_ : free_).push_back(event);
    }
}

HostSums::~HostSums() {
    for (const auto* events : {&full_, &free_})
        for (void* event : *events) driver().destroy_event(event);  // the driver keeps what is still waited for
}

std::shared_ptr<Landed> HostSums::land(Isa isa, void* copying, void* adding, const void* src, Dtype src_dtype, int64_t n,
                                       int64_t piece, void* dst, Dtype dst_dtype, void* lo, bool is_added) {
    const Driver& cuda = driver();
    const InContext inside(context_);
    const int64_t width = size_of(src_dtype), into = size_of(dst_dtype), tiles = divided_up(piece, kNormTile);
    if (piece < 1 || piece * width > area_bytes_) throw std::runtime_error("a piece is larger than an area");
    const auto landed = std::make_shared<Landed>(n / piece * tiles + divided_up(n % piece, kNormTile));
    for (int64_t at = 0; at < n; at += piece, ++next_) {
        const size_t area = static_cast<size_t>(next_) % areas_.size();
        const int64_t items = std::min(piece, n - at);
        auto work = std::make_unique<Piece>(Piece{isa, moved(dst, at * into), dst_dtype, moved(lo, at), areas_[area],
                                                  src_dtype, items, is_added, flush_mode(), landed,
                                                  static_cast<size_t>(at / piece * tiles)});
        check(cuda.wait(copying, free_[area], 0), "waiting for an area");
        const uintptr_t from = reinterpret_cast<uintptr_t>(src) + static_cast<uintptr_t>(at * width);
        check(cuda.copy_out(areas_[area], from, static_cast<size_t>(items * width), copying), "copying a gradient");
        check(cuda.record(full_[area], copying), "recording an event");
        check(cuda.wait(adding, full_[area], 0), "waiting for a copy");
        check(cuda.call(adding, add, work.get()), "calling the host");
        work.release();
        check(cuda.record(free_[area], adding), "recording an event");
    }
    return landed;
}

}  // namespace gemini
