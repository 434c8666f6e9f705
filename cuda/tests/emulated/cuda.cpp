// libcuda: memory, streams, events, capture, graphs and launches.
//
// A stream's work is a queue; nothing of it is done before somebody waits for something or asks whether it is done, and
// then streams take turns by chance, each until it has to wait. So what is not ordered by events runs in any order.

#include <string.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "emulated.h"

extern "C" size_t kernels_parameter_bytes(const char* name);
extern "C" const char* kernels_launch(const char* name, u32 grid, u32 threads, u32 shared, const void* p, size_t bytes);

namespace {

enum {
  SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_IMAGE = 200,
  INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, LAUNCH_TIMEOUT = 702,
  ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, LAUNCH_FAILED = 719, CAPTURE_UNSUPPORTED = 900,
  CAPTURE_INVALIDATED = 901, CAPTURE_UNMATCHED = 903, CAPTURE_WRONG_THREAD = 908,
};
const char* name_of(int code) {
  switch (code) {
    case SUCCESS: return "CUDA_SUCCESS";
    case INVALID_VALUE: return "CUDA_ERROR_INVALID_VALUE";
    case OUT_OF_MEMORY: return "CUDA_ERROR_OUT_OF_MEMORY";
    case INVALID_CONTEXT: return "CUDA_ERROR_INVALID_CONTEXT";
    case INVALID_HANDLE: return "CUDA_ERROR_INVALID_HANDLE";
    case LAUNCH_FAILED: return "CUDA_ERROR_LAUNCH_FAILED";
    case CAPTURE_UNSUPPORTED: return "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED";
    case CAPTURE_INVALIDATED: return "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED";
    default: return "CUDA_ERROR_OF_ANOTHER_KIND";
  }
}

const u64 MEMORY_BYTES = u64(4) << 30, GRANULARITY = u64(2) << 20;
const int CONTEXT = 1;

std::recursive_mutex& lock = *new std::recursive_mutex;
typedef std::lock_guard<std::recursive_mutex> Guard;

// Work yields whether it is done; what has to wait is asked again.
typedef std::function<bool()> Work;
struct Graph { std::vector<std::function<void()>> works; };
struct Stream {
  std::deque<Work> queue;
  Graph* captured = nullptr;
  bool is_invalid = false;
  std::thread::id capturer;
};
struct Event { u64 recorded = 0, done = 0; double at_ms = 0; bool is_timed; };
struct Module { std::string text; };
struct Range { u64 bytes; };
struct Mapping { u64 bytes; u64 handle; bool is_accessible; };

// Never destroyed: it is looked at when all else is.
std::map<std::string, int>& live = *new std::map<std::string, int>;
std::set<Stream*> streams;
std::set<Event*> events;
std::map<u64, Range> reserved, pinned, allocated;
std::map<u64, Mapping> mapped;
std::map<u64, int> pages;  // by file descriptor, with the times it is mapped
u64 used_bytes;
int retained, failure;
double clock_ms;
thread_local int current;
thread_local Stream* capturing;
u64 chance = 88172645463325252ull;
bool is_initialised;

u64 random_below(u64 end) {
  chance ^= chance << 13, chance ^= chance >> 7, chance ^= chance << 17;
  return chance % end;
}

// Lets a stream do the first thing that it has to do.
bool step(Stream* stream) {
  if (stream->queue.empty() || !stream->queue.front()()) return false;
  stream->queue.pop_front();
  clock_ms += 1e-3 * (1 + random_below(8));
  return true;
}

// Lets some stream go on. Whether any could.
bool advance() {
  std::vector<Stream*> all(streams.begin(), streams.end());
  for (size_t first = random_below(all.size() + 1), i = 0; i < all.size(); i++)
    if (step(all[(first + i) % all.size()])) return true;
  return false;
}

// Lets streams go on until it is so. Events that another thread has not recorded yet may be waited for.
int until(const std::function<bool()>& is_so) {
  for (int patience = 0; ; ) {
    {
      Guard guard(lock);
      if (failure) return failure;
      if (is_so()) return SUCCESS;
      if (advance()) { patience = 0; continue; }
    }
    if (++patience > 2000) return fprintf(stderr, "emulated: what is waited for never comes\n"), LAUNCH_TIMEOUT;
    usleep(1000);
  }
}

int usable() { return !is_initialised ? NOT_INITIALIZED : current != CONTEXT || !retained ? INVALID_CONTEXT : failure; }

// What would wait for the GPU, or change what it has mapped, may not be called by a thread that captures.
int unsafe_call() {
  if (int error = usable()) return error;
  if (!capturing) return SUCCESS;
  capturing->is_invalid = true;
  return CAPTURE_UNSUPPORTED;
}

int put(Stream* stream, std::function<void()> work) {
  if (int error = usable()) return error;
  if (!streams.count(stream)) return INVALID_HANDLE;
  if (stream->captured) stream->captured->works.push_back(work);
  else stream->queue.push_back([work] { return work(), true; });
  return SUCCESS;
}

template <class T>
typename T::iterator containing(T& ranges, u64 at) {
  auto next = ranges.upper_bound(at);
  if (next == ranges.begin()) return ranges.end();
  return at < (--next)->first + next->second.bytes ? next : ranges.end();
}

// Whether all of it lies in one of the ranges.
template <class T>
bool is_within(T& ranges, u64 at, u64 bytes) {
  auto found = containing(ranges, at);
  return found != ranges.end() && at + bytes <= found->first + found->second.bytes;
}

// Checked when the work is done: what is mapped then counts.
void check_device(u64 at, u64 bytes) {
  if (is_within(allocated, at, bytes)) return;
  for (u64 end = at + bytes; at < end; ) {
    auto page = containing(mapped, at);
    if (page == mapped.end() || !page->second.is_accessible) {
      fprintf(stderr, "emulated: nothing is mapped at %#lx\n", (long)at);
      failure = 700;
      return;
    }
    at = page->first + page->second.bytes;
  }
}

void* fresh(u64 bytes, int protection) {
  void* at = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return at == MAP_FAILED ? nullptr : at;
}

__attribute__((destructor)) void look_for_leaks() {
  int leaked = 0;
  for (auto& [what, count] : live)
    if (count) leaked += fprintf(stderr, "emulated: %d %s left\n", count, what.c_str()) > 0;
  fflush(nullptr);
  if (leaked) _exit(97);
}

}  // namespace

