// The few functions of the CUDA driver that torch asks for by name; the rest of it is not there.
#include <dlfcn.h>
#include <stddef.h>
#define FACE __attribute__((visibility("default")))
FACE int cuInit(unsigned flags) { return 100; }  // no device: nobody but torch shall find one
FACE int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
FACE int cuDeviceGet(int* device, int number) { return *device = number, 0; }
FACE int cuGetErrorString(int error, const char** text) { return *text = "there is no driver", 0; }
FACE int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
    int (*has_context)(int) = (int (*)(int))dlsym(RTLD_DEFAULT, "fake_has_context");
    *flags = 0;
    return *active = has_context ? has_context(device) : 0, 0;
}
