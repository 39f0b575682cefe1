// A CUDA runtime in host memory, put before torch's own (LD_PRELOAD): the CUDA build of torch on a machine without a GPU.
//
// Device memory is addresses that the host cannot touch, with an alias (`fake_alias`) for what computes. A stream is a
// queue, and nothing of it runs before somebody waits for it, or the seed says so: a copy is as late as it may be, which
// is what a program that forgot to wait finds out. Every use of memory is held against all uses before it by vector
// clocks, so that two that nothing orders are told as a race whichever came first. One lock, no threads: the same seed
// and the same calls are the same run. Kernels are not run: what computes is taken over above (computing.py).
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#undef cudaGetDeviceProperties
#undef cudaStreamGetCaptureInfo
#define FACE extern "C" __attribute__((visibility("default")))

namespace {

using Address = uintptr_t;
using Guard = std::lock_guard<std::recursive_mutex>;

constexpr uint64_t kMiB = 1 << 20;
constexpr uint64_t kSpace = uint64_t{512} << 30;    // addresses of a device: expandable segments reserve many
constexpr Address kFirst = 0x7a0000000000;          // of device 0
constexpr Address kBetween = 0x10000000000;         // and the next one
constexpr uint64_t kSegment = 2 * kMiB;             // what cudaMalloc rounds to
constexpr int kMaxDevices = 8;

uint64_t setting(const char* name, uint64_t otherwise) {
    const char* value = getenv(name);
    return value ? strtoull(value, nullptr, 0) : otherwise;
}

std::recursive_mutex lock;
std::map<std::string, uint64_t> counts;
std::deque<std::string> races;
std::string refusal = "no error";
thread_local int current = 0;
thread_local cudaError_t last = cudaSuccess;

cudaError_t fail(cudaError_t error, const std::string& why) {
    Guard guard(lock);
    refusal = why;
    return last = error;
}

// ---- what happens before what ----------------------------------------------------------------------------------------

// By stream, how much of what it was given is known to be over.
struct Clock {
    std::vector<uint64_t> ticks;

    void join(const Clock& other) {
        if (ticks.size() < other.ticks.size()) ticks.resize(other.ticks.size());
        for (size_t i = 0; i < other.ticks.size(); ++i) ticks[i] = std::max(ticks[i], other.ticks[i]);
    }
    uint64_t& of(int stream) {
        if (ticks.size() <= size_t(stream)) ticks.resize(stream + 1);
        return ticks[stream];
    }
};

Clock host;                // what the host has seen to be over, by any of its threads
thread_local Clock seen;  // what this one has waited for: a question whether an event is over is no wait

// ---- what takes which time -------------------------------------------------------------------------------------------

// Where a test asks for it (fake_clock), everything has a time, in seconds that nobody waits for: each copy and each
// launch on its engine, behind what its stream comes after, and each thread of the host. Python says who is which
// thread, moves it on when it has waited, and what a launch takes (tests/virtual_time.py, tests/fakegpu/timed.py).
struct Engine {
    struct Span {
        double start, stop, num_bytes, ready;
    };
    std::vector<Span> spans;  // in the order of time

    // The first gap that is long enough, from when the work is ready on.
    double place(double ready, double seconds, double num_bytes) {
        double start = ready;
        size_t at = 0;
        for (; at < spans.size(); ++at) {
            if (spans[at].stop <= start) continue;
            if (start + seconds <= spans[at].start) break;
            start = spans[at].stop;
        }
        spans.insert(spans.begin() + at, {start, start + seconds, num_bytes, ready});
        return start + seconds;
    }
};

enum { kInbound, kOutbound, kCompute, kBlocked, kHost, kEngines };
constexpr int kThreads = 64;
struct Times {
    bool on = false;
    double rates[2] = {0, 0}, latency = 0, call = 0, starved = 0, computed = 0;
    double now[kThreads] = {};
    Engine engines[kEngines];  // kBlocked: when a call of the runtime has blocked thread 0
    double host_seconds = 0, last_copied = 0;  // what the host takes for each byte that was copied before it is called

} times;
thread_local int host_thread = 0;
thread_local double next_launch = 0;

double& now() { return times.now[host_thread]; }

void host_until(double at) {
    if (!times.on || at <= now()) return;
    if (host_thread == 0) times.engines[kBlocked].spans.push_back({now(), at, 0, at});
    now() = at;
}

struct Stream {
    struct Point {
        Stream* stream;
        uint64_t number;
        Clock clock, order;
        double at;
    };
    struct Work {
        std::shared_ptr<Point> after;  // of another stream
        std::function<void()> run;
    };

    int id, device;
    std::deque<Work> work;
    uint64_t given = 0, over = 0;
    Clock clock;  // comes after everything that the host has seen: threads may tell each other
    Clock order;  // only after what the thread that gives it has waited for
    double at = 0;  // when all of it is over