void emulated::count(const char* what, int by) {
  Guard guard(lock);
  live[what] += by;
}
int emulated::put(void* stream, std::function<void()> work) {
  Guard guard(lock);
  return ::put((Stream*)stream, work);
}

#define ENTER Guard guard(lock); if (int error = usable()) return error;
#define ENTER_UNSAFE Guard guard(lock); if (int error = unsafe_call()) return error;

extern "C" {

int cuInit(u32) {
  // Other orders of what is not ordered.
  const char* seed = getenv("EMULATED_SEED");
  for (int i = seed && !is_initialised ? atoi(seed) : 0; i > 0; i--) random_below(1);
  is_initialised = true;
  return SUCCESS;
}
int cuDriverGetVersion(int* version) { *version = 13000; return SUCCESS; }
int cuGetErrorName(int code, const char** text) { *text = name_of(code); return SUCCESS; }
int cuGetErrorString(int code, const char** text) {
  *text = code == OUT_OF_MEMORY ? "out of memory" : "emulated";
  return SUCCESS;
}

int cuDeviceGetCount(int* count) { *count = 1; return is_initialised ? SUCCESS : NOT_INITIALIZED; }
int cuDeviceGet(int* device, int index) { *device = 0; return index == 0 ? SUCCESS : INVALID_DEVICE; }
int cuDeviceGetName(char* name, int bytes, int) { snprintf(name, bytes, "Emulated GPU"); return SUCCESS; }
int cuDeviceGetPCIBusId(char* id, int bytes, int) { snprintf(id, bytes, "0000:00:00.0"); return SUCCESS; }
int cuDeviceGetUuid_v2(char* uuid, int) { for (int i = 0; i < 16; i++) uuid[i] = 17 * i; return SUCCESS; }
int cuDeviceTotalMem_v2(size_t* bytes, int) { *bytes = MEMORY_BYTES; return SUCCESS; }
int cuDeviceGetAttribute(int* value, int which, int) {
  // The compute capability is 9.0. RDMA devices reach memory (116) and mapped pages (110), what they write is flushed by
  // a call (117) and in no order (118); there are no dma-bufs (124).
  *value = which == 75 ? 9 : which == 116 || which == 110 || which == 117;
  return SUCCESS;
}
int cuDevicePrimaryCtxRetain(void** context, int) {
  Guard guard(lock);
  retained++, live["contexts"]++;
  *context = (void*)(size_t)CONTEXT;
  return SUCCESS;
}
int cuDevicePrimaryCtxRelease_v2(int) {
  Guard guard(lock);
  if (!retained) return INVALID_CONTEXT;
  retained--, live["contexts"]--;
  return SUCCESS;
}
int cuCtxSetCurrent(void* context) { current = (int)(size_t)context; return SUCCESS; }
int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  ENTER
  *least = 0, *greatest = -5;
  return SUCCESS;
}

