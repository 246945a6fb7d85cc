// The collectives: the functions that XLA calls in place of each, on every device of the run.
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "simulator.h"

// ---- element types

typedef struct {
  int type;
  const char* name;
  size_t width;  // bytes
} Type;
static const Type types[] = {
    {XLA_FFI_DataType_PRED, "pred", 1}, {XLA_FFI_DataType_S8, "s8", 1},     {XLA_FFI_DataType_U8, "u8", 1},
    {XLA_FFI_DataType_S16, "s16", 2},   {XLA_FFI_DataType_U16, "u16", 2},   {XLA_FFI_DataType_F16, "f16", 2},
    {XLA_FFI_DataType_BF16, "bf16", 2}, {XLA_FFI_DataType_S32, "s32", 4},   {XLA_FFI_DataType_U32, "u32", 4},
    {XLA_FFI_DataType_F32, "f32", 4},   {XLA_FFI_DataType_S64, "s64", 8},   {XLA_FFI_DataType_U64, "u64", 8},
    {XLA_FFI_DataType_F64, "f64", 8},   {XLA_FFI_DataType_C64, "c64", 8},   {XLA_FFI_DataType_C128, "c128", 16},
};

static const Type* type_of(const XLA_FFI_Buffer* buffer) {
  for (size_t i = 0; i < sizeof types / sizeof *types; i++)
    if (types[i].type == (int)buffer->dtype) return &types[i];
  return NULL;
}

static size_t elements(const XLA_FFI_Buffer* buffer) {
  size_t count = 1;
  for (int64_t i = 0; i < buffer->rank; i++) count *= buffer->dims[i];
  return count;
}

static size_t size_of(const XLA_FFI_Buffer* buffer) { return elements(buffer) * type_of(buffer)->width; }

// ---- reductions: in the order of the ranks, so that all get the same bits; bf16 and f16 are rounded once, at the end