    // Something that takes a time. Who gives it to the device spends some as well.
    void takes(int engine, double seconds, double num_bytes) {
        if (!times.on) return;
        now() += times.call;
        const double ready = std::max(now(), at);
        if (engine == kCompute && host_thread) {
            at = ready + seconds;  // a worker's few kernels run beside those of the model, which were given long before
        } else if (engine == kCompute) {
            if (times.computed > 0) times.starved += std::max(0.0, now() - times.computed);
            times.computed = std::max(times.computed, at = times.engines[engine].place(ready, seconds, 0));
        } else if (engine == kHost) {
            at = times.engines[engine].place(ready, times.host_seconds * times.last_copied, 0);
        } else {
            at = times.engines[engine].place(ready, times.latency + num_bytes / times.rates[engine], num_bytes);
            times.last_copied = num_bytes;
        }
    }
    void tick() {
        clock.join(host);
        ++clock.of(id);
        order.join(seen);
        ++order.of(id);
    }
    void wait_for(const Point& point) {
        clock.join(point.clock);
        order.join(point.order);
        at = std::max(at, point.at);
    }
    void give(Work next) {
        work.push_back(std::move(next));
        ++given;
    }
    std::shared_ptr<Point> point() {
        tick();
        return std::make_shared<Point>(Point{this, given, clock, order, std::max(at, now())});
    }
    void run_until(uint64_t number) {
        while (over < number) {
            Work next = std::move(work.front());
            work.pop_front();
            if (next.after) next.after->stream->run_until(next.after->number);
            if (next.run) next.run();
            ++over;
        }
    }
    void run_all() { run_until(given); }
};

std::vector<std::unique_ptr<Stream>> streams;

// Who wants to know what comes before what asks for the history: every copy and launch, a line each.
bool keeps_history = false;
std::string history;

void note(Stream& stream, const std::string& what, size_t size) {
    if (!keeps_history) return;
    history += what + "\t" + std::to_string(size) + "\t" + std::to_string(stream.id);
    for (uint64_t tick : stream.order.ticks) history += "\t" + std::to_string(tick);
    history += "\n";
}

Stream* new_stream(int device) {
    streams.push_back(std::make_unique<Stream>());
    streams.back()->id = int(streams.size());
    streams.back()->device = device;
    return streams.back().get();
}

Stream& stream_of(cudaStream_t handle) {
    static Stream* of_device[kMaxDevices];
    if (Address(handle) > 2) return *reinterpret_cast<Stream*>(handle);
    if (!of_device[current]) of_device[current] = new_stream(current);
    return *of_device[current];
}

uint64_t seed = setting("FAKEGPU_SEED", 0);
std::mt19937 draw(seed);

// Now and then some work is done early, as the seed has it: without a seed everything is as late as it may be.
void play() {
    if (!seed || streams.empty() || draw() % 2) return;
    Stream& stream = *streams[draw() % streams.size()];
    stream.run_until(std::min(stream.given, stream.over + 1 + draw() % 3));
}

// ---- who has used which memory ---------------------------------------------------------------------------------------

struct Use {
    int stream = 0;
    uint64_t tick = 0;
    const char* what = "";
};

struct Range {
    Address stop;
    Use written;
    std::vector<Use> read;
};

std::map<Address, Range> uses;  // by the first address; ranges do not overlap

void cut(Address at) {
    auto next = uses.lower_bound(at);
    if (next == uses.begin() || (next != uses.end() && next->first == at)) return;
    auto before = std::prev(next);
    if (before->second.stop <= at) return;
    uses.emplace(at, before->second);
    before->second.stop = at;
}

const char* lasting(const std::string& name) {
    static std::map<std::string, int> names;
    return names.emplace(name, 0).first->first.c_str();
}

void tell_race(const char* what, bool writes, const Use& other, bool wrote, Address start, Address stop, const char* by) {
    char text[500];
    snprintf(text, sizeof text, "%s %s %zu bytes at %zx %s, and nothing has made it wait for %s of stream %d, which %s them",
             what, writes ? "writes" : "reads", size_t(stop - start), size_t(start), by, other.what, other.stream,
             wrote ? "wrote" : "read");
    ++counts["races"];
    if (races.size() < 100) races.push_back(text);
}

// Work of a stream (its last tick) uses [start, start + size).
void use(Stream& stream, Address start, size_t size, bool writes, const char* what) {
    if (!size) return;
    const Address stop = start + size;
    const Use mine{stream.id, stream.clock.of(stream.id), what};
    const std::string by = "on stream " + std::to_string(stream.id);
    const auto before = [&](const Use& u) { return !u.stream || u.stream == stream.id || stream.clock.of(u.stream) >= u.tick; };
    cut(start);
    cut(stop);
    bool told = false;
    Address at = start;
    for (auto it = uses.lower_bound(start); at < stop; ++it) {
        if (it == uses.end() || it->first > at) {
            const Address until = it == uses.end() ? stop : std::min(it->first, stop);
            it = uses.emplace(at, Range{until, {}, {}}).first;
        }
        Range& range = it->second;
        if (!told && !before(range.written)) told = true, tell_race(what, writes, range.written, true, start, stop, by.c_str());
        bool seen = false;
        for (Use& reader : range.read) {
            if (writes && !told && !before(reader)) told = true, tell_race(what, true, reader, false, start, stop, by.c_str());
            if (!writes && reader.stream == stream.id) reader = mine, seen = true;
        }
        if (!writes && !seen) range.read.push_back(mine);
        at = range.stop;
    }
    if (writes) {
        uses.erase(uses.lower_bound(start), uses.lower_bound(stop));
        uses.emplace(start, Range{stop, mine, {}});
    }
}

void forget(Address start, size_t size) {
    cut(start);
    cut(start + size);
    uses.erase(uses.lower_bound(start), uses.lower_bound(start + size));
}

// ---- memory ----------------------------------------------------------------------------------------------------------

struct Device {
    char *base = nullptr, *alias = nullptr;
    uint64_t memory = 0, used = 0, peak = 0, context = 0;
    std::map<Address, uint64_t> blocks;
    std::map<Address, uint64_t> reserved;  // addresses that the driver has given, with blocks in them or without

