// Compiles one HLO module for a TPU topology with libtpu, on a machine without a chip, in a process of its own: libtpu
// may end it with a signal, and takes gigabytes.
//
//   compile LIBTPU TOPOLOGY BOUNDS FOLDER [KEEPER]
//
// BOUNDS is the chips of a host ("1,1,1"; "" for libtpu's own choice). FOLDER holds module.hlo (HloModuleProto) and
// options.pb (CompileOptionsProto). What libtpu answers is written beside them: "optimized", the program as it would run;
// "numbers", a line for each of memory in bytes and of the cost analysis; or "error", a line with the step that failed,
// then libtpu's words. The exit status is 0, 1 with an error, or 2 if a file or an argument is wrong. With KEEPER, the
// library that keeps compiled programs, the folder "kept" in FOLDER gets this one as a launch would have kept it.
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "pjrt_c_api.h"

static const PJRT_Api* api;
static const char* folder;

static FILE* open_file(const char* name, const char* mode) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  FILE* file = fopen(path, mode);
  if (file) return file;
  fprintf(stderr, "%s cannot be opened\n", path);
  exit(2);
}

static void write_file(const char* name, const void* bytes, size_t size) {
  FILE* file = open_file(name, "wb");
  size_t written = fwrite(bytes, 1, size, file);
  if (fclose(file) || written != size) {
    fprintf(stderr, "%s/%s cannot be written\n", folder, name);
    exit(2);
  }
}

static char* read_file(const char* name, size_t* size) {
  FILE* file = open_file(name, "rb");
  fseek(file, 0, SEEK_END);
  *size = (size_t)ftell(file);
  rewind(file);
  char* bytes = malloc(*size + 1);
  if (!bytes || fread(bytes, 1, *size, file) != *size) exit(2);
  fclose(file);
  return bytes;
}

static void fail(const char* step, const char* words, size_t size) {
  FILE* file = open_file("error", "w");
  fprintf(file, "%s\n%.*s\n", step, (int)size, words);
  if (fclose(file)) exit(2);
  _exit(1);  // libtpu's own threads are left as they are
}

static void check(const char* step, PJRT_Error* error) {
  if (!error) return;
  PJRT_Error_Message_Args args = {.struct_size = PJRT_Error_Message_Args_STRUCT_SIZE, .error = error};
  api->PJRT_Error_Message(&args);
  fail(step, args.message, args.message_size);
}

static void load(const char* library) {
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  const char* why = handle ? "it has no GetPjrtApi" : dlerror();
  const PJRT_Api* (*get)(void) = (const PJRT_Api* (*)(void))(handle ? dlsym(handle, "GetPjrtApi") : NULL);
  if (!get) fail("load", why, strlen(why));
  api = get();
  PJRT_Plugin_Initialize_Args args = {.struct_size = PJRT_Plugin_Initialize_Args_STRUCT_SIZE};
  check("load", api->PJRT_Plugin_Initialize(&args));
}

static PJRT_TopologyDescription* describe(const char* name, const char* bounds) {
  int64_t chips[3];
  PJRT_NamedValue option = {.struct_size = PJRT_NamedValue_STRUCT_SIZE, .name = "chips_per_host_bounds",
                            .name_size = strlen("chips_per_host_bounds"), .type = PJRT_NamedValue_kInt64List,
                            .int64_array_value = chips, .value_size = 3};
  PJRT_TopologyDescription_Create_Args args = {.struct_size = PJRT_TopologyDescription_Create_Args_STRUCT_SIZE,
                                               .topology_name = name, .topology_name_size = strlen(name)};
  if (sscanf(bounds, "%ld,%ld,%ld", &chips[0], &chips[1], &chips[2]) == 3) {
    args.create_options = &option;
    args.num_options = 1;
  }
  check("topology", api->PJRT_TopologyDescription_Create(&args));
  return args.topology;
}