static float from_bf16(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

static uint16_t to_bf16(float value) {
  uint32_t wide;
  memcpy(&wide, &value, sizeof wide);
  if (value != value) return (uint16_t)(wide >> 16 | 64);
  return (uint16_t)((wide + 0x7fff + (wide >> 16 & 1)) >> 16);  // to nearest, ties to even
}

#define SAME(value) (value)
#define FOLD(T, Wide, WIDEN, NARROW, COMBINE)                                  \
  for (size_t i = 0; i < count; i++) {                                         \
    Wide a = WIDEN(((const T*)from[0])[i]);                                    \
    for (int rank = 1; rank < ranks; rank++) {                                 \
      Wide b = WIDEN(((const T*)from[rank])[i]);                               \
      a = (Wide)(COMBINE);                                                     \
    }                                                                          \
    ((T*)to)[i] = (T)NARROW(a);                                                \
  }                                                                            \
  return 1
// A NaN is the minimum and the maximum of all, as in XLA.
#define FOLD_NUMBERS(T, Wide, WIDEN, NARROW)                                   \
  switch (reduction) {                                                         \
    case ADD: FOLD(T, Wide, WIDEN, NARROW, a + b);                             \
    case MULTIPLY: FOLD(T, Wide, WIDEN, NARROW, a * b);                        \
    case MINIMUM: FOLD(T, Wide, WIDEN, NARROW, a != a || a < b ? a : b);       \
    case MAXIMUM: FOLD(T, Wide, WIDEN, NARROW, a != a || a > b ? a : b);       \
    default: return 0;                                                         \
  }
#define FOLD_INTEGERS(T)                                                       \
  switch (reduction) {                                                         \
    case AND: FOLD(T, T, SAME, SAME, a & b);                                   \
    case OR: FOLD(T, T, SAME, SAME, a | b);                                    \
    default: FOLD_NUMBERS(T, T, SAME, SAME)                                    \
  }

// Returns 0 where XLA has such a reduction and we do not.
static int reduce(void* to, char* const* from, int ranks, size_t count, XLA_FFI_DataType type, int reduction) {
  switch (type) {
    case XLA_FFI_DataType_F32: FOLD_NUMBERS(float, float, SAME, SAME)
    case XLA_FFI_DataType_F64: FOLD_NUMBERS(double, double, SAME, SAME)
    case XLA_FFI_DataType_BF16: FOLD_NUMBERS(uint16_t, float, from_bf16, to_bf16)
#ifdef __FLT16_MAX__  // GCC from 12 on
    case XLA_FFI_DataType_F16: FOLD_NUMBERS(_Float16, float, SAME, SAME)
#endif
    // A minimum needs the sign, so these types keep it. A sum that overflows wraps, as in XLA.
    case XLA_FFI_DataType_S8: FOLD_INTEGERS(int8_t)
    case XLA_FFI_DataType_S16: FOLD_INTEGERS(int16_t)
    case XLA_FFI_DataType_S32: FOLD_INTEGERS(int32_t)
    case XLA_FFI_DataType_S64: FOLD_INTEGERS(int64_t)
    case XLA_FFI_DataType_U16: FOLD_INTEGERS(uint16_t)
    case XLA_FFI_DataType_U32: FOLD_INTEGERS(uint32_t)
    case XLA_FFI_DataType_U64: FOLD_INTEGERS(uint64_t)
    case XLA_FFI_DataType_U8: FOLD_INTEGERS(uint8_t)
    case XLA_FFI_DataType_PRED:
      if (reduction == ADD) reduction = OR;
      if (reduction == MULTIPLY) reduction = AND;
      FOLD_INTEGERS(uint8_t)
    case XLA_FFI_DataType_C64:  // a sum of complex numbers is one of their parts; other reductions are not
      return reduction == ADD && reduce(to, from, ranks, 2 * count, XLA_FFI_DataType_F32, ADD);
    case XLA_FFI_DataType_C128:
      return reduction == ADD && reduce(to, from, ranks, 2 * count, XLA_FFI_DataType_F64, ADD);
    default: return 0;
  }
}

// ---- the description of a call: for the other ranks, and for errors

static void add_text(char* text, size_t room, const char* format, ...) {
  size_t size = strlen(text);
  va_list values;
  va_start(values, format);
  vsnprintf(text + size, room - size, format, values);
  va_end(values);
}

static void describe(const Collective* c, const XLA_FFI_Args* args, char* text, size_t room) {
  *text = 0;
  add_text(text, room, "%s", kind_names[c->kind]);
  if (c->reduction >= 0) add_text(text, room, "(%s)", reduction_names[c->reduction]);
  for (int64_t k = 0; k < args->size && k < 3; k++) {
    const XLA_FFI_Buffer* operand = args->args[k];
    add_text(text, room, "%s%s[", k ? ", " : " of ", type_of(operand) ? type_of(operand)->name : "?");
    for (int64_t i = 0; i < operand->rank; i++) add_text(text, room, "%s%ld", i ? "," : "", (long)operand->dims[i]);
    add_text(text, room, "]");
  }
  if (args->size > 3) add_text(text, room, " and %ld more", (long)args->size - 3);
}

// FNV-1a, 64 bits.
static uint64_t mix(uint64_t hash, const void* bytes, size_t size) {
  for (size_t i = 0; i < size; i++) hash = (hash ^ ((const uint8_t*)bytes)[i]) * 0x100000001b3;
  return hash;
}

// What must be the same on all ranks. Not the pairs of a permute: torch.distributed's send and recv name only their own
// pair on each rank, and pytorch/xla's tests of them pass on TPUs.
static uint64_t fingerprint(const Collective* c, const XLA_FFI_Args* args) {
  uint64_t hash = mix(0xcbf29ce484222325, c, offsetof(Collective, pairs));
  for (int64_t k = 0; k < args->size; k++) {
    const XLA_FFI_Buffer* operand = args->args[k];
    hash = mix(hash, &operand->dtype, sizeof operand->dtype);
    hash = mix(hash, operand->dims, operand->rank * sizeof *operand->dims);
    hash = mix(hash, "", 1);
  }
  return hash;
}

// ---- one call

typedef struct {
  const Collective* collective;
  int device;
  const int* group;  // the devices it runs with, itself among them
  int ranks, mine;   // how many, and which of them it is
} Call;

static int find_group(const Collective* c, int device, Call* call) {
  for (int g = 0; g < c->groups; g++)
    for (int i = c->start[g]; i < c->start[g + 1]; i++)
      if (c->member[i] == device) {
        call->group = c->member + c->start[g];
        call->ranks = c->start[g + 1] - c->start[g];
        call->mine = i - c->start[g];
        return 1;
      }
  return 0;
}

static const char* lay_down(const XLA_FFI_Args* args, int device) {
  size_t offset = 0;
  for (int64_t k = 0; k < args->size; k++) {
    const XLA_FFI_Buffer* operand = args->args[k];
    if (!type_of(operand)) return fail_run("the simulator does not support elements of XLA's type %d", (int)operand->dtype);
    size_t size = size_of(operand);
    if (offset + size > slot_size())
      return fail_run("a collective brings more than the %zu MiB that the simulator carries", slot_size() >> 20);
    memcpy(slot_of(device) + offset, operand->data, size);
    offset += size;
  }
  return NULL;
}

// An array as a gather, a scatter or an all-to-all along one axis sees it: `outer` rows of `row` bytes each.
typedef struct {
  size_t outer, row;
} Rows;

static Rows rows_along(const XLA_FFI_Buffer* buffer, int axis) {
  Rows rows = {1, type_of(buffer)->width};
  for (int64_t i = 0; i < buffer->rank; i++) *(i < axis ? &rows.outer : &rows.row) *= buffer->dims[i];
  return rows;
}

static const char* all_reduce(const Call* call, char* const* from, const XLA_FFI_Buffer* operand, void* to) {
  const Collective* c = call->collective;
  if (reduce(to, from, call->ranks, elements(operand), operand->dtype, c->reduction)) return NULL;
  return fail_run("the simulator does not support %s of %s", reduction_names[c->reduction], type_of(operand)->name);
}

static const char* reduce_scatter(const Call* call, char* const* from, const XLA_FFI_Buffer* operand, char* to) {
  Rows rows = rows_along(operand, call->collective->axis);
  size_t part = rows.row / call->ranks;
  char* whole = malloc(rows.outer * rows.row + 1);
  const char* failed = all_reduce(call, from, operand, whole);
  for (size_t i = 0; !failed && i < rows.outer; i++)
    memcpy(to + i * part, whole + i * rows.row + call->mine * part, part);
  free(whole);
  return failed;
}

static void all_gather(const Call* call, char* const* from, const XLA_FFI_Buffer* operand, char* to) {
  Rows rows = rows_along(operand, call->collective->axis);
  for (int rank = 0; rank < call->ranks; rank++)
    for (size_t i = 0; i < rows.outer; i++)
      memcpy(to + (i * call->ranks + rank) * rows.row, from[rank] + i * rows.row, rows.row);
}

static void all_to_all(const Call* call, char* const* from, const XLA_FFI_Buffer* operand, char* to) {
  Rows rows = rows_along(operand, call->collective->axis);
  size_t part = rows.row / call->ranks;
  for (int rank = 0; rank < call->ranks; rank++)
    for (size_t i = 0; i < rows.outer; i++)
      memcpy(to + i * rows.row + rank * part, from[rank] + i * rows.row + call->mine * part, part);
}

// The form with one operand for each rank: result k is the operand for us of rank k. All are of one size.
static void all_to_all_of_tuple(const Call* call, const XLA_FFI_Rets* results, size_t size) {
  for (int64_t k = 0; k < results->size; k++) {
    XLA_FFI_Buffer* result = results->rets[k];
    memcpy(result->data, slot_of(call->group[k]) + call->mine * size, size);
  }
}

static void permute(const Call* call, size_t offset, size_t size, char* to) {
  const Collective* c = call->collective;
  memset(to, 0, size);  // a device without a sender gets zeros
  for (int i = 0; i < c->pairs; i++)
    if (c->target[i] == call->device) memcpy(to, slot_of(c->source[i]) + offset, size);
}

static const char* pick_up(const Call* call, const XLA_FFI_Args* args, const XLA_FFI_Rets* results) {
  const Collective* c = call->collective;
  const char* failed = NULL;
  if (c->kind == ALL_TO_ALL && c->axis < 0) {
    all_to_all_of_tuple(call, results, size_of(args->args[0]));
    return NULL;
  }
  size_t offset = 0;
  for (int64_t k = 0; k < args->size && !failed; k++) {
    const XLA_FFI_Buffer* operand = args->args[k];
    char *to = ((XLA_FFI_Buffer*)results->rets[k])->data, *from[MOST_DEVICES];
    for (int rank = 0; rank < call->ranks; rank++) from[rank] = slot_of(call->group[rank]) + offset;
    switch (c->kind) {
      case ALL_REDUCE: failed = all_reduce(call, from, operand, to); break;
      case REDUCE_SCATTER: failed = reduce_scatter(call, from, operand, to); break;
      case ALL_GATHER: all_gather(call, from, operand, to); break;
      case ALL_TO_ALL: all_to_all(call, from, operand, to); break;
      case PERMUTE: permute(call, offset, size_of(operand), to); break;
      case KINDS: break;
    }
    offset += size_of(operand);
  }
  return failed;
}

static const char* run(XLA_FFI_CallFrame* frame, const Collective* collective, int device) {
  Call call = {.collective = collective, .device = device};
  char what[232];
  describe(collective, &frame->args, what, sizeof what);
  if (collective->kind != PERMUTE && !find_group(collective, device, &call))
    return fail_run("rank %d is in no group of %s", device, what);
  const char* failed = begin_collective(device, what);
  if (!failed) failed = lay_down(&frame->args, device);
  if (!failed) failed = bring(device, what, fingerprint(collective, &frame->args));
  if (!failed) failed = pick_up(&call, &frame->args, &frame->rets);
  if (failed) return failed;
  end_collective(device);
  say("rank %d: %s", device, what);
  return NULL;
}

// Prints the failure on standard error too, once per process: torch_xla raises it where the result is read, but with two
// device threads it may abort in the other one first ("PjRt buffer is null").
static void print_once(const char* failed) {
  static int printed;
  if (__atomic_exchange_n(&printed, 1, __ATOMIC_ACQ_REL)) return;
  fprintf(stderr, "[simulator] %s\n", failed);
  fflush(stderr);
}

// Reads what rewrite.c wrote into the call; returns 0 if it is not that.
static int read_description(const XLA_FFI_ByteSpan* text, Collective* collective) {
  if (text->len != 2 * sizeof *collective) return 0;
  for (size_t i = 0; i < sizeof *collective; i++) {
    char byte[3] = {text->ptr[2 * i], text->ptr[2 * i + 1], 0};
    ((uint8_t*)collective)[i] = (uint8_t)strtol(byte, NULL, 16);
  }
  return 1;
}

// XLA asks once which version of its interface we know, and then calls for every stage of a program.
XLA_FFI_Error* run_collective(XLA_FFI_CallFrame* frame) {
  XLA_FFI_Extension_Base* extension = frame->extension_start;
  if (extension && extension->type == XLA_FFI_Extension_Metadata) {
    XLA_FFI_Metadata* metadata = ((XLA_FFI_Metadata_Extension*)extension)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    return NULL;
  }
  if (frame->stage != XLA_FFI_ExecutionStage_EXECUTE || !frame->attrs.size) return NULL;  // none: a weight
  Collective collective;
  XLA_FFI_DeviceOrdinal_Get_Args ordinal = {sizeof ordinal, NULL, frame->ctx, 0};
  XLA_FFI_Error* error = frame->api->XLA_FFI_DeviceOrdinal_Get(&ordinal);
  if (error) return error;
  const char* failed = "the simulator found a collective that another version of it has written";
  if (read_description(frame->attrs.attrs[0], &collective)) failed = run(frame, &collective, ordinal.device_ordinal);
  if (!failed) return NULL;
  print_once(failed);
  XLA_FFI_Error_Create_Args args = {sizeof args, NULL, failed, XLA_FFI_Error_Code_ABORTED};
  return frame->api->XLA_FFI_Error_Create(&args);
}