    // The first addresses that nobody has; 0 if there are none.
    Address room(uint64_t size) const {
        Address place = Address(base) + kSegment;
        for (bool moved = true; std::exchange(moved, false);)
            for (const auto* taken : {&blocks, &reserved})
                for (const auto& [start, length] : *taken)
                    if (start < place + size && place < start + length) place = start + length, moved = true;
        return place + size > Address(base) + kSpace ? 0 : place;
    }
};

Device devices[kMaxDevices];
std::map<Address, uint64_t> page_locked;
uint64_t refuse_after = ~uint64_t{0};  // calls of cudaMalloc

int num_devices() {
    static const int number = [] {
        const int wanted = int(std::min<uint64_t>(setting("FAKEGPU_DEVICES", 2), kMaxDevices));
        for (int i = 0; i < wanted; ++i) {
            Device& device = devices[i];
            const int file = memfd_create("fakegpu", 0);
            if (file < 0 || ftruncate(file, kSpace)) abort();
            void* wish = reinterpret_cast<void*>(kFirst + i * kBetween);
            device.base = static_cast<char*>(mmap(wish, kSpace, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0));
            device.alias =
                static_cast<char*>(mmap(nullptr, kSpace, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0));
            if (device.base == MAP_FAILED || device.alias == MAP_FAILED) abort();
            close(file);
            device.memory = setting("FAKEGPU_MIB", 8192) * kMiB;
        }
        return wanted;
    }();
    return number;
}

int device_of(const void* at) {
    for (int i = 0; i < num_devices(); ++i)
        if (at >= devices[i].base && at < devices[i].base + kSpace) return i;
    return -1;
}

char* touchable(const void* at) {
    const int device = device_of(at);
    char* place = static_cast<char*>(const_cast<void*>(at));
    return device < 0 ? place : devices[device].alias + (place - devices[device].base);
}

// Whether all of it is in ranges, one behind the other.
bool inside(const std::map<Address, uint64_t>& ranges, const void* at, size_t size) {
    auto range = ranges.upper_bound(Address(at));
    if (range == ranges.begin()) return false;
    Address stop = (--range)->first;
    for (; range != ranges.end() && range->first == stop; ++range) {
        stop = range->first + range->second;
        if (Address(at) + size <= stop) return true;
        if (Address(at) >= stop) return false;
    }
    return false;
}

// The first call for a device makes a context there, which takes memory of it.
Device& with_context() {
    num_devices();
    Device& device = devices[current];
    if (!device.context) {
        device.context = setting("FAKEGPU_CONTEXT_MIB", 500) * kMiB;
        device.used += device.context;
    }
    return device;
}

// The host waits for a stream. Where it had seen all of it be over already, that is none.
cudaError_t host_waits(Stream& stream, const char* how) {
    stream.run_all();
    host_until(stream.at);
    if (host.of(stream.id) < stream.clock.of(stream.id)) {
        ++counts["waits of the host"];
        ++counts[how];
    }
    host.join(stream.clock);
    seen.join(stream.order);
    return cudaSuccess;
}

cudaError_t copy(void* into, const void* from, size_t size, cudaStream_t handle, bool waits) {
    Guard guard(lock);
    with_context();
    if (!size) return cudaSuccess;
    const int to_device = device_of(into), of_device = device_of(from);
    if ((to_device >= 0 && !inside(devices[to_device].blocks, into, size)) ||
        (of_device >= 0 && !inside(devices[of_device].blocks, from, size)))
        return fail(cudaErrorInvalidValue, "a copy from or to device memory that nobody has allocated");
    Stream& stream = stream_of(handle);
    const void* of_host = to_device < 0 ? into : of_device < 0 ? from : nullptr;
    const bool pageable = of_host && !inside(page_locked, of_host, size);
    const std::string kind = std::string(of_device < 0 ? "host" : "device") + " to " + (to_device < 0 ? "host" : "device");
    ++counts[kind + (pageable ? " pageable" : "") + " copies"];
    counts[kind + (pageable ? " pageable" : "") + " bytes"] += size;
    stream.tick();
    stream.takes(to_device < 0 ? kOutbound : of_device < 0 ? kInbound : kCompute, 0, double(size));
    note(stream, kind, size);
    const char* name = lasting("a copy, " + kind);
    if (of_device >= 0 || !pageable) use(stream, Address(from), size, false, name);
    if (to_device >= 0 || !pageable) use(stream, Address(into), size, true, name);
    char *target = touchable(into), *source = touchable(from);
    if (pageable && to_device >= 0) {  // the driver takes the bytes along at once
        auto taken = std::make_shared<std::vector<char>>(source, source + size);
        stream.give({nullptr, [=] { memcpy(target, taken->data(), size); }});
    } else {
        stream.give({nullptr, [=] { memmove(target, source, size); }});
    }
    if (waits || (pageable && to_device < 0)) return host_waits(stream, pageable ? "pageable waits" : "copies waited for");
    play();
    return cudaSuccess;
}

struct Event {
    std::shared_ptr<Stream::Point> point;
};

Event& event_of(cudaEvent_t event) { return *reinterpret_cast<Event*>(event); }

}  // namespace

