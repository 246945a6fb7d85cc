// A simulated libtpu: the declarations that its files share. plugin.c describes it.
#ifndef SIMULATOR_H_
#define SIMULATOR_H_

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "pjrt_c_api.h"
#include "xla_ffi.h"

enum { MOST_DEVICES = 64 };  // of a run; the largest machine that can be simulated

// ---- plugin.c: the CPU plugin behind, and errors of our own
extern const PJRT_Api* plugin;
PJRT_Error* failure(PJRT_Error_Code code, const char* format, ...) __attribute__((format(printf, 2, 3)));
void say(const char* format, ...) __attribute__((format(printf, 1, 2)));  // to standard error, if SIMULATOR_LOG=1

// ---- topology.c: which devices there are, and which are this process's
typedef struct {
  int processes;  // of the run
  int process;    // this one's number among them
  int cores;      // devices each process has
  int world;      // devices of the run
  int place[MOST_DEVICES];  // place[p]: process p has the devices from place[p] * cores on
} Topology;
extern Topology topology;
PJRT_Error* read_topology(void);
int first_device(void);
int process_of(int device);
PJRT_Error* own_devices(PJRT_LoadedExecutable_AddressableDevices_Args* args);  // of a program
void answer_for_topology(PJRT_Api* api);

// ---- exchange.c: where the devices of all processes meet
PJRT_Error* take_chips(void);  // returns when every process of the run has come
void leave(void);
char* slot_of(int device);  // holds the operands of a device in a collective
size_t slot_size(void);
// Each returns NULL or the text of the failure, the same for every device that waits.
const char* begin_collective(int device, const char* what);
const char* bring(int device, const char* what, uint64_t fingerprint);
void end_collective(int device);
const char* fail_run(const char* format, ...) __attribute__((format(printf, 1, 2)));

// ---- rewrite.c: from a program's collectives to calls of ours
typedef enum { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, PERMUTE, KINDS } Kind;
typedef enum { ADD, MULTIPLY, MINIMUM, MAXIMUM, AND, OR, REDUCTIONS } Reduction;
extern const char* const kind_names[KINDS];
extern const char* const reduction_names[REDUCTIONS];
typedef struct {
  Kind kind;
  int reduction;                             // a Reduction, or -1
  int axis;                                  // or -1
  int groups, start[MOST_DEVICES + 1];       // group g is member[start[g]] to member[start[g + 1] - 1]
  int member[MOST_DEVICES];
  int pairs, source[MOST_DEVICES], target[MOST_DEVICES];
} Collective;
typedef struct {
  uint8_t* bytes;
  size_t size, room;
} Bytes;
PJRT_Error* rewrite(const uint8_t* module, size_t size, Bytes* rewritten, int* collectives);

// ---- stablehlo.c: the differences of TorchTPU from torch_xla
PJRT_Error* compile_stablehlo(PJRT_Client_Compile_Args* args, int* collectives);
PJRT_Device* device_for(const PJRT_LoadedExecutable_Execute_Args* args);  // to launch on; NULL: the program knows
void answer_for_stablehlo(PJRT_Api* api);

// ---- collectives.c: the calls themselves
#define TARGET "tpukit_simulator_collective"
XLA_FFI_Error* run_collective(XLA_FFI_CallFrame* frame);

// ---- record.c: programs written down instead of run
typedef struct {
  int number;  // of the program, in the order in which they came
  size_t outputs;
  PJRT_Client* client;  // of a program that another stands in for
} Recorded;
int is_recording(void);
void record_program(int number, const char* code, size_t code_size, const char* options, size_t options_size);
// Writes a program that takes and returns the same and does nothing, if this one is large; returns 0 if it is not.
int replacement_for(const char* code, size_t size, Bytes* to);
void record_run(const Recorded* program, const PJRT_LoadedExecutable_Execute_Args* args);

// ---- buffers.c: the contents of the device meanwhile
void note_buffer(PJRT_Buffer* buffer, int is_from_host);
void forget_buffer(const PJRT_Buffer* buffer);
// Writes the bytes that are no arguments, and which arguments come from the host.
void write_memory(const PJRT_LoadedExecutable_Execute_Args* args, FILE* to);

// ---- placeholders.c: large arrays without memory, while programs are recorded
// Each returns 0 where the plugin is to do the work: the arrays are small.
int hold_place(PJRT_Client_BufferFromHostBuffer_Args* args);
int hold_outputs(PJRT_LoadedExecutable_Execute_Args* args, PJRT_Client* client, PJRT_Error** error);

// ---- programs.c: compiling and running
void answer_for_programs(PJRT_Api* api);
void finish_freeing(void);

#endif