// Memory.
struct Properties { int type, handles; struct { int type, id; } location; void* metadata; unsigned char flags[8]; };
struct Access { struct { int type, id; } location; int flags; };
static bool is_ours(const Properties* p) { return p->type == 1 && p->location.type == 1 && p->location.id == 0; }

int cuMemGetInfo_v2(size_t* free, size_t* total) {
  ENTER
  *free = MEMORY_BYTES - used_bytes, *total = MEMORY_BYTES;
  return SUCCESS;
}
int cuMemGetAllocationGranularity(size_t* bytes, const Properties* p, int) {
  *bytes = GRANULARITY;
  return is_ours(p) ? SUCCESS : INVALID_VALUE;
}
int cuMemAddressReserve(u64* at, size_t bytes, size_t alignment, u64, u64) {
  ENTER_UNSAFE
  if (!bytes || bytes % GRANULARITY || !alignment || alignment & (alignment - 1)) return INVALID_VALUE;
  u64 room = (u64)fresh(bytes + alignment, PROT_NONE);
  if (!room) return OUT_OF_MEMORY;
  *at = (room + alignment - 1) & ~(alignment - 1);
  if (*at > room) munmap((void*)room, *at - room);
  munmap((void*)(*at + bytes), room + alignment - *at);
  reserved[*at] = {bytes};
  live["ranges of addresses"]++;
  return SUCCESS;
}
int cuMemAddressFree(u64 at, size_t bytes) {
  ENTER_UNSAFE
  auto range = reserved.find(at);
  auto page = mapped.lower_bound(at);
  if (range == reserved.end() || range->second.bytes != bytes) return INVALID_VALUE;
  if (page != mapped.end() && page->first < at + bytes) return INVALID_VALUE;
  munmap((void*)at, bytes);
  reserved.erase(range);
  live["ranges of addresses"]--;
  return SUCCESS;
}
int cuMemCreate(u64* handle, size_t bytes, const Properties* p, u64) {
  ENTER_UNSAFE
  if (!is_ours(p) || bytes % GRANULARITY) return INVALID_VALUE;
  if (used_bytes + bytes > MEMORY_BYTES) return OUT_OF_MEMORY;
  int file = memfd_create("page", 0);
  if (file < 0 || ftruncate(file, bytes)) return OUT_OF_MEMORY;
  used_bytes += bytes;
  pages[*handle = file] = 0;
  live["pages"]++;
  return SUCCESS;
}
int cuFlushGPUDirectRDMAWrites(int target, int scope) {
  ENTER_UNSAFE
  return target == 0 && scope == 100 ? SUCCESS : INVALID_VALUE;
}
int cuMemRelease(u64 handle) {
  Guard guard(lock);
  auto page = pages.find(handle);
  if (page == pages.end() || page->second) return INVALID_VALUE;
  used_bytes -= lseek(handle, 0, SEEK_END);
  close(handle);
  pages.erase(page);
  live["pages"]--;
  return SUCCESS;
}
int cuMemMap(u64 at, size_t bytes, size_t offset, u64 handle, u64 flags) {
  ENTER_UNSAFE
  auto page = pages.find(handle);
  if (page == pages.end() || page->second || offset || flags || !is_within(reserved, at, bytes)) return INVALID_VALUE;
  auto next = mapped.lower_bound(at);
  bool is_taken = next != mapped.end() && next->first < at + bytes;
  if (is_taken || containing(mapped, at) != mapped.end()) return INVALID_VALUE;
  if (mmap((void*)at, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, handle, 0) == MAP_FAILED) return OUT_OF_MEMORY;
  mapped[at] = {bytes, handle, false};
  page->second++;
  return SUCCESS;
}
int cuMemSetAccess(u64 at, size_t bytes, const Access* access, size_t count) {
  ENTER_UNSAFE
  if (count != 1 || access->location.type != 1 || access->location.id != 0 || access->flags != 3) return INVALID_VALUE;
  for (u64 end = at + bytes; at < end; ) {
    auto page = mapped.find(at);
    if (page == mapped.end()) return INVALID_VALUE;
    mprotect((void*)at, page->second.bytes, PROT_READ | PROT_WRITE);
    page->second.is_accessible = true;
    at += page->second.bytes;
  }
  return SUCCESS;
}
int cuMemUnmap(u64 at, size_t bytes) {
  ENTER_UNSAFE
  for (u64 next = at; next < at + bytes; next += mapped[next].bytes)
    if (!mapped.count(next)) return INVALID_VALUE;
  for (u64 end = at + bytes; at < end; ) {
    auto page = mapped.find(at);
    u64 length = page->second.bytes;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
    if (mmap((void*)at, length, PROT_NONE, flags, -1, 0) == MAP_FAILED) return OUT_OF_MEMORY;
    pages[page->second.handle]--;
    mapped.erase(page);
    at += length;
  }
  return SUCCESS;
}
int cuMemAlloc_v2(u64* at, size_t bytes) {
  ENTER_UNSAFE
  if (!(*at = (u64)fresh(bytes, PROT_READ | PROT_WRITE))) return OUT_OF_MEMORY;
  memset((void*)*at, 0xa5, bytes);
  allocated[*at] = {bytes};
  live["allocations"]++;
  return SUCCESS;
}
int cuMemFree_v2(u64 at) {
  ENTER_UNSAFE
  auto range = allocated.find(at);
  if (range == allocated.end()) return INVALID_VALUE;
  munmap((void*)at, range->second.bytes);
  allocated.erase(range);
  live["allocations"]--;
  return SUCCESS;
}
int cuMemHostRegister_v2(void* at, size_t bytes, u32) {
  ENTER_UNSAFE
  if (!bytes) return INVALID_VALUE;
  auto next = pinned.lower_bound((u64)at);
  if (containing(pinned, (u64)at) != pinned.end() || (next != pinned.end() && next->first < (u64)at + bytes))
    return ALREADY_REGISTERED;
  pinned[(u64)at] = {bytes};
  live["pinned regions"]++;
  return SUCCESS;
}
int cuMemHostUnregister(void* at) {
  ENTER_UNSAFE
  if (!pinned.erase((u64)at)) return NOT_REGISTERED;
  live["pinned regions"]--;
  return SUCCESS;
}

