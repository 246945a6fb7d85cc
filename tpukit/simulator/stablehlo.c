// Programs of TorchTPU, which differ from torch_xla's: StableHLO of one partition for each process of the run, with
// libtpu's own compile options, launched without a device, and asked where its results will be.
#include <stdlib.h>
#include <string.h>

#include "hlo.h"
#include "protobuf.h"
#include "simulator.h"

// Numbers of fields in CompileOptionsProto and its executable_build_options, and in HloModuleProtoWithConfig.
enum { BUILD_OPTIONS = 3, OPTION_OVERRIDES = 7, DEBUG_OPTIONS = 3, RUN_BACKEND_ONLY = 11, CONFIGURED_MODULE = 1 };

// Writes the compile options without two groups. The plugin refuses those for libtpu's compiler, such as xla_tpu_autofdo.
// The debug options are of a newer XLA, and the plugin would print a line about them per program; it reads XLA_FLAGS
// itself. With `is_optimized` the plugin skips the passes that have already run.
static void put_options(Bytes* to, const PJRT_Client_Compile_Args* args, int is_optimized) {
  Span options = {(const uint8_t*)args->compile_options,
                  (const uint8_t*)args->compile_options + args->compile_options_size};
  Field field;
  while (next_field(&options, &field)) {
    if (field.number == OPTION_OVERRIDES) continue;
    if (field.number != BUILD_OPTIONS) {
      put(to, field.whole.at, field.whole.end - field.whole.at);
      continue;
    }
    Bytes build = {0};
    Field option;
    for (Span rest = field.content; next_field(&rest, &option);)
      if (option.number != DEBUG_OPTIONS) put(&build, option.whole.at, option.whole.end - option.whole.at);
    if (is_optimized) put_integer(&build, RUN_BACKEND_ONLY, 1);
    put_content(to, BUILD_OPTIONS, build.bytes, build.size);
    free(build.bytes);
  }
}

static PJRT_Error* compile_known(PJRT_Client_Compile_Args* args, const PJRT_Program* program, int is_optimized) {
  PJRT_Client_Compile_Args known = *args;
  Bytes options = {0};
  put_options(&options, args, is_optimized);
  known.program = program;
  known.compile_options = (const char*)options.bytes;
  known.compile_options_size = options.size;
  PJRT_Error* error = plugin->PJRT_Client_Compile(&known);
  args->executable = known.executable;
  free(options.bytes);
  return error;
}

// Reads the HLO module that the plugin has made of a program: partitioned, optimized, and here without its schedule,
// in which our calls would be missing.
static PJRT_Error* read_optimized(PJRT_LoadedExecutable* loaded, Bytes* module) {
  PJRT_LoadedExecutable_GetExecutable_Args get = {
      PJRT_LoadedExecutable_GetExecutable_Args_STRUCT_SIZE, NULL, loaded, NULL};
  PJRT_Error* error = plugin->PJRT_LoadedExecutable_GetExecutable(&get);
  if (error) return error;
  PJRT_Program made = {.struct_size = PJRT_Program_STRUCT_SIZE};
  PJRT_Executable_OptimizedProgram_Args ask = {
      PJRT_Executable_OptimizedProgram_Args_STRUCT_SIZE, NULL, get.executable, &made};
  error = plugin->PJRT_Executable_OptimizedProgram(&ask);  // its size; then, with room for it, the program
  if (!error) made.code = malloc(made.code_size);
  if (!error) error = plugin->PJRT_Executable_OptimizedProgram(&ask);
  Span configured = {(const uint8_t*)made.code, (const uint8_t*)made.code + made.code_size};
  Field field, part;
  while (!error && next_field(&configured, &field))
    for (Span rest = field.content; field.number == CONFIGURED_MODULE && next_field(&rest, &part);)
      if (part.number != MODULE_SCHEDULE) put(module, part.whole.at, part.whole.end - part.whole.at);
  free(made.code);
  PJRT_Executable_Destroy_Args destroy = {PJRT_Executable_Destroy_Args_STRUCT_SIZE, NULL, get.executable};
  plugin->PJRT_Executable_Destroy(&destroy);
  return error;
}

// Only the plugin can partition StableHLO. So the plugin compiles the program once. The result is HLO, whose collectives
// become calls of ours before the HLO is compiled again.
PJRT_Error* compile_stablehlo(PJRT_Client_Compile_Args* args, int* collectives) {
  PJRT_Error* error = compile_known(args, args->program, 0);
  if (error || topology.processes == 1) return error;
  PJRT_LoadedExecutable_Destroy_Args destroy = {PJRT_LoadedExecutable_Destroy_Args_STRUCT_SIZE, NULL, args->executable};
  Bytes module = {0}, code = {0};
  error = read_optimized(args->executable, &module);
  if (!error) error = rewrite(module.bytes, module.size, &code, collectives);
  if (error || *collectives) plugin->PJRT_LoadedExecutable_Destroy(&destroy);
  if (!error && *collectives) {
    PJRT_Program mine = {PJRT_Program_STRUCT_SIZE, NULL, (char*)code.bytes, code.size, "hlo", strlen("hlo")};
    error = compile_known(args, &mine, 1);
  }
  free(module.bytes);
  free(code.bytes);
  return error;
}

// A program of TorchTPU is one for the devices of all processes; it runs on this process's own.
PJRT_Device* device_for(const PJRT_LoadedExecutable_Execute_Args* args) {
  PJRT_LoadedExecutable_AddressableDevices_Args ask = {
      PJRT_LoadedExecutable_AddressableDevices_Args_STRUCT_SIZE, NULL, args->executable, NULL, 0};
  if (args->execute_device || topology.processes == 1 || args->num_devices != 1) return args->execute_device;
  return own_devices(&ask) || !ask.num_addressable_devices ? NULL : ask.addressable_devices[0];
}

// torch.compile asks in which kind of memory each result will be; the plugin's executables do not say.
static PJRT_Error* output_memory_kinds(PJRT_Executable_OutputMemoryKinds_Args* args) {
  enum { MOST_OUTPUTS = 1 << 16 };
  static const char* kinds[MOST_OUTPUTS];
  static size_t sizes[MOST_OUTPUTS];
  PJRT_Executable_NumOutputs_Args count = {PJRT_Executable_NumOutputs_Args_STRUCT_SIZE, NULL, args->executable, 0};
  PJRT_Error* error = plugin->PJRT_Executable_NumOutputs(&count);
  if (error) return error;
  if (count.num_outputs > MOST_OUTPUTS)
    return failure(PJRT_Error_Code_UNIMPLEMENTED, "the simulator does not support programs with more than %d results", MOST_OUTPUTS);
  for (size_t i = 0; i < count.num_outputs; i++) {
    kinds[i] = "device";
    sizes[i] = strlen(kinds[i]);
  }
  args->num_outputs = count.num_outputs;
  args->memory_kinds = kinds;
  args->memory_kind_sizes = sizes;
  return NULL;
}

void answer_for_stablehlo(PJRT_Api* api) { api->PJRT_Executable_OutputMemoryKinds = output_memory_kinds; }