// ---- for the Python side ---------------------------------------------------------------------------------------------

FACE void* fake_alias(const void* at) { return touchable(at); }
FACE int fake_device_of(const void* at) { return device_of(at); }
FACE int fake_has_context(int device) { return devices[device].context != 0; }

// The calling thread computes on a stream now: behind all that the stream was given. What an earlier call has left as
// the last error is told here, once, as torch does when it launches a kernel.
FACE int fake_launch(void* stream, const char* what) {
    Guard guard(lock);
    Stream& on = stream_of(static_cast<cudaStream_t>(stream));
    on.run_all();
    on.tick();
    on.takes(kCompute, std::exchange(next_launch, 0), 0);
    ++counts["launches"];
    ++counts[std::string("launch ") + what];
    note(on, what, 0);
    return std::exchange(last, cudaSuccess);
}

FACE void fake_use(void* stream, void* at, size_t size, int writes, const char* what) {
    Guard guard(lock);
    Stream& on = stream_of(static_cast<cudaStream_t>(stream));
    on.clock.join(host);  // results get their memory after the launch was told
    use(on, Address(at), size, writes, lasting(what));
}

// The host uses memory of its own: what copies it must be over, and known to be.
FACE void fake_host_use(void* at, size_t size, int writes, const char* what) {
    Guard guard(lock);
    if (!size || !inside(page_locked, at, 1)) return;
    const Address start = Address(at), stop = start + size;
    const auto over = [](const Use& u) { return !u.stream || host.of(u.stream) >= u.tick; };
    cut(start);
    for (auto it = uses.lower_bound(start); it != uses.end() && it->first < stop; ++it) {
        if (!over(it->second.written)) return tell_race(what, writes, it->second.written, true, start, stop, "on the host");
        for (const Use& reader : it->second.read)
            if (writes && !over(reader)) return tell_race(what, true, reader, false, start, stop, "on the host");
    }
}

FACE size_t fake_race(char* out, size_t size) {
    Guard guard(lock);
    if (races.empty()) return 0;
    const size_t length = snprintf(out, size, "%s", races.front().c_str());
    races.pop_front();
    return length;
}

FACE size_t fake_counts(char* out, size_t size) {
    Guard guard(lock);
    std::string text;
    for (const auto& [name, number] : counts) text += name + "=" + std::to_string(number) + "\n";
    return snprintf(out, size, "%s", text.c_str());
}

// The calling thread has waited for an event, by asking again and again.
FACE void fake_waited(void* event) {
    Guard guard(lock);
    if (const auto point = event_of(static_cast<cudaEvent_t>(event)).point) seen.join(point->order);
}

// What was noted since the last call is written to a file, and noting goes on or ends.
FACE int fake_history(const char* path, int goes_on) {
    Guard guard(lock);
    keeps_history = goes_on;
    FILE* file = fopen(path, "w");
    if (!file) return 1;
    fwrite(history.data(), 1, history.size(), file);
    history.clear();
    return fclose(file);
}

// Times begin anew, or end where no rate is given; what there was can be looked at then.
FACE void fake_clock(double inbound, double outbound, double latency, double call) {
    Guard guard(lock);
    if (!(times.on = inbound > 0)) return;
    times = Times();
    times.on = true;
    times.rates[kInbound] = inbound, times.rates[kOutbound] = outbound, times.latency = latency, times.call = call;
    for (auto& stream : streams) stream->at = 0;
}
FACE void fake_thread(int number) { host_thread = number % kThreads; }
FACE double fake_now(int number) { return times.now[number % kThreads]; }
FACE void fake_move(int number, double to) {
    Guard guard(lock);
    times.now[number % kThreads] = to;
}
FACE void fake_host_seconds(double of_byte) { times.host_seconds = of_byte; }
FACE void fake_next_launch(double seconds) { next_launch = seconds; }
FACE double fake_starved() { return times.starved; }
FACE double fake_over_at(void* event) {
    Guard guard(lock);
    const auto point = event_of(static_cast<cudaEvent_t>(event)).point;
    return point ? point->at : 0;
}
// Four numbers for each thing that an engine has done.
FACE size_t fake_spans(int engine, double* out, size_t most) {
    Guard guard(lock);
    const auto& spans = times.engines[engine].spans;
    if (out) memcpy(out, spans.data(), std::min(most, spans.size()) * sizeof(Engine::Span));
    return spans.size();
}

