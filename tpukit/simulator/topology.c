// The devices of the run and of this process, from libtpu's variables, and torch_xla's questions about them.
//
// The plugin makes all the devices of the run in every process, so that a device's number is its number in
// the run; a process is shown only its own as addressable.
#include <stdlib.h>
#include <string.h>

#include "simulator.h"

Topology topology;

enum { AXES = 3, ATTRIBUTES = 3 };
typedef struct {
  int64_t coords[AXES];
  PJRT_NamedValue attributes[ATTRIBUTES];
} Description;
static Description described[MOST_DEVICES];

// Reads "2,4,1" into numbers; returns how many there were, -1 if it is no such list.
static int read_list(const char* text, int* numbers, int most) {
  int count = 0;
  for (char* end; *text; text = *end ? end + 1 : end) {
    long number = strtol(text, &end, 10);
    if (end == text || (*end && *end != ',') || count == most) return -1;
    numbers[count++] = (int)number;
  }
  return count;
}

// Reads the product of bounds such as "2,4,1" from a variable; `otherwise` if it is not set, 0 if it is no bounds.
static int read_product(const char* name, int otherwise) {
  const char* text = getenv(name);
  int bounds[8], product = 1;
  if (!text || !*text) return otherwise;
  int count = read_list(text, bounds, 8);
  for (int i = 0; i < count; i++) product *= bounds[i] > 0 ? bounds[i] : 0;
  return count > 0 ? product : 0;
}

static int read_number(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text && *text ? atoi(text) : otherwise;
}

// Where each process's devices begin: in the processes' order, or as SIMULATOR_ORDER has it ("2,0,3,1": process 0 has
// the third place). On a TPU the order of chips is not promised (pytorch/xla 3824 and 3902).
static PJRT_Error* read_order(void) {
  const char* order = getenv("SIMULATOR_ORDER");
  int seen[MOST_DEVICES] = {0};
  for (int p = 0; p < topology.processes; p++) topology.place[p] = p;
  if (!order || !*order) return NULL;
  int count = read_list(order, topology.place, topology.processes);
  for (int p = 0; p < count; p++) {
    int place = topology.place[p];
    if (place < 0 || place >= topology.processes || seen[place]++) count = -1;
  }
  if (count == topology.processes) return NULL;
  return failure(PJRT_Error_Code_INVALID_ARGUMENT,
                 "the order of the chips is no permutation of %d processes.\n  found: SIMULATOR_ORDER=%s\n"
                 "  fix:   name every number from 0 to %d once", topology.processes, order, topology.processes - 1);
}

// Kaggle's image sets TPU_PROCESS_ADDRESSES=local, torch_xla keeps it, and the processes cannot meet (pytorch/xla 5616).
static PJRT_Error* check_addresses(void) {
  const char* addresses = getenv("TPU_PROCESS_ADDRESSES");
  if (!addresses || topology.processes == 1) return NULL;
  int count = 1;
  for (const char* c = addresses; *c; c++) count += *c == ',';
  if (count == topology.processes) return NULL;
  return failure(PJRT_Error_Code_INVALID_ARGUMENT,
                 "expected %d worker addresses, got %d.\n  found: TPU_PROCESS_ADDRESSES=%s, TPU_PROCESS_BOUNDS=%s\n"
                 "  fix:   remove TPU_PROCESS_ADDRESSES from the environment before the workers start",
                 topology.processes, count, addresses, getenv("TPU_PROCESS_BOUNDS"));
}

// Reads bounds such as "2,4,1" of so many chips or processes; a row of them if the variable has bounds of another number.
static void read_bounds(const char* name, int number, int* bounds) {
  const char* text = getenv(name);
  int count = text ? read_list(text, bounds, AXES) : 0;
  int product = 1;
  for (int axis = 0; axis < count; axis++) product *= bounds[axis];
  if (count == AXES && product == number) return;
  bounds[0] = number;
  bounds[1] = bounds[2] = 1;
}

