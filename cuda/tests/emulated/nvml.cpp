// The management library, as NVIDIA's documentation of NVML describes it: one GPU, the one of cuda.cpp.
//
// The file that EMULATED_NVML names says how the GPU is, by lines such as `temperature 41`, and is read anew by every
// call. `hang 1` has calls hang that ask about the GPU, until that line is gone; `lost 1` has them say that it is lost.

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <atomic>

namespace {

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, GPU_IS_LOST = 15,
       ARGUMENT_VERSION_MISMATCH = 25 };
std::atomic<int> users;
char gpu;  // Whose address is the handle.

unsigned long long value(const char* key, unsigned long long otherwise) {
  const char* path = getenv("EMULATED_NVML");
  FILE* file = path ? fopen(path, "r") : nullptr;
  if (!file) return otherwise;
  char name[64];
  unsigned long long found;
  while (fscanf(file, "%63s %llu", name, &found) == 2)
    if (!strcmp(name, key)) otherwise = found;
  fclose(file);
  return otherwise;
}

int usable(const void* device = &gpu) {
  if (!users) return UNINITIALIZED;
  if (device != &gpu) return INVALID_ARGUMENT;
  while (value("hang", 0)) usleep(10000);
  return value("lost", 0) ? GPU_IS_LOST : SUCCESS;
}

int text(char* at, unsigned bytes, const char* is) {
  snprintf(at, bytes, "%s", is);
  return SUCCESS;
}

}  // namespace

#define ENTER if (int error = usable(device)) return error;
#define GIVE(type, function, key, otherwise) \
  int function(void* device, type* given) { ENTER *given = (type)value(key, otherwise); return SUCCESS; }

extern "C" {

int nvmlInit_v2() { users++; return SUCCESS; }
int nvmlShutdown() { return users-- > 0 ? SUCCESS : (users++, UNINITIALIZED); }
const char* nvmlErrorString(int code) { return code == GPU_IS_LOST ? "GPU is lost" : "emulated"; }
int nvmlSystemGetDriverVersion(char* at, unsigned bytes) { return text(at, bytes, "580.95.05"); }

int nvmlDeviceGetCount_v2(unsigned* count) { *count = 1; return users ? SUCCESS : UNINITIALIZED; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  *device = &gpu;
  return index ? INVALID_ARGUMENT : usable();
}
int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** device) {
  *device = &gpu;
  // The domain may have more digits, or be left out.
  unsigned domain, bus, slot, function;
  if (sscanf(id, "%x:%x:%x.%x", &domain, &bus, &slot, &function) != 4) return INVALID_ARGUMENT;
  return domain || bus || slot || function ? NOT_FOUND : usable();
}

int nvmlDeviceGetName(void* device, char* at, unsigned bytes) { ENTER return text(at, bytes, "Emulated GPU"); }
int nvmlDeviceGetUUID(void* device, char* at, unsigned bytes) {
  ENTER
  return text(at, bytes, "GPU-00112233-4455-6677-8899-aabbccddeeff");
}
struct Pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };
int nvmlDeviceGetPciInfo_v3(void* device, Pci* pci) {
  ENTER
  *pci = Pci();
  text(pci->legacy, sizeof pci->legacy, "0000:00:00.0");
  return text(pci->bus_id, sizeof pci->bus_id, "00000000:00:00.0");
}

struct Memory { unsigned version; unsigned long long total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo_v2(void* device, Memory* memory) {
  ENTER
  if (memory->version != (sizeof(Memory) | 2 << 24)) return ARGUMENT_VERSION_MISMATCH;
  memory->total = 4ull << 30, memory->reserved = 64 << 20, memory->used = value("used", 1 << 30);
  memory->free = memory->total - memory->reserved - memory->used;
  return SUCCESS;
}
struct Rates { unsigned gpu, memory; };
int nvmlDeviceGetUtilizationRates(void* device, Rates* rates) {
  ENTER
  rates->gpu = value("utilization", 37), rates->memory = 11;
  return SUCCESS;
}
int nvmlDeviceGetTemperature(void* device, int sensor, unsigned* degrees) {
  ENTER
  *degrees = value("temperature", 41);
  return sensor ? INVALID_ARGUMENT : SUCCESS;
}
// Graphics, multiprocessors, memory, video.
const unsigned CLOCKS[] = {1400, 1500, 2600, 1300}, CLOCKS_MAX[] = {1970, 1980, 3200, 1700};
int nvmlDeviceGetClockInfo(void* device, unsigned which, unsigned* mhz) {
  ENTER
  if (which > 3) return INVALID_ARGUMENT;
  *mhz = CLOCKS[which];
  return SUCCESS;
}
int nvmlDeviceGetMaxClockInfo(void* device, unsigned which, unsigned* mhz) {
  ENTER
  if (which > 3) return INVALID_ARGUMENT;
  *mhz = CLOCKS_MAX[which];
  return SUCCESS;
}
GIVE(unsigned, nvmlDeviceGetPowerUsage, "power", 250500)
GIVE(unsigned, nvmlDeviceGetEnforcedPowerLimit, "power_limit", 700000)
GIVE(unsigned long long, nvmlDeviceGetTotalEnergyConsumption, "energy", 5000000)
GIVE(unsigned long long, nvmlDeviceGetCurrentClocksThrottleReasons, "reasons", 0)
int nvmlDeviceGetTotalEccErrors(void* device, int kind, int counter, unsigned long long* count) {
  ENTER
  if (kind < 0 || kind > 1 || counter < 0 || counter > 1) return INVALID_ARGUMENT;
  // Those of the device's whole life are others.
  *count = (kind ? value("uncorrected", 0) : value("corrected", 3)) + 1000 * counter;
  return SUCCESS;
}
GIVE(unsigned, nvmlDeviceGetComputeMode, "compute_mode", 3)
GIVE(unsigned, nvmlDeviceGetPersistenceMode, "persistence", 1)
int nvmlDeviceGetMigMode(void* device, unsigned*, unsigned*) { ENTER return NOT_SUPPORTED; }

}
