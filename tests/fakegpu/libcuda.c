// The few functions of the CUDA driver that torch asks for by name, and those that load and launch kernels: `fake_kernels`
// says who runs them. The rest of it is not there.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <stddef.h>
#include <string.h>
#define FACE __attribute__((visibility("default")))
FACE int cuInit(unsigned flags) { return 100; }  // no device: nobody but torch shall find one
FACE int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
FACE int cuDeviceGet(int* device, int number) { return *device = number, 0; }
FACE int cuGetErrorString(int error, const char** text) { return *text = error == 1 ? "invalid argument" : error == 201 ? "invalid device context" : "there is no driver", 0; }
FACE int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
    int (*has_context)(int) = (int (*)(int))dlsym(RTLD_DEFAULT, "fake_has_context");
    *flags = 0;
    return *active = has_context ? has_context(device) : 0, 0;
}

// A context is its device's number and one, of the calling thread; a module the code, of one kernel; a function its name.
static __thread size_t context;
static int (*run_kernel)(const char* symbol, unsigned blocks, void** arguments);
FACE void fake_kernels(int (*run)(const char*, unsigned, void**)) { run_kernel = run; }
FACE int cuDevicePrimaryCtxRetain(size_t* of, int device) { return *of = device + 1, 0; }
FACE int cuCtxGetCurrent(size_t* now) { return *now = context, 0; }
FACE int cuCtxSetCurrent(size_t now) { return context = now, 0; }
FACE int cuModuleLoadData(const char** module, const char* code) {
    if (!context) return 201;
    if (memcmp(code, ELFMAG, SELFMAG) || ((const Elf64_Ehdr*)code)->e_machine != 190) return 200;  // EM_CUDA
    return *module = code, 0;
}
FACE int cuModuleGetFunction(char** function, const char* module, const char* symbol) {
    const Elf64_Ehdr* head = (const Elf64_Ehdr*)module;
    const size_t size = head->e_shoff + (size_t)head->e_shnum * head->e_shentsize;
    if (!memmem(module, size, symbol, strlen(symbol) + 1)) return 500;
    return *function = strdup(symbol), 0;
}
FACE int cuLaunchKernel(const char* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned y_threads,
                        unsigned z_threads, unsigned shared, void* stream, void** arguments, void** more) {
    if (!context) return 201;
    if (!x || y != 1 || z != 1 || threads != 256 || y_threads != 1 || z_threads != 1 || shared || more) return 1;
    return run_kernel(function, x, arguments);
}

// Streams and events are the runtime's.
#define AS_RUNTIME(name, types, ...) \
    int (*call) types = (int (*) types)dlsym(RTLD_DEFAULT, name); \
    return call ? call(__VA_ARGS__) : 100
FACE int cuEventCreate(void** event, unsigned flags) { AS_RUNTIME("cudaEventCreateWithFlags", (void**, unsigned), event, flags); }
FACE int cuEventDestroy_v2(void* event) { AS_RUNTIME("cudaEventDestroy", (void*), event); }
FACE int cuEventRecord(void* event, void* stream) { AS_RUNTIME("cudaEventRecord", (void*, void*), event, stream); }
FACE int cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
    AS_RUNTIME("cudaStreamWaitEvent", (void*, void*, unsigned), stream, event, flags);
}
FACE int cuMemcpyDtoHAsync_v2(void* into, size_t source, size_t size, void* stream) {
    AS_RUNTIME("cudaMemcpyAsync", (void*, size_t, size_t, int, void*), into, source, size, 2, stream);
}
FACE int cuLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
    AS_RUNTIME("cudaLaunchHostFunc", (void*, void (*)(void*), void*), stream, function, data);
}
