// Recording: which programs a run compiles and runs, without the work of running them.
//
// With SIMULATOR_RECORD=folder the process simulates one core of a machine. The other cores do not exist, and are
// assumed to do the same (exchange.c). Every program is written to the folder as it came; a large one is then replaced by one
// that takes the same arguments and returns zeros, which costs nothing. So the values that come back from the device mean nothing.
// The file "log" in the folder has a line for each program that is compiled, "compile N", or run: "run N B 11:4,10 ...",
// where B are the bytes on the device that are none of its arguments, and the rest type (PJRT_Buffer_Type) and shape of
// those arguments that came from the host and that no program has taken before: a batch, above all.
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "hlo.h"
#include "protobuf.h"
#include "simulator.h"

enum { MANY_INSTRUCTIONS = 1000, MOST_NUMBERS = 1 << 24, MOST_LOOKED_AT = 64 };

static const char* folder(void) {
  const char* folder = getenv("SIMULATOR_RECORD");
  return folder && *folder ? folder : NULL;
}

int is_recording(void) { return folder() != NULL; }

static void write_file(const char* path, int flags, const void* bytes, size_t size) {
  int file = open(path, O_WRONLY | O_CREAT | O_CLOEXEC | flags, 0600);
  while (file >= 0 && size) {
    ssize_t written = write(file, bytes, size);
    if (written <= 0) break;
    bytes = (const char*)bytes + written;
    size -= (size_t)written;
  }
  if (file < 0 || size) {
    fprintf(stderr, "[simulator] %s cannot be written\n", path);
    _exit(1);  // half a recording would be taken for a whole one
  }
  close(file);
}

static void note(const char* line, size_t size) {
  char path[4096];
  snprintf(path, sizeof path, "%s/log", folder());
  write_file(path, O_APPEND, line, size);
}

void record_program(int number, const char* code, size_t code_size, const char* options, size_t options_size) {
  char path[4096], line[64];
  snprintf(path, sizeof path, "%s/%d.hlo", folder(), number);
  write_file(path, O_TRUNC, code, code_size);
  snprintf(path, sizeof path, "%s/%d.options", folder(), number);
  write_file(path, O_TRUNC, options, options_size);
  note(line, (size_t)snprintf(line, sizeof line, "compile %d\n", number));
}

void record_run(const Recorded* program, const PJRT_LoadedExecutable_Execute_Args* args) {
  char* line = NULL;
  size_t size = 0;
  FILE* text = open_memstream(&line, &size);
  if (!text) return;
  fprintf(text, "run %d", program->number);
  write_memory(args, text);
  fputc('\n', text);
  fclose(text);
  note(line, size);
  free(line);
}

// ---- a program that only looks like another

typedef struct {
  Span module, entry, root, root_shape;
  uint64_t free_id;
  Span* by_number;  // the instructions of the entry
} Source;

static uint64_t integer_of(Span message, int number) {
  Field field;
  while (next_field(&message, &field))
    if (field.number == number) return field.value;
  return 0;
}

static Span content_of(Span message, int number) {
  Field field;
  while (next_field(&message, &field))
    if (field.number == number) return field.content;
  return (Span){0};
}

static int count_of(Span message, int number) {
  Field field;
  int count = 0;
  while (next_field(&message, &field)) count += field.number == number;
  return count;
}

static void read_source(Source* source) {
  uint64_t entry = integer_of(source->module, MODULE_ENTRY_ID), root = 0;
  Field field, part;
  for (Span rest = source->module; next_field(&rest, &field);) {
    if (field.number != MODULE_COMPUTATION) continue;
    uint64_t id = integer_of(field.content, COMPUTATION_ID);
    if (id == entry) source->entry = field.content;
    if (id >= source->free_id) source->free_id = id + 1;
    for (Span inner = field.content; next_field(&inner, &part);) {
      if (part.number != COMPUTATION_INSTRUCTION) continue;
      uint64_t number = integer_of(part.content, INSTRUCTION_ID);
      if (number >= source->free_id) source->free_id = number + 1;
    }
  }
  root = integer_of(source->entry, COMPUTATION_ROOT);
  if (source->free_id < MOST_NUMBERS) source->by_number = calloc(source->free_id, sizeof *source->by_number);
  for (Span rest = source->entry; next_field(&rest, &field);) {
    if (field.number != COMPUTATION_INSTRUCTION) continue;
    uint64_t number = integer_of(field.content, INSTRUCTION_ID);
    if (source->by_number) source->by_number[number] = field.content;
    if (number == root) source->root = field.content;
  }
  source->root_shape = content_of(source->root, SHAPE);
}