FACE uint64_t fake_memory(int device, uint64_t memory, int new_peak) {
    Guard guard(lock);
    if (memory) devices[device].memory = memory;
    const uint64_t peak = devices[device].peak;
    if (new_peak) devices[device].peak = devices[device].used;
    return peak;
}

FACE void fake_seed(uint64_t next) {
    Guard guard(lock);
    draw.seed(seed = next);
}

FACE void fake_refuse_after(uint64_t calls) {
    Guard guard(lock);
    refuse_after = calls;
}

// ---- devices ---------------------------------------------------------------------------------------------------------

FACE cudaError_t cudaGetDeviceCount(int* number) { return *number = num_devices(), cudaSuccess; }
FACE cudaError_t cudaGetDevice(int* device) { return *device = current, cudaSuccess; }
FACE cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= num_devices()) return fail(cudaErrorInvalidDevice, "there is no such device");
    Guard guard(lock);
    current = device;
    with_context();
    return cudaSuccess;
}
FACE cudaError_t cudaDeviceSynchronize() {
    Guard guard(lock);
    with_context();
    for (auto& stream : streams)
        if (stream->device == current) stream->run_all(), host.join(stream->clock), host_until(stream->at);
    ++counts["waits of the host"];
    return cudaSuccess;
}
FACE cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
FACE cudaError_t cudaDeviceGetPCIBusId(char* out, int size, int device) {
    return snprintf(out, size, "0000:%02x:00.0", device), cudaSuccess;
}
FACE cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { return *least = 0, *greatest = -5, cudaSuccess; }
FACE cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
FACE cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
FACE cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9 : attribute == cudaDevAttrMultiProcessorCount ? 132 : 0;
    return cudaSuccess;
}
FACE cudaError_t cudaGetDeviceProperties(cudaDeviceProp* of, int device) {
    num_devices();
    *of = {};
    snprintf(of->name, sizeof of->name, "no GPU at all");
    of->major = 9, of->multiProcessorCount = 132, of->warpSize = 32, of->totalGlobalMem = devices[device].memory;
    of->maxThreadsPerBlock = of->maxThreadsDim[0] = of->maxThreadsDim[1] = 1024, of->maxThreadsDim[2] = 64;
    of->maxThreadsPerMultiProcessor = 2048, of->sharedMemPerBlock = 48 << 10, of->regsPerMultiprocessor = 64 << 10;
    of->maxGridSize[0] = 0x7fffffff, of->maxGridSize[1] = of->maxGridSize[2] = 0xffff, of->textureAlignment = 512;
    of->l2CacheSize = 50 << 20, of->pciBusID = device;
    return cudaSuccess;
}
static void* driver_function(const std::string& name);
FACE cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** entry, unsigned, unsigned long long,
                                                  cudaDriverEntryPointQueryResult* result) {
    *entry = driver_function(name);
    if (*entry) {
        if (result) *result = cudaDriverEntryPointSuccess;
        return cudaSuccess;
    }
    if (result) *result = cudaDriverEntryPointSymbolNotFound;
    return fail(cudaErrorSymbolNotFound, std::string("there is no driver, and so no ") + name);
}
FACE cudaError_t cudaProfilerStart() { return cudaSuccess; }
FACE cudaError_t cudaProfilerStop() { return cudaSuccess; }

FACE const char* cudaGetErrorName(cudaError_t error) {
    return error == cudaSuccess ? "cudaSuccess" : error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "fake";
}
FACE const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : refusal.c_str(); }
FACE cudaError_t cudaGetLastError() { return std::exchange(last, cudaSuccess); }
FACE cudaError_t cudaPeekAtLastError() { return last; }

// ---- memory ----------------------------------------------------------------------------------------------------------