// Copies. CUDA takes other host memory, too, and waits for it: the driver must not.
int cuMemcpyHtoDAsync_v2(u64 to, const void* from, size_t bytes, Stream* stream) {
  ENTER
  if (!is_within(pinned, (u64)from, bytes)) return NOT_REGISTERED;
  return put(stream, [=] {
    check_device(to, bytes);
    if (!failure) memcpy((void*)to, from, bytes);
  });
}
int cuMemcpyDtoHAsync_v2(void* to, u64 from, size_t bytes, Stream* stream) {
  ENTER
  if (!is_within(pinned, (u64)to, bytes)) return NOT_REGISTERED;
  return put(stream, [=] {
    check_device(from, bytes);
    if (!failure) memcpy(to, (void*)from, bytes);
  });
}
int cuMemcpyDtoDAsync_v2(u64 to, u64 from, size_t bytes, Stream* stream) {
  ENTER
  return put(stream, [=] {
    check_device(to, bytes), check_device(from, bytes);
    if (!failure) memmove((void*)to, (void*)from, bytes);
  });
}
struct Side { size_t x, y; int type; void* host; u64 device; void* array; size_t pitch; };
struct Copy { Side from, to; size_t bytes, rows; };
int cuMemcpy2DAsync_v2(const Copy* given, Stream* stream) {
  ENTER
  Copy copy = *given;
  for (const Side& side : {copy.from, copy.to})
    if (side.type != 2 || side.x || side.y || side.pitch < copy.bytes) return INVALID_VALUE;
  return put(stream, [=] {
    for (size_t row = 0; row < copy.rows; row++) {
      u64 to = copy.to.device + row * copy.to.pitch, from = copy.from.device + row * copy.from.pitch;
      check_device(to, copy.bytes), check_device(from, copy.bytes);
      if (!failure) memmove((void*)to, (void*)from, copy.bytes);
    }
  });
}
int cuMemsetD8Async(u64 at, unsigned char value, size_t bytes, Stream* stream) {
  ENTER
  return put(stream, [=] {
    check_device(at, bytes);
    if (!failure) memset((void*)at, value, bytes);
  });
}