// The place of a chip or a process among others: numbers count along the first axis first.
static void place_in(const int* bounds, int number, int64_t* place) {
  for (int axis = 0; axis < AXES; axis++) {
    place[axis] = number % bounds[axis];
    number /= bounds[axis];
  }
}

// What a TPU says of each core: the coordinates of its chip among all chips of the run, which core of the chip it is,
// and the number of cores of a chip. Code that lays a mesh over the chips asks for them.
static void describe_devices(int chips, int cores_per_chip) {
  int of_process[AXES], of_run[AXES];
  read_bounds(getenv("TPU_CHIPS_PER_PROCESS_BOUNDS") ? "TPU_CHIPS_PER_PROCESS_BOUNDS" : "TPU_CHIPS_PER_HOST_BOUNDS",
              chips, of_process);
  read_bounds("TPU_PROCESS_BOUNDS", topology.processes, of_run);
  for (int device = 0; device < topology.world; device++) {
    int64_t process[AXES], chip[AXES];
    place_in(of_run, device / topology.cores, process);
    place_in(of_process, device % topology.cores / cores_per_chip, chip);
    Description* is = &described[device];
    for (int axis = 0; axis < AXES; axis++) is->coords[axis] = process[axis] * of_process[axis] + chip[axis];
    is->attributes[0] = (PJRT_NamedValue){.struct_size = PJRT_NamedValue_STRUCT_SIZE, .name = "coords", .name_size = 6,
                                          .type = PJRT_NamedValue_kInt64List, .int64_array_value = is->coords,
                                          .value_size = AXES};
    is->attributes[1] = (PJRT_NamedValue){.struct_size = PJRT_NamedValue_STRUCT_SIZE, .name = "core_on_chip",
                                          .name_size = 12, .type = PJRT_NamedValue_kInt64,
                                          .int64_value = device % cores_per_chip, .value_size = 1};
    is->attributes[2] = (PJRT_NamedValue){.struct_size = PJRT_NamedValue_STRUCT_SIZE, .name = "num_cores",
                                          .name_size = 9, .type = PJRT_NamedValue_kInt64,
                                          .int64_value = cores_per_chip, .value_size = 1};
  }
}

PJRT_Error* read_topology(void) {
  int chips = read_product("TPU_CHIPS_PER_PROCESS_BOUNDS", read_number("SIMULATOR_CHIPS", 1));
  int cores_per_chip = read_number("SIMULATOR_CORES", 1);
  topology.cores = chips * cores_per_chip;
  topology.processes = read_product("TPU_PROCESS_BOUNDS", 1);
  topology.process = read_number("CLOUD_TPU_TASK_ID", 0);
  topology.world = topology.cores * topology.processes;
  if (topology.world < 1 || topology.world > MOST_DEVICES || topology.process < 0 || topology.process >= topology.processes)
    return failure(PJRT_Error_Code_INVALID_ARGUMENT,
                   "no topology of 1 to %d devices.\n  found: process %d of %d with %d device(s) each\n  fix:   set "
                   "TPU_PROCESS_BOUNDS, TPU_CHIPS_PER_PROCESS_BOUNDS and CLOUD_TPU_TASK_ID to a machine that exists",
                   MOST_DEVICES, topology.process, topology.processes, topology.cores);
  describe_devices(chips, cores_per_chip);
  PJRT_Error* error = check_addresses();
  return error ? error : read_order();
}

int first_device(void) { return topology.place[topology.process] * topology.cores; }

int process_of(int device) {
  int p = 0;
  while (topology.place[p] != device / topology.cores) p++;
  return p;
}

// ---- torch_xla's questions

static PJRT_Error* platform_name(PJRT_Client_PlatformName_Args* args) {
  args->platform_name = "tpu";
  args->platform_name_size = strlen(args->platform_name);
  return NULL;
}