FACE cudaError_t cudaMalloc(void** at, size_t size) {
    Guard guard(lock);
    Device& device = with_context();
    size = (size + kSegment - 1) / kSegment * kSegment;
    ++counts["cudaMalloc"];
    if (refuse_after == 0 || device.used + size > device.memory) return fail(cudaErrorMemoryAllocation, "out of memory");
    refuse_after -= refuse_after != ~uint64_t{0};
    const Address place = device.room(size);
    if (!place) return fail(cudaErrorMemoryAllocation, "out of addresses");
    device.blocks[place] = size;
    device.peak = std::max(device.peak, device.used += size);
    *at = reinterpret_cast<void*>(place);
    memset(touchable(*at), 0xff, size);  // NaN in every float
    return cudaSuccess;
}
FACE cudaError_t cudaFree(void* at) {
    if (!at) return cudaSuccess;
    Guard guard(lock);
    const int device = device_of(at);
    if (device < 0 || !devices[device].blocks.count(Address(at)))
        return fail(cudaErrorInvalidValue, "cudaFree of what nobody has allocated");
    const int before = std::exchange(current, device);
    cudaDeviceSynchronize();
    current = before;
    const uint64_t size = devices[device].blocks[Address(at)];
    devices[device].blocks.erase(Address(at));
    devices[device].used -= size;
    forget(Address(at), size);
    madvise(touchable(at), size, MADV_REMOVE);
    return cudaSuccess;
}
FACE cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    Guard guard(lock);
    Device& device = with_context();
    return *free = device.memory - std::min(device.used, device.memory), *total = device.memory, cudaSuccess;
}
FACE cudaError_t cudaHostAlloc(void** at, size_t size, unsigned) {
    Guard guard(lock);
    with_context();
    *at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    page_locked[Address(*at)] = size;
    ++counts["cudaHostAlloc"];
    return cudaSuccess;
}
FACE cudaError_t cudaHostRegister(void* at, size_t size, unsigned flags) {
    Guard guard(lock);
    with_context();
    static const uint64_t limit = setting("FAKEGPU_LOCKED_MIB", 1 << 20) * kMiB;
    uint64_t locked = size;
    for (const auto& [start, length] : page_locked) {
        if (start < Address(at) + size && Address(at) < start + length)
            return fail(cudaErrorHostMemoryAlreadyRegistered, "registered already");
        locked += length;
    }
    if (flags & ~0x1fu) return fail(cudaErrorInvalidValue, "there are no such flags");
    if (size > uint64_t{64} << 30) return fail(cudaErrorMemoryAllocation, "more in one piece than drivers take");
    if (locked > limit) return fail(cudaErrorMemoryAllocation, "so much memory cannot be locked");
    page_locked[Address(at)] = size;
    ++counts["cudaHostRegister"];
    return cudaSuccess;
}
static cudaError_t unlock(void* at, bool unmaps) {
    Guard guard(lock);
    auto found = page_locked.find(Address(at));
    if (found == page_locked.end()) return fail(cudaErrorHostMemoryNotRegistered, "not registered");
    for (auto& stream : streams) stream->run_all();
    forget(found->first, found->second);
    if (unmaps) munmap(at, found->second);
    page_locked.erase(found);
    return cudaSuccess;
}
FACE cudaError_t cudaHostUnregister(void* at) { return unlock(at, false); }
FACE cudaError_t cudaFreeHost(void* at) { return unlock(at, true); }
FACE cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* of, const void* at) {
    Guard guard(lock);
    const int device = device_of(at);
    *of = {};
    of->type = device >= 0 ? cudaMemoryTypeDevice : inside(page_locked, at, 1) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    of->device = std::max(device, 0);
    of->devicePointer = const_cast<void*>(at);
    of->hostPointer = device >= 0 ? nullptr : const_cast<void*>(at);
    return cudaSuccess;
}
FACE cudaError_t cudaMemcpyAsync(void* into, const void* from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
    return copy(into, from, size, stream, false);
}
FACE cudaError_t cudaMemcpy(void* into, const void* from, size_t size, cudaMemcpyKind) {
    return copy(into, from, size, nullptr, true);
}
FACE cudaError_t cudaMemcpyPeerAsync(void* into, int, const void* from, int, size_t size, cudaStream_t stream) {
    return copy(into, from, size, stream, false);
}
FACE cudaError_t cudaMemsetAsync(void* at, int value, size_t size, cudaStream_t handle) {
    Guard guard(lock);
    Stream& stream = stream_of(handle);
    stream.tick();
    use(stream, Address(at), size, true, "a memset");
    stream.give({nullptr, [place = touchable(at), value, size] { memset(place, value, size); }});
    return cudaSuccess;
}
FACE cudaError_t cudaMemset(void* at, int value, size_t size) {
    cudaMemsetAsync(at, value, size, nullptr);
    Guard guard(lock);
    return host_waits(stream_of(nullptr), "memsets waited for");
}

// ---- the driver's memory, of which torch makes expandable segments ------------------------------------------------------