static void keep(const char* keeper, const PJRT_Compile_Args* args) {
  char kept[4096];
  snprintf(kept, sizeof kept, "%s/kept", folder);
  void* handle = dlopen(keeper, RTLD_NOW | RTLD_LOCAL);
  void* (*open)(const char*) = handle ? (void* (*)(const char*))dlsym(handle, "kept_open") : NULL;
  int (*put)(const void*, const void*, const char*, size_t, void*, void*) =
      handle ? (int (*)(const void*, const void*, const char*, size_t, void*, void*))dlsym(handle, "kept_write") : NULL;
  const char* why = open && put ? NULL : dlerror();  // a second call of dlerror returns NULL
  if (why) fail("keep", why, strlen(why));
  if (!open(kept) || !put(api, args->program, args->compile_options, args->compile_options_size, (void*)args->topology, args->executable))
    fprintf(stderr, "the compiled program is not kept\n");
}

static PJRT_Executable* compile(PJRT_TopologyDescription* topology, const char* keeper) {
  size_t size, options_size;
  char *code = read_file("module.hlo", &size), *options = read_file("options.pb", &options_size);
  PJRT_Program program = {.struct_size = PJRT_Program_STRUCT_SIZE, .code = code, .code_size = size, .format = "hlo",
                          .format_size = 3};
  PJRT_Compile_Args args = {.struct_size = PJRT_Compile_Args_STRUCT_SIZE, .topology = topology, .program = &program,
                            .compile_options = options, .compile_options_size = options_size};
  check("compile", api->PJRT_Compile(&args));
  if (keeper) keep(keeper, &args);
  return args.executable;
}

static void write_numbers(PJRT_Executable* executable) {
  FILE* file = open_file("numbers", "w");
  PJRT_Executable_GetCompiledMemoryStats_Args memory = {
      .struct_size = PJRT_Executable_GetCompiledMemoryStats_Args_STRUCT_SIZE, .executable = executable};
  check("memory statistics", api->PJRT_Executable_GetCompiledMemoryStats(&memory));
  fprintf(file, "argument_bytes %ld\noutput_bytes %ld\nalias_bytes %ld\ntemporary_bytes %ld\ncode_bytes %ld\n",
          (long)memory.argument_size_in_bytes, (long)memory.output_size_in_bytes, (long)memory.alias_size_in_bytes,
          (long)memory.temp_size_in_bytes, (long)memory.generated_code_size_in_bytes);
  PJRT_Executable_GetCostAnalysis_Args cost = {.struct_size = PJRT_Executable_GetCostAnalysis_Args_STRUCT_SIZE,
                                               .executable = executable};
  check("cost analysis", api->PJRT_Executable_GetCostAnalysis(&cost));
  for (size_t i = 0; i < cost.num_properties; i++) {
    const PJRT_NamedValue* one = &cost.properties[i];
    // Those with a place in braces are of single operands: thousands.
    if (one->type != PJRT_NamedValue_kFloat || memchr(one->name, '{', one->name_size)) continue;
    fprintf(file, "cost.%.*s %.9g\n", (int)one->name_size, one->name, one->float_value);
  }
  if (fclose(file)) exit(2);
}

static void write_program(PJRT_Executable* executable) {
  PJRT_Program program = {.struct_size = PJRT_Program_STRUCT_SIZE};
  PJRT_Executable_OptimizedProgram_Args args = {
      .struct_size = PJRT_Executable_OptimizedProgram_Args_STRUCT_SIZE, .executable = executable, .program = &program};
  check("optimized program", api->PJRT_Executable_OptimizedProgram(&args));  // says the size
  program.code = malloc(program.code_size);
  if (!program.code) exit(2);
  check("optimized program", api->PJRT_Executable_OptimizedProgram(&args));
  write_file("optimized", program.code, program.code_size);
  write_file("format", program.format, program.format_size);
}

int main(int count, char** arguments) {
  if (count != 5 && count != 6) {
    fprintf(stderr, "usage: compile LIBTPU TOPOLOGY BOUNDS FOLDER [KEEPER]\n");
    return 2;
  }
  folder = arguments[4];
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // end together with the caller, because then nobody waits for the answer
  load(arguments[1]);
  PJRT_Executable* executable = compile(describe(arguments[2], arguments[3]), count == 6 ? arguments[5] : NULL);
  write_program(executable);
  write_numbers(executable);
  fflush(NULL);
  _exit(0);
}