// A hash of the sources that it was compiled from, and one of this processor's features, on which XLA:CPU's code depends:
// who keeps compiled programs finds them by it.
static PJRT_Error* platform_version(PJRT_Client_PlatformVersion_Args* args) {
  static char version[64];
  char line[8192] = "";
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a, 64 bits
  FILE* facts = fopen("/proc/cpuinfo", "r");
  while (facts && strncmp(line, "flags", 5) && fgets(line, sizeof line, facts)) {}
  if (facts) fclose(facts);
  for (const char* c = line; *c; c++) hash = (hash ^ (uint8_t)*c) * 0x100000001b3;
  args->platform_version = version;
  args->platform_version_size = sprintf(version, "simulator " SOURCES " on %016llx", (unsigned long long)hash);
  return NULL;
}

static PJRT_Error* topology_platform_name(PJRT_TopologyDescription_PlatformName_Args* args) {
  args->platform_name = "tpu";
  args->platform_name_size = strlen(args->platform_name);
  return NULL;
}

static PJRT_Error* kind(PJRT_DeviceDescription_Kind_Args* args) {
  args->device_kind = "TPU simulator";
  args->device_kind_size = strlen(args->device_kind);
  return NULL;
}

static PJRT_Error* process_index(PJRT_Client_ProcessIndex_Args* args) {
  args->process_index = topology.process;
  return NULL;
}

static PJRT_Error* addressable_devices(PJRT_Client_AddressableDevices_Args* args) {
  PJRT_Error* error = plugin->PJRT_Client_AddressableDevices(args);
  if (error) return error;
  args->addressable_devices += first_device();
  args->num_addressable_devices = topology.cores;
  return NULL;
}

PJRT_Error* own_devices(PJRT_LoadedExecutable_AddressableDevices_Args* args) {
  PJRT_Error* error = plugin->PJRT_LoadedExecutable_AddressableDevices(args);
  if (error || (int)args->num_addressable_devices != topology.world) return error;
  args->addressable_devices += first_device();
  args->num_addressable_devices = topology.cores;
  return NULL;
}

static int number_of(PJRT_DeviceDescription* description) {
  PJRT_DeviceDescription_Id_Args args = {PJRT_DeviceDescription_Id_Args_STRUCT_SIZE, NULL, description, 0};
  plugin->PJRT_DeviceDescription_Id(&args);
  return args.id;
}

static PJRT_Error* device_process_index(PJRT_DeviceDescription_ProcessIndex_Args* args) {
  args->process_index = process_of(number_of(args->device_description));
  return NULL;
}

static PJRT_Error* device_attributes(PJRT_DeviceDescription_Attributes_Args* args) {
  args->attributes = described[number_of(args->device_description)].attributes;
  args->num_attributes = ATTRIBUTES;
  return NULL;
}

static PJRT_Error* is_addressable(PJRT_Device_IsAddressable_Args* args) {
  PJRT_Device_GetDescription_Args asked = {PJRT_Device_GetDescription_Args_STRUCT_SIZE, NULL, args->device, NULL};
  PJRT_Error* error = plugin->PJRT_Device_GetDescription(&asked);
  if (!error) args->is_addressable = process_of(number_of(asked.device_description)) == topology.process;
  return error;
}

void answer_for_topology(PJRT_Api* api) {
  api->PJRT_Client_PlatformName = platform_name;
  api->PJRT_Client_PlatformVersion = platform_version;
  api->PJRT_Client_ProcessIndex = process_index;
  api->PJRT_Client_AddressableDevices = addressable_devices;
  api->PJRT_LoadedExecutable_AddressableDevices = own_devices;
  api->PJRT_Device_IsAddressable = is_addressable;
  api->PJRT_DeviceDescription_ProcessIndex = device_process_index;
  api->PJRT_DeviceDescription_Kind = kind;
  api->PJRT_DeviceDescription_Attributes = device_attributes;
  api->PJRT_TopologyDescription_PlatformName = topology_platform_name;
}