static CUresult driver_reserves(CUdeviceptr* at, size_t size, size_t, CUdeviceptr, unsigned long long) {
    Guard guard(lock);
    Device& device = with_context();
    const Address place = device.room(size);
    if (!place) return CUDA_ERROR_OUT_OF_MEMORY;
    device.reserved[place] = size;
    return *at = place, CUDA_SUCCESS;
}
static CUresult driver_gives_back(CUdeviceptr at, size_t) {
    Guard guard(lock);
    for (Device& device : devices)
        if (device.reserved.erase(at)) return CUDA_SUCCESS;
    return CUDA_ERROR_INVALID_VALUE;
}
struct Physical {
    int device;
    uint64_t size;
};
static CUresult driver_creates(CUmemGenericAllocationHandle* made, size_t size, const CUmemAllocationProp* of, unsigned long long) {
    Guard guard(lock);
    Device& device = devices[of->location.id];
    ++counts["cuMemCreate"];
    if (refuse_after == 0 || device.used + size > device.memory) return CUDA_ERROR_OUT_OF_MEMORY;
    refuse_after -= refuse_after != ~uint64_t{0};
    device.peak = std::max(device.peak, device.used += size);
    return *made = reinterpret_cast<CUmemGenericAllocationHandle>(new Physical{of->location.id, size}), CUDA_SUCCESS;
}
static CUresult driver_releases(CUmemGenericAllocationHandle made) {
    Guard guard(lock);
    Physical* memory = reinterpret_cast<Physical*>(made);
    devices[memory->device].used -= memory->size;
    return delete memory, CUDA_SUCCESS;
}
static CUresult driver_maps(CUdeviceptr at, size_t size, size_t, CUmemGenericAllocationHandle, unsigned long long) {
    Guard guard(lock);
    Device& device = devices[device_of(reinterpret_cast<void*>(at))];
    if (!inside(device.reserved, reinterpret_cast<void*>(at), size)) return CUDA_ERROR_INVALID_VALUE;
    device.blocks[at] = size;
    memset(touchable(reinterpret_cast<void*>(at)), 0xff, size);
    return CUDA_SUCCESS;
}
// What still uses the memory is lost, as on a GPU: the caller has to have waited.
static CUresult driver_unmaps(CUdeviceptr at, size_t size) {
    Guard guard(lock);
    Device& device = devices[device_of(reinterpret_cast<void*>(at))];
    auto& blocks = device.blocks;
    const auto pending = [](const Use& u) { return u.stream && host.of(u.stream) < u.tick; };
    for (auto range = uses.lower_bound(at); range != uses.end() && range->first < at + size; ++range)
        if (pending(range->second.written)) tell_race("an unmapping", true, range->second.written, true, at, at + size, "by the driver");
    blocks.erase(blocks.lower_bound(at), blocks.lower_bound(at + size));
    forget(at, size);
    madvise(touchable(reinterpret_cast<void*>(at)), size, MADV_REMOVE);
    return CUDA_SUCCESS;
}
static CUresult driver_lets_all_access(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
static CUresult driver_tells_granularity(size_t* size, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
    return *size = kSegment, CUDA_SUCCESS;
}
static CUresult driver_tells_an_attribute(int* value, CUdevice_attribute, CUdevice) { return *value = 0, CUDA_SUCCESS; }
static CUresult driver_tells_an_error(CUresult error, const char** text) {
    return *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "an error", CUDA_SUCCESS;
}
static CUresult driver_cannot() { return CUDA_ERROR_NOT_SUPPORTED; }

// torch wants all of what it may need to be there before it asks for any.
static void* driver_function(const std::string& name) {
    static const std::map<std::string, void*> known = {
        {"cuMemAddressReserve", (void*)driver_reserves}, {"cuMemAddressFree", (void*)driver_gives_back},
        {"cuMemCreate", (void*)driver_creates}, {"cuMemRelease", (void*)driver_releases},
        {"cuMemMap", (void*)driver_maps}, {"cuMemUnmap", (void*)driver_unmaps},
        {"cuMemSetAccess", (void*)driver_lets_all_access},
        {"cuMemGetAllocationGranularity", (void*)driver_tells_granularity},
        {"cuDeviceGetAttribute", (void*)driver_tells_an_attribute}, {"cuGetErrorString", (void*)driver_tells_an_error},
    };
    const auto found = known.find(name);
    if (found != known.end()) return found->second;
    return name.rfind("cuMem", 0) == 0 || name.rfind("cuMulticast", 0) == 0 || name.rfind("cuStreamWrite", 0) == 0 ||
                   name.rfind("cuCtx", 0) == 0 || name.rfind("cuDev", 0) == 0 || name.rfind("cuGreen", 0) == 0
               ? (void*)driver_cannot : nullptr;
}

// ---- streams and events ----------------------------------------------------------------------------------------------

FACE cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
    Guard guard(lock);
    with_context();
    return *stream = reinterpret_cast<cudaStream_t>(new_stream(current)), cudaSuccess;
}
FACE cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
FACE cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return cudaStreamCreate(stream); }
FACE cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
FACE cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { return *priority = 0, cudaSuccess; }
FACE cudaError_t cudaStreamQuery(cudaStream_t handle) {
    Guard guard(lock);
    Stream& stream = stream_of(handle);
    if (times.on) return stream.at <= now() ? (stream.run_all(), cudaSuccess) : cudaErrorNotReady;
    if (stream.over == stream.given) return cudaSuccess;
    return stream.run_until(stream.over + 1), cudaErrorNotReady;
}
FACE cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    Guard guard(lock);
    with_context();
    return host_waits(stream_of(handle), "streams waited for");
}
FACE cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
    Guard guard(lock);
    const auto point = event_of(event).point;
    ++counts["waits of streams"];
    if (!point) return cudaSuccess;
    Stream& stream = stream_of(handle);
    stream.tick();
    stream.wait_for(*point);
    if (point->stream != &stream) stream.give({point, nullptr});
    play();
    return cudaSuccess;
}
FACE cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t call, void* with, unsigned) {
    Guard guard(lock);
    return stream_of(handle).give({nullptr, [=] { call(handle, cudaSuccess, with); }}), cudaSuccess;
}
FACE cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t call, void* with) {
    Guard guard(lock);
    Stream& stream = stream_of(handle);
    stream.tick();
    stream.takes(kHost, 0, 0);
    ++counts["calls of the host"];
    note(stream, "a call of the host", 0);
    stream.give({nullptr, [=] { call(with); }});
    play();
    return cudaSuccess;
}
FACE cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
FACE cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                          cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
    if (id) *id = 0;
    return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