static int operands_of(Span instruction, int* numbers, int most) {
  Field field;
  int count = 0;
  while (next_field(&instruction, &field))
    if (field.number == OPERANDS) count = integers(&field, numbers, count, most);
  return count;
}

static int has_dimensions_of(Span shape, Span other) {
  int sizes[2][16], counts[2] = {0, 0};
  Field field;
  for (int i = 0; i < 2; i++)
    for (Span rest = i ? other : shape; next_field(&rest, &field);)
      if (field.number == SHAPE_DIMENSIONS) counts[i] = integers(&field, sizes[i], counts[i], 16);
  return counts[0] == counts[1] && !memcmp(sizes[0], sizes[1], sizeof **sizes * (size_t)counts[0]);
}

// The sharding of an output over the chips of one core: that of the nearest instruction with a sharding and the same
// shape, among those that the output is computed from. So a new weight is sharded as the old one. Without a sharding the
// output would be whole on every chip, and so would all that is computed from it.
static Span sharding_of(const Source* source, int number, Span shape) {
  int queue[MOST_LOOKED_AT] = {number}, count = 1;
  for (int i = 0; i < count && source->by_number; i++) {
    if ((uint64_t)queue[i] >= source->free_id) continue;
    Span instruction = source->by_number[queue[i]], found = content_of(instruction, SHARDING);
    if (found.at && has_dimensions_of(content_of(instruction, SHAPE), shape)) return found;
    count += operands_of(instruction, queue + count, MOST_LOOKED_AT - count);
  }
  return (Span){0};
}

static void put_shape_of(Bytes* to, uint64_t type, Span dimensions_of, Span layout) {
  Bytes shape = {0};
  Field field;
  put_integer(&shape, SHAPE_TYPE, type);
  while (next_field(&dimensions_of, &field))
    if (field.number == SHAPE_DIMENSIONS || field.number == SHAPE_DYNAMIC)
      put(&shape, field.whole.at, (size_t)(field.whole.end - field.whole.at));
  put_content(&shape, SHAPE_LAYOUT, layout.at, (size_t)(layout.end - layout.at));
  put_content(to, SHAPE, shape.bytes, shape.size);
  free(shape.bytes);
}

// Begins an instruction: its name, opcode and number.
static Bytes begin(const char* opcode, uint64_t id) {
  char name[64];
  Bytes instruction = {0};
  put_content(&instruction, NAME, name, (size_t)snprintf(name, sizeof name, "recorded.%llu", (unsigned long long)id));
  put_content(&instruction, OPCODE, opcode, strlen(opcode));
  put_integer(&instruction, INSTRUCTION_ID, id);
  return instruction;
}

static void finish(Bytes* instruction, Bytes* to) {
  put_content(to, COMPUTATION_INSTRUCTION, instruction->bytes, instruction->size);
  free(instruction->bytes);
}

static uint64_t put_false(Bytes* to, uint64_t id) {
  static const uint8_t zero[] = {0};
  Bytes instruction = begin("constant", id), literal = {0};
  put_shape_of(&instruction, PRED, (Span){0}, (Span){0});
  put_shape_of(&literal, PRED, (Span){0}, (Span){0});  // field 3 of an instruction, and 1 of a literal:
  literal.bytes[0] = LITERAL_SHAPE << 3 | 2;
  put_content(&literal, LITERAL_PREDS, zero, sizeof zero);
  put_content(&instruction, LITERAL, literal.bytes, literal.size);
  free(literal.bytes);
  finish(&instruction, to);
  return id;
}

