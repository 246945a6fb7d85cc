// A simulated libtpu. torch_xla loads this library as its TPU if TPU_LIBRARY_PATH names it, on a machine without a TPU.
// TorchTPU loads it in the same way (stablehlo.c).
//
// It forwards every call of the PJRT C API to a plugin for the CPU. It answers a call itself if a TPU would answer
// differently: which devices exist (topology.c), how programs are compiled and run (programs.c). XLA:CPU's collectives
// cannot meet across processes, nor across the threads of one process, because every device compiles a module for
// itself. So each collective of a program becomes a call of this library (rewrite.c, collectives.c). The data travel
// through memory that the processes of the run share (exchange.c).
//
// Besides libtpu's own variables it reads:
//   SIMULATOR_PLUGIN       the CPU plugin's file
//   SIMULATOR_CHIPS        chips of the machine (1), for a process whose variables do not name its chips
//   SIMULATOR_CORES        cores per chip (1; 2 on a v2 or v3)
//   SIMULATOR_MEMORY       the file that the processes of a run share; a run of one process needs none
//   SIMULATOR_TIMEOUT      seconds to wait for the other ranks (300)
//   SIMULATOR_ORDER        "2,0,3,1": the place of each process's devices among all (in the processes' order)
//   SIMULATOR_BUSY_UNTIL   another process holds the chips until this time, in seconds since 1970
//   SIMULATOR_RECORD       a folder: programs are written to it instead of run (record.c)
//   SIMULATOR_LOG          1: print each compiled program and each run on standard error
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "simulator.h"

const PJRT_Api* plugin;
static PJRT_Api api;

void say(const char* format, ...) {
  const char* log = getenv("SIMULATOR_LOG");
  if (!log || strcmp(log, "1")) return;
  char line[512];
  int size = snprintf(line, sizeof line, "[simulator, process %d] ", topology.process);
  va_list values;
  va_start(values, format);
  size += vsnprintf(line + size, sizeof line - size, format, values);
  va_end(values);
  if (size > (int)sizeof line - 2) size = sizeof line - 2;
  line[size++] = '\n';
  if (write(STDERR_FILENO, line, size) < 0) return;  // one write a line: those of other processes do not mix in
}

// ---- this library's errors among the plugin's: their first word never begins one of the plugin's

static const char ours;
typedef struct {
  const char* owner;
  PJRT_Error_Code code;
  char text[1024];
} OwnError;

PJRT_Error* failure(PJRT_Error_Code code, const char* format, ...) {
  OwnError* error = calloc(1, sizeof *error);
  error->owner = &ours;
  error->code = code;
  va_list values;
  va_start(values, format);
  vsnprintf(error->text, sizeof error->text, format, values);
  va_end(values);
  return (PJRT_Error*)error;
}

static OwnError* own(const PJRT_Error* error) {
  OwnError* candidate = (OwnError*)error;
  return candidate && candidate->owner == &ours ? candidate : NULL;
}

static void error_destroy(PJRT_Error_Destroy_Args* args) {
  OwnError* error = own(args->error);
  if (error) free(error);
  else plugin->PJRT_Error_Destroy(args);
}

static void error_message(PJRT_Error_Message_Args* args) {
  OwnError* error = own(args->error);
  if (!error) {
    plugin->PJRT_Error_Message(args);
    return;
  }
  args->message = error->text;
  args->message_size = strlen(error->text);
}

static PJRT_Error* error_code(PJRT_Error_GetCode_Args* args) {
  OwnError* error = own(args->error);
  if (!error) return plugin->PJRT_Error_GetCode(args);
  args->code = error->code;
  return NULL;
}

// ---- the client: where a process takes its chips

// The error of libtpu in the 10 to 30 s after a process that held the chips was killed.
static PJRT_Error* busy(void) {
  const char *until = getenv("SIMULATOR_BUSY_UNTIL"), *chip = getenv("TPU_VISIBLE_CHIPS");
  if (!until || time(NULL) >= atoll(until)) return NULL;
  if (!chip || !*chip) chip = "0";
  return failure(PJRT_Error_Code_UNKNOWN,
                 "TPU initialization failed: open(/dev/vfio/%s): Device or resource busy: Device or resource busy; "
                 "Couldn't open iommu group /dev/vfio/%s", chip, chip);
}

static PJRT_Error* client_create(PJRT_Client_Create_Args* args) {
  PJRT_Error* error = busy();
  if (!error) error = read_topology();
  if (!error) error = take_chips();
  if (error) return error;
  // The caller's options (max_inflight_computations, ml_framework_name) are a TPU's; the plugin refuses what it does
  // not know. An older caller's arguments are shorter than the plugin's.
  PJRT_NamedValue count = {.struct_size = PJRT_NamedValue_STRUCT_SIZE, .name = "cpu_device_count", .name_size = 16,
                           .type = PJRT_NamedValue_kInt64, .int64_value = topology.world, .value_size = 1};
  PJRT_Client_Create_Args full = {0};
  memcpy(&full, args, args->struct_size < sizeof full ? args->struct_size : sizeof full);
  full.struct_size = PJRT_Client_Create_Args_STRUCT_SIZE;
  full.create_options = &count;
  full.num_options = 1;
  error = plugin->PJRT_Client_Create(&full);
  args->client = full.client;
  say("client of process %d of %d, %d device(s) each from %d on", topology.process, topology.processes, topology.cores,
      first_device());
  return error;
}

static PJRT_Error* client_destroy(PJRT_Client_Destroy_Args* args) {
  leave();
  finish_freeing();
  return plugin->PJRT_Client_Destroy(args);
}

