// Compiling, running and freeing: where XLA:CPU does it otherwise than a TPU, and torch_xla would notice.
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "protobuf.h"
#include "simulator.h"

// ---- compiling

// A compiled program. Two device threads of a process compile the same step; the second gets the first one's.
typedef struct Program {
  struct Program* next;
  PJRT_LoadedExecutable* executable;
  Bytes source;  // with the options
  int holders;
  Recorded recorded;
} Program;
static Program* programs;
static int programs_compiled;
static pthread_mutex_t programs_lock = PTHREAD_MUTEX_INITIALIZER;

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

static size_t outputs_of(PJRT_LoadedExecutable* loaded) {
  PJRT_LoadedExecutable_GetExecutable_Args get = {
      PJRT_LoadedExecutable_GetExecutable_Args_STRUCT_SIZE, NULL, loaded, NULL};
  if (plugin->PJRT_LoadedExecutable_GetExecutable(&get)) return 0;
  PJRT_Executable_NumOutputs_Args count = {PJRT_Executable_NumOutputs_Args_STRUCT_SIZE, NULL, get.executable, 0};
  PJRT_Executable_Destroy_Args destroy = {PJRT_Executable_Destroy_Args_STRUCT_SIZE, NULL, get.executable};
  if (plugin->PJRT_Executable_NumOutputs(&count)) count.num_outputs = 0;
  plugin->PJRT_Executable_Destroy(&destroy);
  return count.num_outputs;
}

static PJRT_Error* compile_new(PJRT_Client_Compile_Args* args, int* collectives, Recorded* recorded) {
  const PJRT_Program* given = args->program;
  PJRT_Program mine = *given;
  Bytes code = {0};
  PJRT_Error* error = NULL;
  int is_hlo = given->format_size == 3 && !memcmp(given->format, "hlo", 3), is_replaced = 0;
  if (!is_hlo) return compile_stablehlo(args, collectives);
  recorded->number = programs_compiled++;
  if (is_recording()) {
    record_program(recorded->number, given->code, given->code_size, args->compile_options, args->compile_options_size);
    is_replaced = replacement_for(given->code, given->code_size, &code);
    if (is_replaced) recorded->client = args->client;
  }
  if (!is_replaced && partitions(args->compile_options, args->compile_options_size) == 1)
    error = rewrite((const uint8_t*)given->code, given->code_size, &code, collectives);
  if (*collectives || is_replaced) {
    mine.code = (char*)code.bytes;
    mine.code_size = code.size;
    args->program = &mine;
  }
  if (!error) error = plugin->PJRT_Client_Compile(args);
  args->program = given;
  free(code.bytes);
  if (!error && is_recording()) recorded->outputs = outputs_of(args->executable);
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
    Recorded recorded = {0};
    error = compile_new(args, &collectives, &recorded);
    if (error) {
      free(source.bytes);
    } else {
      say("compiled a program of %zu bytes with %d collective(s)", args->program->code_size, collectives);
      program = malloc(sizeof *program);
      *program = (Program){programs, args->executable, source, 1, recorded};
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

// A TPU core runs its programs in the order of their launch. XLA:CPU keeps that order for programs launched from one
// thread, whatever their devices: from torch_xla's pool, where a thread serves all devices, a program would come after
// another device's that waits for it in a collective, and both would wait for ever. So each device has a thread of its
// own, from which all its programs are launched.
typedef struct {
  PJRT_Device* device;
  PJRT_LoadedExecutable_Execute_Args* wanted;  // NULL: nothing to launch
  PJRT_Error* error;                           // of the launched program
  int is_launched;
} Launcher;
static Launcher launchers[MOST_DEVICES];
static pthread_mutex_t launch_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t launch_changed = PTHREAD_COND_INITIALIZER;

static void* launch_programs(void* of_device) {
  Launcher* launcher = of_device;
  pthread_mutex_lock(&launch_lock);
  for (;;) {
    while (!launcher->wanted || launcher->is_launched) pthread_cond_wait(&launch_changed, &launch_lock);
    pthread_mutex_unlock(&launch_lock);
    launcher->error = plugin->PJRT_LoadedExecutable_Execute(launcher->wanted);
    pthread_mutex_lock(&launch_lock);
    launcher->is_launched = 1;
    pthread_cond_broadcast(&launch_changed);
  }
  return NULL;
}

static Launcher* launcher_of(PJRT_Device* device) {
  Launcher* launcher = launchers;
  while (launcher->device && launcher->device != device) launcher++;
  if (launcher->device) return launcher;
  pthread_t thread;
  if (pthread_create(&thread, NULL, launch_programs, launcher)) return NULL;
  pthread_detach(thread);
  launcher->device = device;
  return launcher;
}

static PJRT_Error* launch(PJRT_LoadedExecutable_Execute_Args* args) {
  pthread_mutex_lock(&launch_lock);
  Launcher* launcher = launcher_of(args->execute_device);
  if (!launcher) {
    pthread_mutex_unlock(&launch_lock);
    return failure(PJRT_Error_Code_RESOURCE_EXHAUSTED, "no thread can be started to launch programs from");
  }
  while (launcher->wanted) pthread_cond_wait(&launch_changed, &launch_lock);
  launcher->wanted = args;
  pthread_cond_broadcast(&launch_changed);
  while (!launcher->is_launched) pthread_cond_wait(&launch_changed, &launch_lock);
  PJRT_Error* error = launcher->error;
  launcher->wanted = NULL;
  launcher->is_launched = 0;
  pthread_cond_broadcast(&launch_changed);
  pthread_mutex_unlock(&launch_lock);
  return error;
}

static Recorded recorded_of(const PJRT_LoadedExecutable* executable) {
  pthread_mutex_lock(&programs_lock);
  Program* program = programs;
  while (program && program->executable != executable) program = program->next;
  Recorded recorded = program ? program->recorded : (Recorded){-1, 0, NULL};
  pthread_mutex_unlock(&programs_lock);
  return recorded;
}

static PJRT_Error* execute(PJRT_LoadedExecutable_Execute_Args* args) {
  Recorded recorded = {0};
  if (is_recording()) {
    recorded = recorded_of(args->executable);
    if (recorded.number >= 0) record_run(&recorded, args);
  }
  PJRT_Error* error = NULL;
  int is_held = recorded.client && hold_outputs(args, recorded.client, &error);
  // An older caller's options are shorter than the plugin's.
  PJRT_ExecuteOptions options = {0}, *given = args->options;
  memcpy(&options, given, given->struct_size < sizeof options ? given->struct_size : sizeof options);
  options.struct_size = PJRT_ExecuteOptions_STRUCT_SIZE;
  args->options = &options;
  args->execute_device = device_for(args);
  if (!is_held) error = args->execute_device ? launch(args) : plugin->PJRT_LoadedExecutable_Execute(args);
  args->options = given;
  for (size_t chip = 0; !error && chip < args->num_devices; chip++)
    for (size_t i = 0; i < recorded.outputs; i++) note_buffer(args->output_lists[chip][i], 0);
  return error;
}

static PJRT_Error* buffer_from_host(PJRT_Client_BufferFromHostBuffer_Args* args) {
  PJRT_Error* error = NULL;
  if (!is_recording() || !hold_place(args)) error = plugin->PJRT_Client_BufferFromHostBuffer(args);
  if (!error && is_recording()) note_buffer(args->buffer, 1);
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
  if (is_recording()) forget_buffer(args->buffer);
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
  api->PJRT_Client_BufferFromHostBuffer = buffer_from_host;
  api->PJRT_Buffer_Destroy = buffer_destroy;
}