// Streams and events.
int cuStreamCreateWithPriority(Stream** stream, u32 flags, int) {
  ENTER_UNSAFE
  if (flags != 1) return INVALID_VALUE;
  streams.insert(*stream = new Stream);
  live["streams"]++;
  return SUCCESS;
}
int cuStreamDestroy_v2(Stream* stream) {
  { Guard guard(lock); if (!streams.count(stream)) return INVALID_HANDLE; }
  int result = until([=] { return stream->queue.empty(); });
  Guard guard(lock);
  streams.erase(stream);
  delete stream;
  live["streams"]--;
  return result;
}
int cuStreamSynchronize(Stream* stream) {
  {
    ENTER_UNSAFE
    if (!streams.count(stream)) return INVALID_HANDLE;
    if (stream->captured) return stream->is_invalid = true, CAPTURE_UNSUPPORTED;
  }
  return until([=] { return stream->queue.empty(); });
}
int cuStreamWaitEvent(Stream* stream, Event* event, u32) {
  ENTER
  if (!streams.count(stream) || !events.count(event)) return INVALID_HANDLE;
  if (stream->captured) return stream->is_invalid = true, CAPTURE_UNSUPPORTED;
  u64 awaited = event->recorded;
  stream->queue.push_back([=] { return !events.count(event) || event->done >= awaited; });
  return SUCCESS;
}
int cuEventCreate(Event** event, u32 flags) {
  ENTER
  // Blocking synchronisation and no timing.
  if ((flags & ~3) != 0) return INVALID_VALUE;
  events.insert(*event = new Event);
  (*event)->is_timed = (flags & 2) == 0;
  live["events"]++;
  return SUCCESS;
}
int cuEventDestroy_v2(Event* event) {
  Guard guard(lock);
  if (!events.erase(event)) return INVALID_HANDLE;
  delete event;
  live["events"]--;
  return SUCCESS;
}
int cuEventRecord(Event* event, Stream* stream) {
  ENTER
  if (!streams.count(stream) || !events.count(event)) return INVALID_HANDLE;
  if (stream->captured) return stream->is_invalid = true, CAPTURE_UNSUPPORTED;
  u64 number = ++event->recorded;
  stream->queue.push_back([=] {
    if (events.count(event)) event->done = number, event->at_ms = clock_ms;
    return true;
  });
  return SUCCESS;
}
int cuEventQuery(Event* event) {
  ENTER_UNSAFE
  if (!events.count(event)) return INVALID_HANDLE;
  advance();
  return failure ? failure : event->done == event->recorded ? SUCCESS : NOT_READY;
}
int cuEventSynchronize(Event* event) {
  {
    ENTER_UNSAFE
    if (!events.count(event)) return INVALID_HANDLE;
  }
  return until([=] { return event->done == event->recorded; });
}
int cuEventElapsedTime_v2(float* ms, Event* from, Event* to) {
  ENTER
  if (!events.count(from) || !events.count(to) || !from->is_timed || !to->is_timed) return INVALID_HANDLE;
  if (!from->recorded || !to->recorded) return INVALID_HANDLE;
  if (from->done != from->recorded || to->done != to->recorded) return NOT_READY;
  *ms = to->at_ms - from->at_ms;
  return SUCCESS;
}