// The process's resident set stands for its chips' memory in use; the limit is a v5e's.
static PJRT_Error* memory_stats(PJRT_Device_MemoryStats_Args* args) {
  long pages = 0;
  FILE* statm = fopen("/proc/self/statm", "r");
  if (statm && fscanf(statm, "%*d %ld", &pages) != 1) pages = 0;
  if (statm) fclose(statm);
  args->bytes_in_use = args->peak_bytes_in_use = pages * sysconf(_SC_PAGESIZE) / topology.cores;
  args->bytes_limit = (int64_t)16 << 30;
  args->peak_bytes_in_use_is_set = args->bytes_limit_is_set = true;
  return NULL;
}

// The headers that torch_xla 2.8 was built with give this structure's size without its last field, which is there.
static PJRT_Error* attributes(PJRT_Plugin_Attributes_Args* args) {
  args->struct_size = PJRT_Plugin_Attributes_Args_STRUCT_SIZE;
  return plugin->PJRT_Plugin_Attributes(args);
}

// ---- a profiler that sees nothing: without any, xp.trace of torch_xla 2.9 crashes

static PLUGIN_Profiler_Error* profile_nothing(void* args) {
  (void)args;
  return NULL;
}
static void profile_no_error(void* args) { (void)args; }
static PLUGIN_Profiler_Error* profiler_create(PLUGIN_Profiler_Create_Args* args) {
  args->profiler = &api;  // anything but NULL
  return NULL;
}
static PLUGIN_Profiler_Error* profiler_collect(PLUGIN_Profiler_CollectData_Args* args) {
  args->buffer_size_in_bytes = 0;
  return NULL;
}
static PLUGIN_Profiler_Api profiler = {
    sizeof profiler, NULL, profile_no_error, profile_no_error, profile_nothing,
    profiler_create, profile_nothing, profile_nothing, profile_nothing, profiler_collect};
static PJRT_Profiler_Extension profiler_extension = {
    {sizeof profiler_extension, PJRT_Extension_Type_Profiler, NULL}, &profiler, 0};

// ---- loading

static PJRT_Error* register_collectives(void) {
  PJRT_Extension_Base* extension = plugin->extension_start;
  while (extension && extension->type != PJRT_Extension_Type_FFI) extension = extension->next;
  if (!extension)
    return failure(PJRT_Error_Code_UNIMPLEMENTED,
                   "the plugin cannot call functions of ours.\n  found: no FFI extension in SIMULATOR_PLUGIN=%s\n"
                   "  fix:   pip install xla_cpu_pjrt==0.0.1", getenv("SIMULATOR_PLUGIN"));
  PJRT_FFI_Register_Handler_Args args = {
      sizeof args, TARGET, strlen(TARGET), run_collective, "Host", strlen("Host"), 0};
  return ((PJRT_FFI_Extension*)extension)->register_handler(&args);
}

static const char* why_not_loaded = "";

static PJRT_Error* initialize(PJRT_Plugin_Initialize_Args* args) {
  const char* path = getenv("SIMULATOR_PLUGIN");
  if (!plugin)
    return failure(PJRT_Error_Code_NOT_FOUND,
                   "the simulator's plugin for the CPU cannot be loaded.\n  found: SIMULATOR_PLUGIN=%s: %s\n"
                   "  fix:   pip install xla_cpu_pjrt==0.0.1, and take the variables from tpukit's environment()",
                   path ? path : "(not set)", why_not_loaded);
  PJRT_Api_Version version = plugin->pjrt_api_version;
  if (version.major_version != PJRT_API_MAJOR || version.minor_version != PJRT_API_MINOR)
    return failure(PJRT_Error_Code_FAILED_PRECONDITION,
                   "the simulator was compiled for another plugin.\n  found: PJRT %d.%d in SIMULATOR_PLUGIN=%s, and %d.%d "
                   "at compile time\n  fix:   compile it again with that plugin's header", version.major_version,
                   version.minor_version, path, PJRT_API_MAJOR, PJRT_API_MINOR);
  PJRT_Error* error = plugin->PJRT_Plugin_Initialize(args);
  return error ? error : register_collectives();
}

static const PJRT_Api* load(void) {
  const char* path = getenv("SIMULATOR_PLUGIN");
  void* handle = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
  const PJRT_Api* (*get)(void) = handle ? (const PJRT_Api* (*)(void))dlsym(handle, "GetPjrtApi") : NULL;
  if (path && !get) why_not_loaded = dlerror();
  return get ? get() : NULL;
}

const PJRT_Api* GetPjrtApi(void) {
  if (api.struct_size) return &api;
  // torch_xla launches programs from a pool of one thread a core, and XLA:CPU runs small ones in the launching thread:
  // a device that waits there for another would take the thread that other needs.
  setenv("XLA_THREAD_POOL_SIZE", "64", 0);
  plugin = load();
  if (plugin) {
    memcpy(&api, plugin, plugin->struct_size < sizeof api ? plugin->struct_size : sizeof api);
    profiler_extension.base.next = plugin->extension_start;
    api.extension_start = &profiler_extension.base;
    answer_for_topology(&api);
    answer_for_programs(&api);
    answer_for_stablehlo(&api);
    api.PJRT_Plugin_Attributes = attributes;
    api.PJRT_Client_Create = client_create;
    api.PJRT_Client_Destroy = client_destroy;
    api.PJRT_Device_MemoryStats = memory_stats;
  } else {
    api.pjrt_api_version = (PJRT_Api_Version){
        PJRT_Api_Version_STRUCT_SIZE, NULL, PJRT_API_MAJOR, PJRT_API_MINOR};
  }
  api.struct_size = PJRT_Api_STRUCT_SIZE;
  api.PJRT_Plugin_Initialize = initialize;
  api.PJRT_Error_Destroy = error_destroy;
  api.PJRT_Error_Message = error_message;
  api.PJRT_Error_GetCode = error_code;
  return &api;
}
