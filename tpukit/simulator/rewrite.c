// From a program's collectives to calls of ours: rewrites an HLO module before it is compiled.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hlo.h"
#include "protobuf.h"
#include "simulator.h"

const char* const kind_names[KINDS] = {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"};
const char* const reduction_names[REDUCTIONS] = {"add", "multiply", "minimum", "maximum", "and", "or"};
// XLA:CPU would run these by itself, or refuse them, where the devices of other processes are not.
static const char* const unknown[] = {"collective-broadcast", "ragged-all-to-all", "send", "recv", "all-reduce-start",
                                      "all-gather-start", "collective-permute-start"};

static int find(Span text, const char* const* names, int count) {
  for (int i = 0; i < count; i++)
    if (equals(text, names[i])) return i;
  return -1;
}

// ---- reading a collective

static void add_group(Collective* collective, Span group) {
  if (collective->groups == MOST_DEVICES) return;
  int count = collective->start[collective->groups];
  Field field;
  while (next_field(&group, &field))
    if (field.number == 1) count = integers(&field, collective->member, count, MOST_DEVICES);
  collective->start[++collective->groups] = count;
}

static void add_pair(Collective* collective, Span pair) {
  if (collective->pairs == MOST_DEVICES) return;
  Field field;
  while (next_field(&pair, &field)) {
    if (field.number == 1) collective->source[collective->pairs] = (int)field.value;
    if (field.number == 2) collective->target[collective->pairs] = (int)field.value;
  }
  collective->pairs++;
}

// No groups, or one without members, means all devices.
static void group_everyone(Collective* collective) {
  collective->groups = 1;
  collective->start[1] = topology.world;
  for (int i = 0; i < topology.world; i++) collective->member[i] = i;
}

// Groups in short: so many of so many devices, in order unless they are transposed.
static PJRT_Error* read_iota(Collective* collective, Span iota) {
  Field field;
  int groups = 0, each = 0, is_transposed = 0, axes[MOST_DEVICES];
  while (next_field(&iota, &field)) {
    if (field.number == IOTA_GROUPS) groups = (int)field.value;
    if (field.number == IOTA_EACH) each = (int)field.value;
    int count = field.number == IOTA_TRANSPOSED ? integers(&field, axes, 0, MOST_DEVICES) : 0;
    for (int i = 0; i < count; i++) is_transposed |= axes[i] != i;
  }
  if (is_transposed || groups * each > MOST_DEVICES)
    return failure(PJRT_Error_Code_UNIMPLEMENTED, "the simulator does not support groups that are written as a transposed iota");
  collective->groups = groups;
  for (int i = 0; i < groups * each; i++) collective->member[i] = i;
  for (int g = 0; g <= groups; g++) collective->start[g] = g * each;
  return NULL;
}

static PJRT_Error* read_device_list(Collective* collective, Span list) {
  Field field;
  int had = collective->groups;
  while (next_field(&list, &field)) {
    if (field.number == DEVICE_LIST_IOTA && !had) {
      PJRT_Error* error = read_iota(collective, field.content);
      if (error) return error;
    }
    if (field.number == DEVICE_LIST_GROUPS && !had) add_group(collective, field.content);
  }
  return NULL;
}

// The opcode of the root of a computation: "add" for a sum. -1 if it is none that we know.
static int reduction_of(Span module, int wanted) {
  Field computation, field, detail;
  while (next_field(&module, &computation)) {
    if (computation.number != MODULE_COMPUTATION) continue;
    uint64_t id = 0, root = 0;
    for (Span rest = computation.content; next_field(&rest, &field);) {
      if (field.number == COMPUTATION_ID) id = field.value;
      if (field.number == COMPUTATION_ROOT) root = field.value;
    }
    if ((int)id != wanted) continue;
    for (Span rest = computation.content; next_field(&rest, &field);) {
      if (field.number != COMPUTATION_INSTRUCTION) continue;
      int reduction = -1, is_root = 0;
      for (Span inner = field.content; next_field(&inner, &detail);) {
        if (detail.number == INSTRUCTION_ID) is_root = detail.value == root;
        if (detail.number == OPCODE) reduction = find(detail.content, reduction_names, REDUCTIONS);
      }
      if (is_root) return reduction;
    }
  }
  return -1;
}

// Fills in a collective from its instruction. Its kind is KINDS if the instruction is none.
static PJRT_Error* read_collective(Span module, Span instruction, Collective* collective) {
  Field field;
  Span device_list = {0};
  int called = -1, count = 0, has_channel = 0, has_global_ids = 0;
  *collective = (Collective){.kind = KINDS, .reduction = -1, .axis = -1};
  while (next_field(&instruction, &field)) switch (field.number) {
      case OPCODE: {
        int kind = find(field.content, kind_names, KINDS);
        if (kind >= 0) collective->kind = kind;
        if (find(field.content, unknown, sizeof unknown / sizeof *unknown) >= 0)
          return failure(PJRT_Error_Code_UNIMPLEMENTED, "the simulator cannot run %.*s",
                         (int)(field.content.end - field.content.at), (const char*)field.content.at);
        break;
      }
      case DIMENSIONS: {
        int axes[MOST_DEVICES];
        if (!count && (count = integers(&field, axes, 0, MOST_DEVICES))) collective->axis = axes[0];
        break;
      }
      case CALLED_COMPUTATIONS: integers(&field, &called, 0, 1); break;
      case REPLICA_GROUPS: add_group(collective, field.content); break;
      case SOURCE_TARGET_PAIRS: add_pair(collective, field.content); break;
      case DEVICE_LIST: device_list = field.content; break;
      case CHANNEL: has_channel = field.value != 0; break;
      case GLOBAL_DEVICE_IDS: has_global_ids = field.value != 0; break;
    }
  if (collective->kind == KINDS) return NULL;
  PJRT_Error* error = read_device_list(collective, device_list);
  if (error) return error;
  // The group {0} of one replica in many partitions is all of them (HLO calls it cross_replica_and_partition).
  int is_alone = collective->groups == 1 && collective->start[1] == 1 && has_channel && !has_global_ids;
  if (!collective->groups || !collective->start[1] || is_alone) group_everyone(collective);
  if (called >= 0) collective->reduction = reduction_of(module, called);
  if (called >= 0 && collective->reduction < 0)
    return failure(PJRT_Error_Code_UNIMPLEMENTED, "the simulator does not support %s by anything but add, multiply, minimum, "
                   "maximum, and, or", kind_names[collective->kind]);
  return NULL;
}

// ---- writing the call

static int belongs_to_collectives(int number) {
  static const int fields[] = {OPCODE, DIMENSIONS, CHANNEL, CALLED_COMPUTATIONS, REPLICA_GROUPS, SOURCE_TARGET_PAIRS,
                               CONSTRAIN_LAYOUT, OPERAND_LAYOUTS, GLOBAL_DEVICE_IDS, DEVICE_LIST};
  for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
    if (fields[i] == number) return 1;
  return 0;
}

// Writes the instruction as a call of ours. `before` is the collective that must have run first: all of a program run one
// after the other, as on a TPU core, for every device must come to them in the same order.
static void write_call(Span instruction, const Collective* collective, uint64_t before, Bytes* to) {
  char config[2 * sizeof *collective + 32], *end = config + sprintf(config, "{collective = \"");
  Field field;
  while (next_field(&instruction, &field))
    if (!belongs_to_collectives(field.number)) put(to, field.whole.at, field.whole.end - field.whole.at);
  // The description itself, not its address: a compiled program may be kept in a file, and loaded by another process.
  for (size_t i = 0; i < sizeof *collective; i++) end += sprintf(end, "%02x", ((const uint8_t*)collective)[i]);
  end += sprintf(end, "\"}");
  put_content(to, OPCODE, "custom-call", strlen("custom-call"));
  put_content(to, CALL_TARGET, TARGET, strlen(TARGET));
  put_content(to, BACKEND_CONFIG, config, end - config);
  put_integer(to, CALL_API, CALL_API_TYPED_FFI);
  put_integer(to, HAS_SIDE_EFFECT, 1);
  if (before) put_integer(to, CONTROL_PREDECESSORS, before);
}

static uint64_t id_of(Span instruction) {
  Field field;
  while (next_field(&instruction, &field))
    if (field.number == INSTRUCTION_ID) return field.value;
  return 0;
}

// ---- a weight

static void put_shape(Bytes* to, int size) {
  Bytes shape = {0}, layout = {0};
  put_integer(&layout, LAYOUT_MINOR_TO_MAJOR, 0);
  put_integer(&shape, SHAPE_TYPE, F32);
  put_integer(&shape, SHAPE_DIMENSIONS, size);
  put_content(&shape, SHAPE_LAYOUT, layout.bytes, layout.size);
  put_content(to, SHAPE, shape.bytes, shape.size);
  free(layout.bytes);
  free(shape.bytes);
}

// Adds an instruction with f32[size] numbers as its result. An addition has `operand` twice; 0 means no operand.
static void put_instruction(Bytes* to, const char* opcode, uint64_t id, int size, uint64_t operand) {
  char name[64];
  Bytes instruction = {0};
  put_content(&instruction, NAME, name, snprintf(name, sizeof name, "simulator-weight.%llu", (unsigned long long)id));
  put_content(&instruction, OPCODE, opcode, strlen(opcode));
  put_shape(&instruction, size);
  put_integer(&instruction, INSTRUCTION_ID, id);
  if (operand) put_integer(&instruction, OPERANDS, operand);
  if (!strcmp(opcode, "add")) {
    put_integer(&instruction, OPERANDS, operand);
  } else {
    put_content(&instruction, CALL_TARGET, TARGET, strlen(TARGET));
    put_integer(&instruction, CALL_API, CALL_API_TYPED_FFI);
    put_integer(&instruction, HAS_SIDE_EFFECT, 1);
  }
  put_content(to, COMPUTATION_INSTRUCTION, instruction.bytes, instruction.size);
  free(instruction.bytes);
}

// XLA:CPU runs a program of fewer than 1000 operations inside the call that launches it, which here would wait for the
// other ranks; a TPU's launch returns at once, and torch_xla relies on it (an empty sync() of one device thread waits for
// launches of another's). So a program with collectives is made to weigh more: numbers that cannot be foreseen, from a
// call of ours that does nothing, are added once, and given to another that does nothing.
static void put_weight(Bytes* computation, uint64_t free_id) {
  enum { NUMBERS = 4096 };
  put_instruction(computation, "custom-call", free_id, NUMBERS, 0);
  put_instruction(computation, "add", free_id + 1, NUMBERS, free_id);
  put_instruction(computation, "custom-call", free_id + 2, 1, free_id + 1);
}

// ---- the module

// Finds the id of the entry computation, and an id that no instruction or computation has. The upper half of an
// instruction's id may be that of its computation; inside a computation, XLA uses the lower half alone.
static void read_ids(Span module, uint64_t* entry, uint64_t* free_id) {
  Field computation, field;
  *entry = *free_id = 0;
  while (next_field(&module, &computation)) {
    if (computation.number == MODULE_ENTRY_ID) *entry = computation.value;
    for (Span rest = computation.content; computation.number == MODULE_COMPUTATION && next_field(&rest, &field);) {
      uint64_t id = field.number == COMPUTATION_ID ? field.value : 0;
      if (field.number == COMPUTATION_INSTRUCTION) id = (uint32_t)id_of(field.content);
      if (id >= *free_id) *free_id = id + 1;
    }
  }
}

static uint64_t computation_id(Span computation) {
  Field field;
  while (next_field(&computation, &field))
    if (field.number == COMPUTATION_ID) return field.value;
  return 0;
}

static PJRT_Error* rewrite_computation(Span module, Span computation, Bytes* to, int* collectives) {
  Field field;
  uint64_t before = 0;
  while (next_field(&computation, &field)) {
    Collective collective = {.kind = KINDS};
    if (field.number == COMPUTATION_INSTRUCTION) {
      PJRT_Error* error = read_collective(module, field.content, &collective);
      if (error) return error;
    }
    if (collective.kind == KINDS) {
      put(to, field.whole.at, field.whole.end - field.whole.at);
      continue;
    }
    Bytes call = {0};
    write_call(field.content, &collective, before, &call);
    put_content(to, COMPUTATION_INSTRUCTION, call.bytes, call.size);
    free(call.bytes);
    before = id_of(field.content);
    ++*collectives;
  }
  return NULL;
}

PJRT_Error* rewrite(const uint8_t* code, size_t size, Bytes* rewritten, int* collectives) {
  Span module = {code, code + size}, rest = module;
  Field field;
  uint64_t entry, free_id;
  read_ids(module, &entry, &free_id);
  while (next_field(&rest, &field)) {
    if (field.number != MODULE_COMPUTATION) {
      put(rewritten, field.whole.at, field.whole.end - field.whole.at);
      continue;
    }
    Bytes computation = {0};
    PJRT_Error* error = rewrite_computation(module, field.content, &computation, collectives);
    if (*collectives && computation_id(field.content) == entry) put_weight(&computation, free_id);
    if (!error) put_content(rewritten, MODULE_COMPUTATION, computation.bytes, computation.size);
    free(computation.bytes);
    if (error) return error;
  }
  return NULL;
}
