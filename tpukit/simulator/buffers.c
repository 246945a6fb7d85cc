// Buffers: the contents of the device's memory while programs are recorded (record.c), and those from the host.
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "simulator.h"

enum { BUCKETS = 4096 };

typedef struct Live {
  struct Live* next;
  PJRT_Buffer* buffer;
  size_t size;
  int is_fresh;  // it came from the host, and no program has taken it yet
  int taken_by;  // the run that takes it as an argument
} Live;
static Live* live[BUCKETS];
static int runs;
static pthread_mutex_t live_lock = PTHREAD_MUTEX_INITIALIZER;

static Live** place_of(const PJRT_Buffer* buffer) {
  Live** at = &live[((uintptr_t)buffer >> 4) % BUCKETS];
  while (*at && (*at)->buffer != buffer) at = &(*at)->next;
  return at;
}

void note_buffer(PJRT_Buffer* buffer, int is_from_host) {
  PJRT_Buffer_OnDeviceSizeInBytes_Args size = {PJRT_Buffer_OnDeviceSizeInBytes_Args_STRUCT_SIZE, NULL, buffer, 0};
  if (!buffer || plugin->PJRT_Buffer_OnDeviceSizeInBytes(&size)) return;
  pthread_mutex_lock(&live_lock);
  Live** at = place_of(buffer);
  if (!*at) *at = calloc(1, sizeof **at);
  (*at)->buffer = buffer;
  (*at)->size = size.on_device_size_in_bytes;
  (*at)->is_fresh = is_from_host;
  pthread_mutex_unlock(&live_lock);
}

void forget_buffer(const PJRT_Buffer* buffer) {
  pthread_mutex_lock(&live_lock);
  Live **at = place_of(buffer), *found = *at;
  if (found) *at = found->next;
  free(found);
  pthread_mutex_unlock(&live_lock);
}

static void write_shape(PJRT_Buffer* buffer, FILE* to) {
  PJRT_Buffer_ElementType_Args type = {PJRT_Buffer_ElementType_Args_STRUCT_SIZE, NULL, buffer, 0};
  PJRT_Buffer_Dimensions_Args shape = {PJRT_Buffer_Dimensions_Args_STRUCT_SIZE, NULL, buffer, NULL, 0};
  if (plugin->PJRT_Buffer_ElementType(&type) || plugin->PJRT_Buffer_Dimensions(&shape) || !shape.num_dims) return;
  fprintf(to, " %d:", (int)type.type);
  for (size_t i = 0; i < shape.num_dims; i++) fprintf(to, i ? ",%lld" : "%lld", (long long)shape.dims[i]);
}

static int is_deleted(PJRT_Buffer* buffer) {  // a program has overwritten it
  PJRT_Buffer_IsDeleted_Args args = {PJRT_Buffer_IsDeleted_Args_STRUCT_SIZE, NULL, buffer, false};
  return plugin->PJRT_Buffer_IsDeleted(&args) || args.is_deleted;
}

void write_memory(const PJRT_LoadedExecutable_Execute_Args* args, FILE* to) {
  size_t other_bytes = 0;
  pthread_mutex_lock(&live_lock);
  runs++;
  for (size_t chip = 0; chip < args->num_devices; chip++)
    for (size_t i = 0; i < args->num_args; i++) {
      Live* found = *place_of(args->argument_lists[chip][i]);
      if (found) found->taken_by = runs;
    }
  for (int i = 0; i < BUCKETS; i++)
    for (Live* one = live[i]; one; one = one->next)
      if (one->taken_by != runs && !is_deleted(one->buffer)) other_bytes += one->size;
  fprintf(to, " %zu", other_bytes / args->num_devices);  // of one chip, where they are one core
  for (size_t i = 0; i < args->num_args; i++) {
    Live* found = *place_of(args->argument_lists[0][i]);
    if (found && found->is_fresh) write_shape(found->buffer, to);
    if (found) found->is_fresh = 0;
  }
  pthread_mutex_unlock(&live_lock);
}
