// What torch asks of NVML: before it maps an expandable segment, whether devices share a fabric (they do not), and when
// memory is out, which processes there are (none).
#define FACE __attribute__((visibility("default")))
#define NOT_SUPPORTED(name) FACE int name(void) { return 3; }
FACE int nvmlInit_v2(void) { return 0; }
FACE int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** device) { return *device = 0, 0; }
FACE int nvmlDeviceGetComputeRunningProcesses(void* device, unsigned* number, void* found) { return *number = 0, 0; }
NOT_SUPPORTED(nvmlDeviceGetGpuFabricInfoV)
NOT_SUPPORTED(nvmlDeviceGetNvLinkRemoteDeviceType)
NOT_SUPPORTED(nvmlDeviceGetNvLinkRemotePciInfo_v2)
NOT_SUPPORTED(nvmlSystemGetCudaDriverVersion_v2)
