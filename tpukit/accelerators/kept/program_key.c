// The key of a program: a digest of everything on which the result of a compilation depends, and of nothing else.
#define _GNU_SOURCE
#include <link.h>
#include <stdlib.h>
#include <string.h>

#include "kept.h"

int failed(const Api* api, Error* error) {
  Asked args = {.struct_size = offsetof(Asked, got), .of = error};
  if (error) api->call[ERROR_DESTROY](&args);
  return error != NULL;
}

// ---- the program, without the fields that name lines of Python code: those may change without another program

enum { VARINT, FIXED64, BYTES, FIXED32 = 5 };  // wire types of protobuf
enum { COMPUTATION = 3, STACK_FRAMES = 17, INSTRUCTION = 2, METADATA = 7 };  // field numbers in xla/service/hlo.proto

static uint64_t read_varint(const uint8_t** at, const uint8_t* end) {
  uint64_t value = 0;
  for (int shift = 0; *at < end && shift < 64; shift += 7) {
    value |= (uint64_t)(**at & 127) << shift;
    if (*(*at)++ < 128) return value;
  }
  *at = end + 1;  // not a protobuf: the caller sees that `at` is beyond the end
  return 0;
}

// Adds a message of protobuf to a digest, without the fields `left_out`. It calls itself for the fields `inner`, so that
// their parts are left out as well. Returns 0 if the bytes are not a protobuf.
static int add_message(Sha* sha, const uint8_t* at, const uint8_t* end, int depth) {
  static const unsigned inner[] = {COMPUTATION, INSTRUCTION, 0}, left_out[] = {STACK_FRAMES, 0, METADATA};
  while (at < end) {
    const uint8_t* whole = at;
    uint64_t tag = read_varint(&at, end), size = 0;
    unsigned kind = tag & 7, number = (unsigned)(tag >> 3);
    if (kind == VARINT) read_varint(&at, end);
    else if (kind == BYTES) size = read_varint(&at, end);
    else if (kind == FIXED64 || kind == FIXED32) size = kind == FIXED64 ? 8 : 4;
    else return 0;
    if (at > end || size > (uint64_t)(end - at)) return 0;
    at += size;
    if (kind == BYTES && number == inner[depth]) {
      add(sha, "(", 1);
      if (!add_message(sha, at - size, at, depth + 1)) return 0;
      add(sha, ")", 1);
    } else if (number != left_out[depth]) {
      add(sha, whole, (size_t)(at - whole));
    }
  }
  return 1;
}

static Digest program_digest(const Program* program) {
  const uint8_t* code = (const uint8_t*)program->code;
  Sha sha = begin_sha();
  int is_hlo = program->format_size == 3 && !memcmp(program->format, "hlo", 3);
  if (is_hlo && add_message(&sha, code, code + program->code_size, 0)) return finish(&sha);
  sha = begin_sha();
  add(&sha, program->format, program->format_size);
  add(&sha, code, program->code_size);
  return finish(&sha);
}

// ---- the compiler

typedef struct {
  const Api* api;
  Sha sha;
} Build;

// Adds the build id that the linker has written into the plugin's file, so that another build of the compiler gives
// another key. The plugin is the loaded object that contains the code of one of its functions.
static int add_build_id(struct dl_phdr_info* object, size_t size, void* given) {
  Build* build = given;
  int is_plugin = 0;
  (void)size;
  for (int i = 0; i < object->dlpi_phnum; i++) {
    const ElfW(Phdr)* part = &object->dlpi_phdr[i];
    uintptr_t at = object->dlpi_addr + part->p_vaddr, wanted = (uintptr_t)build->api->call[ERROR_DESTROY];
    is_plugin |= part->p_type == PT_LOAD && wanted >= at && wanted < at + part->p_memsz;
  }
  for (int i = 0; is_plugin && i < object->dlpi_phnum; i++)
    if (object->dlpi_phdr[i].p_type == PT_NOTE)
      add(&build->sha, (void*)(object->dlpi_addr + object->dlpi_phdr[i].p_vaddr), object->dlpi_phdr[i].p_memsz);
  return is_plugin;
}

Key find_key(const Api* api, const Program* program, const char* options, size_t size, void* client, void* topology) {
  Key key = {.part = {[PROGRAM] = program_digest(program), [OPTIONS] = digest_of(options, size)}};
  static const char* const variables[] = {"LIBTPU_INIT_ARGS", "XLA_FLAGS"};
  Sha flags = begin_sha();
  for (int i = 0; i < 2; i++) {
    const char* value = getenv(variables[i]) ? getenv(variables[i]) : "";
    add(&flags, value, strlen(value) + 1);
  }
  key.part[FLAGS] = finish(&flags);
  Build build = {api, begin_sha()};
  add(&build.sha, &api->version.major, 2 * sizeof(int));
  dl_iterate_phdr(add_build_id, &build);
  key.part[PLUGIN] = finish(&build.sha);
  Asked asked = ARGS(Asked, .of = client);
  if (client && !failed(api, api->call[CLIENT_TOPOLOGY](&asked))) topology = asked.got;
  Text version = ARGS(Text, .of = client ? client : topology);
  if (!failed(api, api->call[client ? CLIENT_PLATFORM_VERSION : TOPOLOGY_PLATFORM_VERSION](&version)))
    key.part[VERSION] = digest_of(version.bytes, version.size);
  Serialized bytes = ARGS(Serialized, .of = topology);
  if (topology && !failed(api, api->call[TOPOLOGY_SERIALIZE](&bytes))) {
    key.part[TOPOLOGY] = digest_of(bytes.bytes, bytes.size);
    key.topology_size = bytes.size;
    memcpy(key.topology, bytes.bytes, bytes.size < sizeof key.topology ? bytes.size : sizeof key.topology);
    bytes.destroy(bytes.owner);
  }
  key.key = digest_of(key.part, sizeof key.part);
  return key;
}
