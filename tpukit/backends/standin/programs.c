// Compiling, running and freeing: where XLA:CPU does it otherwise than a TPU, and torch_xla would notice.
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "protobuf.h"
#include "standin.h"

// ---- compiling

// A compiled program. Two device threads of a process compile the same step; the second gets the first one's.
typedef struct Program {
  struct Program* next;
  PJRT_LoadedExecutable* executable;
  Bytes source;  // with the options
  int holders, collectives;
} Program;
static Program* programs;
static pthread_mutex_t programs_lock = PTHREAD_MUTEX_INITIALIZER;

static Program* find_program(const PJRT_LoadedExecutable* executable) {
  Program* program = programs;
  while (program && program->executable != executable) program = program->next;
  return program;
}

static Program* find_source(const Bytes* source) {
  Program* program = programs;
  while (program && (program->source.size != source->size ||
                     memcmp(program->source.bytes, source->bytes, source->size)))
    program = program->next;
  return program;
}

// CompileOptionsProto.executable_build_options (3).num_partitions (5). More than one is SPMD: all devices are then this
// process's, and the plugin's own collectives meet.
static int partitions(const char* options, size_t size) {
  Span rest = {(const uint8_t*)options, (const uint8_t*)options + size};
  Field field, inner;
  int count = 1;
  while (next_field(&rest, &field))
    for (Span build = field.content; field.number == 3 && next_field(&build, &inner);)
      if (inner.number == 5) count = (int)inner.value;
  return count;
}

static PJRT_Error* compile_new(PJRT_Client_Compile_Args* args, int* collectives) {
  const PJRT_Program* given = args->program;
  PJRT_Program mine = *given;
  Bytes code = {0};
  PJRT_Error* error = NULL;
  int is_hlo = given->format_size == 3 && !memcmp(given->format, "hlo", 3);
  if (is_hlo && partitions(args->compile_options, args->compile_options_size) == 1)
    error = rewrite((const uint8_t*)given->code, given->code_size, &code, collectives);
  if (*collectives) {
    mine.code = (char*)code.bytes;
    mine.code_size = code.size;
    args->program = &mine;
  }
  if (!error) error = plugin->PJRT_Client_Compile(args);
  args->program = given;
  free(code.bytes);
  return error;
}

static PJRT_Error* compile(PJRT_Client_Compile_Args* args) {
  Bytes source = {0};
  PJRT_Error* error = NULL;
  put(&source, args->program->code, args->program->code_size);
  put(&source, args->compile_options, args->compile_options_size);
  pthread_mutex_lock(&programs_lock);
  Program* program = find_source(&source);
  if (program) {
    program->holders++;
    args->executable = program->executable;
    free(source.bytes);
  } else {
    int collectives = 0;
    error = compile_new(args, &collectives);
    if (error) {
      free(source.bytes);
    } else {
      say("compiled a program of %zu bytes with %d collective(s)", args->program->code_size, collectives);
      program = malloc(sizeof *program);
      *program = (Program){programs, args->executable, source, 1, collectives};
      programs = program;
    }
  }
  pthread_mutex_unlock(&programs_lock);
  return error;
}

static PJRT_Error* executable_destroy(PJRT_LoadedExecutable_Destroy_Args* args) {
  pthread_mutex_lock(&programs_lock);
  Program** at = &programs;
  while (*at && (*at)->executable != args->executable) at = &(*at)->next;
  Program* program = *at;
  int is_last = !program || --program->holders == 0;
  if (program && is_last) {
    *at = program->next;
    free(program->source.bytes);
    free(program);
  }
  pthread_mutex_unlock(&programs_lock);
  return is_last ? plugin->PJRT_LoadedExecutable_Destroy(args) : NULL;
}

// ---- running

// A TPU core runs its programs in the order of their launch; XLA:CPU may run two whose inputs are ready in either, and
// their collectives would meet the wrong ones. So a program with collectives waits for the device's one before it.
typedef struct {
  PJRT_Device* device;
  int is_busy;
} Lane;
static Lane lanes[MOST_DEVICES];
static pthread_cond_t lane_freed = PTHREAD_COND_INITIALIZER;

static Lane* enter_lane(PJRT_Device* device) {
  Lane* lane = lanes;
  while (lane->device && lane->device != device) lane++;
  lane->device = device;
  while (lane->is_busy) pthread_cond_wait(&lane_freed, &programs_lock);
  lane->is_busy = 1;
  return lane;
}