FACE cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
FACE cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    Guard guard(lock);
    with_context();
    return *event = reinterpret_cast<cudaEvent_t>(new Event), cudaSuccess;
}
FACE cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
FACE cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete &event_of(event), cudaSuccess; }
FACE cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    Guard guard(lock);
    ++counts["events"];
    return event_of(event).point = stream_of(stream).point(), cudaSuccess;
}
FACE cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }
FACE cudaError_t cudaEventQuery(cudaEvent_t event) {
    Guard guard(lock);
    const auto point = event_of(event).point;
    if (!point) return cudaSuccess;
    if (times.on) {
        if (point->at > now()) return cudaErrorNotReady;
        point->stream->run_until(point->number);
    }
    if (point->stream->over < point->number) return point->stream->run_until(point->stream->over + 1), cudaErrorNotReady;
    return host.join(point->clock), cudaSuccess;
}
FACE cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    Guard guard(lock);
    const auto point = event_of(event).point;
    ++counts["waits of the host"];
    if (!point) return cudaSuccess;
    point->stream->run_until(point->number);
    host_until(point->at);
    seen.join(point->order);
    return host.join(point->clock), cudaSuccess;
}
FACE cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) { return *ms = 1, cudaSuccess; }

// ---- kernels: none is run --------------------------------------------------------------------------------------------

static std::map<const void*, std::string>& kernel_names() {
    static std::map<const void*, std::string> names;  // torch registers them before this file's own variables are made
    return names;
}
static cudaError_t launched(const void* kernel) {
    return fail(cudaErrorNotSupported, "nothing runs kernels here, and this one was launched: " + kernel_names()[kernel]);
}
struct Launch {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
};
static thread_local Launch pushed;
FACE void** __cudaRegisterFatBinary(void*) { return new void*; }
FACE void __cudaRegisterFatBinaryEnd(void**) {}
FACE void __cudaUnregisterFatBinary(void**) {}
FACE void __cudaRegisterFunction(void**, const char* kernel, char*, const char* name, int, void*, void*, void*, void*, int*) {
    kernel_names()[kernel] = name;
}
FACE void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
FACE unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    return pushed = {grid, block, shared, stream}, 0;
}
FACE cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared;
    return *static_cast<cudaStream_t*>(stream) = pushed.stream, cudaSuccess;
}
FACE cudaError_t __cudaGetKernel(cudaKernel_t* out, const void* kernel) {
    return *out = reinterpret_cast<cudaKernel_t>(const_cast<void*>(kernel)), cudaSuccess;
}
FACE cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) { return launched(kernel); }
FACE cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t) { return launched(kernel); }
FACE cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* kernel, void**) { return launched(kernel); }
FACE cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* of, const void*) {
    *of = {};
    return of->maxThreadsPerBlock = 1024, cudaSuccess;
}
FACE cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
FACE cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* out, const void*, int, size_t) { return *out = 1, cudaSuccess; }
FACE cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* out, const void*, int, size_t, unsigned) {
    return *out = 1, cudaSuccess;
}

// ---- what torch links to and nobody here needs: under their names, whatever their arguments ---------------------------

#define NOT_HERE(name) \
    FACE int missing_##name() __asm__(#name); \
    FACE int missing_##name() { return fail(cudaErrorNotSupported, #name " is not there"); }
NOT_HERE(cudaDeviceEnablePeerAccess) NOT_HERE(cudaDeviceGetDefaultMemPool) NOT_HERE(cudaFreeAsync)
NOT_HERE(cudaGetSymbolAddress) NOT_HERE(cudaGraphAddNode) NOT_HERE(cudaGraphConditionalHandleCreate)
NOT_HERE(cudaGraphDebugDotPrint) NOT_HERE(cudaGraphDestroy) NOT_HERE(cudaGraphExecDestroy) NOT_HERE(cudaGraphGetNodes)
NOT_HERE(cudaGraphInstantiateWithFlags) NOT_HERE(cudaGraphLaunch) NOT_HERE(cudaGraphNodeGetDependencies)
NOT_HERE(cudaIpcCloseMemHandle) NOT_HERE(cudaIpcGetEventHandle) NOT_HERE(cudaIpcGetMemHandle)
NOT_HERE(cudaIpcOpenEventHandle) NOT_HERE(cudaIpcOpenMemHandle) NOT_HERE(cudaKernelSetAttributeForDevice)
NOT_HERE(cudaLaunchCooperativeKernel) NOT_HERE(cudaLibraryGetKernel) NOT_HERE(cudaLibraryLoadData)
NOT_HERE(cudaLibraryUnload) NOT_HERE(cudaMallocAsync) NOT_HERE(cudaMemPoolGetAttribute) NOT_HERE(cudaMemPoolSetAccess)
NOT_HERE(cudaMemPoolSetAttribute) NOT_HERE(cudaMemPoolTrimTo) NOT_HERE(cudaMemcpy2DAsync) NOT_HERE(cudaMemcpyToSymbol)
NOT_HERE(cudaStreamBeginCapture) NOT_HERE(cudaStreamBeginCaptureToGraph) NOT_HERE(cudaStreamEndCapture)
NOT_HERE(cudaStreamUpdateCaptureDependencies)
