// Placeholders: while programs are recorded (record.c), a large array has a shape and no memory. So a step can be
// recorded of a model that, with its optimiser's state, is larger than this machine's memory.
#define _GNU_SOURCE
#include <string.h>
#include <sys/mman.h>

#include "simulator.h"

enum { LARGE = 1 << 20, MUCH = 256 << 20 };  // bytes: of an array that is one, and of outputs that are not computed

// Memory that is never written to: reading it gives zeros, and takes no page of its own.
static void* zeros(void) {
  static void* found;
  if (!found) {
    found = mmap(NULL, (size_t)1 << 40, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) found = NULL;
  }
  return found;
}

static size_t width_of(PJRT_Buffer_Type type) {
  switch (type) {
    case PJRT_Buffer_Type_S64: case PJRT_Buffer_Type_U64: case PJRT_Buffer_Type_F64: case PJRT_Buffer_Type_C64: return 8;
    case PJRT_Buffer_Type_S32: case PJRT_Buffer_Type_U32: case PJRT_Buffer_Type_F32: return 4;
    case PJRT_Buffer_Type_S16: case PJRT_Buffer_Type_U16: case PJRT_Buffer_Type_F16: case PJRT_Buffer_Type_BF16: return 2;
    case PJRT_Buffer_Type_C128: return 16;
    default: return 1;
  }
}

static size_t size_of(PJRT_Buffer_Type type, const int64_t* dims, size_t count) {
  size_t size = width_of(type);
  for (size_t i = 0; i < count; i++) size *= (size_t)dims[i];
  return size;
}

static PJRT_Event* ready_event(PJRT_Buffer* buffer) {
  PJRT_Buffer_ReadyEvent_Args ready = {PJRT_Buffer_ReadyEvent_Args_STRUCT_SIZE, NULL, buffer, NULL};
  return plugin->PJRT_Buffer_ReadyEvent(&ready) ? NULL : ready.event;
}

static void nothing_to_free(void* memory, void* argument) {
  (void)memory, (void)argument;
}

int hold_place(PJRT_Client_BufferFromHostBuffer_Args* args) {
  if (size_of(args->type, args->dims, args->num_dims) < LARGE || !zeros()) return 0;
  PJRT_Client_CreateViewOfDeviceBuffer_Args view = {
      .struct_size = PJRT_Client_CreateViewOfDeviceBuffer_Args_STRUCT_SIZE, .client = args->client,
      .device_buffer_ptr = zeros(), .dims = args->dims, .num_dims = args->num_dims, .element_type = args->type,
      .layout = args->device_layout, .device = args->device, .memory = args->memory,
      .on_delete_callback = nothing_to_free};
  if (plugin->PJRT_Client_CreateViewOfDeviceBuffer(&view)) return 0;
  args->buffer = view.buffer;
  args->done_with_host_buffer = ready_event(view.buffer);
  return 1;
}

// Makes an output: zeros of this type and shape; those of a small array are its own, since others may write to them.
static PJRT_Error* make_output(PJRT_Client_BufferFromHostBuffer_Args* args) {
  if (hold_place(args)) {
    PJRT_Event_Destroy_Args done = {PJRT_Event_Destroy_Args_STRUCT_SIZE, NULL, args->done_with_host_buffer};
    plugin->PJRT_Event_Destroy(&done);
    return NULL;
  }
  args->data = zeros();
  args->host_buffer_semantics = PJRT_HostBufferSemantics_kImmutableOnlyDuringCall;
  PJRT_Error* error = plugin->PJRT_Client_BufferFromHostBuffer(args);
  if (error) return error;
  PJRT_Event_Destroy_Args done = {PJRT_Event_Destroy_Args_STRUCT_SIZE, NULL, args->done_with_host_buffer};
  plugin->PJRT_Event_Destroy(&done);
  return NULL;
}

int hold_outputs(PJRT_LoadedExecutable_Execute_Args* args, PJRT_Client* client, PJRT_Error** error) {
  PJRT_LoadedExecutable_GetExecutable_Args get = {
      PJRT_LoadedExecutable_GetExecutable_Args_STRUCT_SIZE, NULL, args->executable, NULL};
  PJRT_LoadedExecutable_AddressableDevices_Args on = {
      PJRT_LoadedExecutable_AddressableDevices_Args_STRUCT_SIZE, NULL, args->executable, NULL, 0};
  if (plugin->PJRT_LoadedExecutable_GetExecutable(&get) || plugin->PJRT_LoadedExecutable_AddressableDevices(&on)) return 0;
  PJRT_Executable_OutputElementTypes_Args types = {
      PJRT_Executable_OutputElementTypes_Args_STRUCT_SIZE, NULL, get.executable, NULL, 0};
  PJRT_Executable_OutputDimensions_Args shapes = {
      PJRT_Executable_OutputDimensions_Args_STRUCT_SIZE, NULL, get.executable, 0, NULL, NULL};
  PJRT_Executable_Destroy_Args destroy = {PJRT_Executable_Destroy_Args_STRUCT_SIZE, NULL, get.executable};
  int is_known = !plugin->PJRT_Executable_OutputElementTypes(&types) && !plugin->PJRT_Executable_OutputDimensions(&shapes);
  const int64_t* dims = shapes.dims;
  size_t size = 0;
  for (size_t i = 0; is_known && i < shapes.num_outputs; dims += shapes.dim_sizes[i++])
    size += size_of(types.output_types[i], dims, shapes.dim_sizes[i]);
  int is_much = is_known && (size >= MUCH || args->num_devices > 1) && zeros();
  for (size_t chip = 0; is_much && !*error && chip < args->num_devices; chip++) {
    dims = shapes.dims;
    for (size_t i = 0; !*error && i < shapes.num_outputs; dims += shapes.dim_sizes[i++]) {
      PJRT_Client_BufferFromHostBuffer_Args made = {
          .struct_size = PJRT_Client_BufferFromHostBuffer_Args_STRUCT_SIZE, .client = client,
          .type = types.output_types[i], .dims = dims, .num_dims = shapes.dim_sizes[i],
          .device = args->execute_device ? args->execute_device : on.addressable_devices[chip]};
      *error = make_output(&made);
      args->output_lists[chip][i] = made.buffer;
    }
    if (!*error && args->device_complete_events)
      args->device_complete_events[chip] = ready_event(args->output_lists[chip][0]);
  }
  plugin->PJRT_Executable_Destroy(&destroy);
  return is_much;
}