static void leave_lane(PJRT_Error* error, void* lane) {
  if (error) {  // the caller is told by its own event
    PJRT_Error_Destroy_Args args = {PJRT_Error_Destroy_Args_STRUCT_SIZE, NULL, error};
    plugin->PJRT_Error_Destroy(&args);
  }
  pthread_mutex_lock(&programs_lock);
  ((Lane*)lane)->is_busy = 0;
  pthread_cond_broadcast(&lane_freed);
  pthread_mutex_unlock(&programs_lock);
}

static PJRT_Error* execute(PJRT_LoadedExecutable_Execute_Args* args) {
  // An older caller's options are shorter than the plugin's.
  PJRT_ExecuteOptions options = {0}, *given = args->options;
  memcpy(&options, given, given->struct_size < sizeof options ? given->struct_size : sizeof options);
  options.struct_size = PJRT_ExecuteOptions_STRUCT_SIZE;
  Lane* lane = NULL;
  pthread_mutex_lock(&programs_lock);
  const Program* program = find_program(args->executable);
  if (program && program->collectives && args->execute_device && args->device_complete_events)
    lane = enter_lane(args->execute_device);
  pthread_mutex_unlock(&programs_lock);
  args->options = &options;
  PJRT_Error* error = plugin->PJRT_LoadedExecutable_Execute(args);
  args->options = given;
  if (!lane) return error;
  PJRT_Event_OnReady_Args done = {PJRT_Event_OnReady_Args_STRUCT_SIZE, NULL,
                                  error ? NULL : args->device_complete_events[0], leave_lane, lane};
  if (error || plugin->PJRT_Event_OnReady(&done)) leave_lane(NULL, lane);
  return error;
}

// ---- freeing

// XLA:CPU's free waits for the programs that read the buffer, and torch_xla frees with Python's lock held, which another
// device's thread may need to get to its launch. A TPU's does not wait: one thread frees, one after the other.
typedef struct Unwanted {
  struct Unwanted* next;
  PJRT_Buffer* buffer;
} Unwanted;
static Unwanted *unwanted, **unwanted_end = &unwanted;
static int is_freeing, has_thread;
static pthread_mutex_t free_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t more_to_free = PTHREAD_COND_INITIALIZER, all_freed = PTHREAD_COND_INITIALIZER;

static void* free_buffers(void* nothing) {
  pthread_mutex_lock(&free_lock);
  for (;;) {
    while (!unwanted) {
      pthread_cond_broadcast(&all_freed);
      pthread_cond_wait(&more_to_free, &free_lock);
    }
    Unwanted* first = unwanted;
    unwanted = first->next;
    if (!unwanted) unwanted_end = &unwanted;
    is_freeing = 1;
    pthread_mutex_unlock(&free_lock);
    PJRT_Buffer_Destroy_Args args = {PJRT_Buffer_Destroy_Args_STRUCT_SIZE, NULL, first->buffer};
    plugin->PJRT_Buffer_Destroy(&args);
    free(first);
    pthread_mutex_lock(&free_lock);
    is_freeing = 0;
  }
  return nothing;
}

static PJRT_Error* buffer_destroy(PJRT_Buffer_Destroy_Args* args) {
  Unwanted* last = malloc(sizeof *last);
  *last = (Unwanted){NULL, args->buffer};
  pthread_mutex_lock(&free_lock);
  pthread_t thread;
  if (!has_thread) has_thread = !pthread_create(&thread, NULL, free_buffers, NULL) && !pthread_detach(thread);
  *unwanted_end = last;
  unwanted_end = &last->next;
  pthread_cond_signal(&more_to_free);
  pthread_mutex_unlock(&free_lock);
  return NULL;
}

void finish_freeing(void) {
  pthread_mutex_lock(&free_lock);
  while (has_thread && (unwanted || is_freeing)) pthread_cond_wait(&all_freed, &free_lock);
  pthread_mutex_unlock(&free_lock);
}

void answer_for_programs(PJRT_Api* api) {
  api->PJRT_Client_Compile = compile;
  api->PJRT_LoadedExecutable_Execute = execute;
  api->PJRT_LoadedExecutable_Destroy = executable_destroy;
  api->PJRT_Buffer_Destroy = buffer_destroy;
}