// Capture and graphs.
int cuStreamBeginCapture_v2(Stream* stream, int mode) {
  ENTER
  if (!streams.count(stream) || mode != 1 || stream->captured || capturing) return INVALID_VALUE;
  capturing = stream;
  stream->captured = new Graph, stream->is_invalid = false, stream->capturer = std::this_thread::get_id();
  return SUCCESS;
}
int cuStreamEndCapture(Stream* stream, Graph** graph) {
  ENTER
  if (!streams.count(stream) || !stream->captured) return CAPTURE_UNMATCHED;
  if (stream->capturer != std::this_thread::get_id()) return CAPTURE_WRONG_THREAD;
  *graph = stream->captured;
  stream->captured = nullptr, capturing = nullptr;
  if (!stream->is_invalid) return live["graphs"]++, SUCCESS;
  delete *graph;
  *graph = nullptr;
  return CAPTURE_INVALIDATED;
}
int cuGraphDestroy(Graph* graph) { Guard guard(lock); delete graph; live["graphs"]--; return SUCCESS; }
int cuGraphInstantiateWithFlags(Graph** made, Graph* graph, u64) {
  ENTER_UNSAFE
  *made = new Graph(*graph);
  live["graphs that can be launched"]++;
  return SUCCESS;
}
int cuGraphExecDestroy(Graph* made) {
  Guard guard(lock);
  delete made;
  live["graphs that can be launched"]--;
  return SUCCESS;
}
int cuGraphUpload(Graph*, Stream*) { ENTER_UNSAFE return SUCCESS; }
int cuGraphLaunch(Graph* made, Stream* stream) {
  ENTER
  if (!streams.count(stream)) return INVALID_HANDLE;
  if (stream->captured) return stream->is_invalid = true, CAPTURE_UNSUPPORTED;
  for (auto& work : made->works) if (int error = put(stream, work)) return error;
  return SUCCESS;
}

// Kernels: those of the same files that the PTX was compiled from.
struct Function { std::string name; };
int cuModuleLoadData(Module** module, const void* image) {
  ENTER_UNSAFE
  const char* text = (const char*)image;
  if (!strstr(text, ".version")) return INVALID_IMAGE;
  *module = new Module{text};
  live["modules"]++;
  return SUCCESS;
}
int cuModuleUnload(Module* module) { ENTER_UNSAFE delete module; live["modules"]--; return SUCCESS; }
int cuModuleGetFunction(const Function** function, Module* module, const char* name) {
  ENTER
  static std::set<std::string> names;
  if (module->text.find(std::string(".entry ") + name + "(") == std::string::npos) return NOT_FOUND;
  if (!kernels_parameter_bytes(name)) return NOT_FOUND;
  *function = (const Function*)&*names.insert(name).first;
  return SUCCESS;
}
int cuFuncLoad(const Function*) { ENTER_UNSAFE return SUCCESS; }
int cuLaunchKernel(const Function* function, u32 x, u32 y, u32 z, u32 threads, u32 ty, u32 tz, u32 shared,
                   Stream* stream, void** parameters, void** extra) {
  ENTER
  if (y != 1 || z != 1 || ty != 1 || tz != 1 || extra || !x || !threads) return INVALID_VALUE;
  std::string name = function->name, bytes((char*)parameters[0], kernels_parameter_bytes(name.c_str()));
  return put(stream, [=] {
    const char* wrong = kernels_launch(name.c_str(), x, threads, shared, bytes.data(), bytes.size());
    if (wrong) fprintf(stderr, "emulated: %s\n", wrong), failure = LAUNCH_FAILED;
  });
}
}