// Adds an array of zeros of this shape; returns its number. It uses the ids `id` and `id + 1`. Zeros and not ones, because
// cores tell each other flags as numbers, such as "the time is up", and 0 mostly means no.
static uint64_t put_zeros(Bytes* to, Span shape, Span sharding, uint64_t id, uint64_t is_false) {
  uint64_t type = integer_of(shape, SHAPE_TYPE);
  Bytes zero = begin("convert", id), array = begin("broadcast", id + 1);
  put_shape_of(&zero, type, (Span){0}, (Span){0});
  put_integer(&zero, OPERANDS, is_false);
  finish(&zero, to);
  put_shape_of(&array, type, shape, content_of(shape, SHAPE_LAYOUT));
  put_integer(&array, OPERANDS, id);
  if (sharding.at) put_content(&array, SHARDING, sharding.at, (size_t)(sharding.end - sharding.at));
  finish(&array, to);
  return id + 1;
}

static void put_entry(const Source* source, Bytes* module) {
  Bytes entry = {0}, root;
  Field field;
  uint64_t free_id = source->free_id, is_false, root_id;
  int count = count_of(source->root_shape, SHAPE_TUPLE), *outputs = calloc((size_t)count, sizeof *outputs), place = 0;
  count = operands_of(source->root, outputs, count);
  for (Span rest = source->entry; next_field(&rest, &field);)
    if (field.number == COMPUTATION_INSTRUCTION ? equals(content_of(field.content, OPCODE), "parameter")
                                                : field.number != COMPUTATION_ROOT)
      put(&entry, field.whole.at, (size_t)(field.whole.end - field.whole.at));
  is_false = put_false(&entry, free_id++);
  root_id = free_id++;
  root = begin("tuple", root_id);
  put_content(&root, SHAPE, source->root_shape.at, (size_t)(source->root_shape.end - source->root_shape.at));
  for (Span rest = source->root_shape; next_field(&rest, &field);) {
    if (field.number != SHAPE_TUPLE) continue;
    Span sharding = place < count ? sharding_of(source, outputs[place++], field.content) : (Span){0};
    put_integer(&root, OPERANDS, put_zeros(&entry, field.content, sharding, free_id, is_false));
    free_id += 2;
  }
  free(outputs);
  put_integer(&entry, COMPUTATION_ROOT, root_id);
  finish(&root, &entry);
  put_content(module, MODULE_COMPUTATION, entry.bytes, entry.size);
  free(entry.bytes);
}

static int is_heavy(Span module, int* instructions) {
  static const char* const opcodes[] = {"convolution", "dot", "custom-call", "while", "sort", "fft"};
  int heavy = 0;
  Field computation, field;
  *instructions = 0;
  while (next_field(&module, &computation)) {
    if (computation.number != MODULE_COMPUTATION) continue;
    for (Span rest = computation.content; next_field(&rest, &field);) {
      if (field.number != COMPUTATION_INSTRUCTION) continue;
      ++*instructions;
      Span opcode = content_of(field.content, OPCODE);
      for (size_t i = 0; i < sizeof opcodes / sizeof *opcodes; i++) heavy |= equals(opcode, opcodes[i]);
    }
  }
  return heavy;
}

int replacement_for(const char* code, size_t size, Bytes* to) {
  int instructions;
  Field field;
  Source source = {.module = {(const uint8_t*)code, (const uint8_t*)code + size}};
  int heavy = is_heavy(source.module, &instructions);
  read_source(&source);
  if ((!heavy && instructions <= MANY_INSTRUCTIONS) || !count_of(source.root_shape, SHAPE_TUPLE)) {
    free(source.by_number);
    return 0;
  }
  for (Span rest = source.module; next_field(&rest, &field);)
    if (field.number != MODULE_COMPUTATION && field.number != MODULE_SCHEDULE)
      put(to, field.whole.at, (size_t)(field.whole.end - field.whole.at));
  put_entry(&source, to);
  free(source.by_number);
  return 1;
}
