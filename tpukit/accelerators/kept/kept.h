// Compiled programs that are kept in a folder: what its files share. keeper.c says what it is.
#ifndef KEPT_H_
#define KEPT_H_

#include <stddef.h>
#include <stdint.h>

#include "pjrt.h"

// ---- sha256.c
typedef struct {
  uint32_t state[8];
  uint8_t block[64];
  uint64_t size;
} Sha;
typedef struct {
  uint8_t bytes[32];
} Digest;
Sha begin_sha(void);
void add(Sha* sha, const void* bytes, size_t size);
Digest finish(Sha* sha);
Digest digest_of(const void* bytes, size_t size);

// ---- program_key.c: what the result of a compile depends on
enum { PROGRAM, OPTIONS, FLAGS, PLUGIN, VERSION, TOPOLOGY, PARTS };
typedef struct {
  Digest part[PARTS];  // each by itself, so that two files tell what sets them apart
  Digest key;          // of all of them
  uint64_t topology_size;
  uint8_t topology[120];  // its first bytes: what libtpu has without a chip may not be what it has with one
} Key;
Key find_key(const Api* api, const Program* program, const char* options, size_t size, void* client, void* topology);
int failed(const Api* api, Error* error);  // says whether there was one, and forgets it

// ---- program_files.c
char* read_program(const Key* key, const char* folders, size_t* size);  // NULL if there is none that is whole
int write_program(const Key* key, const char* folder, const char* content, size_t size);  // 0, or errno
int take_lock(const Key* key, const char* folder, int* is_first);  // -1 where there can be none
void free_lock(int lock, const Key* key, const char* folder, int is_kept);

// ---- keeper.c: what the processes of a launch share, and what each of them does
enum { NOTHING, LOADING, COMPILING, WAITING };
enum { DAMAGED, REFUSED, NOT_WRITTEN, UNABLE, KINDS_OF_TROUBLE };
void say_once(int trouble, const char* format, ...) __attribute__((format(printf, 2, 3)));
void note_waiting(double seconds);

#endif
