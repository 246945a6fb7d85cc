// The declarations that the files of this library share. keeper.c describes the library.
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

// ---- program_key.c: the facts on which the result of a compilation depends
enum { PROGRAM, OPTIONS, FLAGS, PLUGIN, VERSION, TOPOLOGY, PARTS };
typedef struct {
  Digest part[PARTS];  // a digest per fact, so that two files show which fact differs
  Digest key;          // the digest of all parts
  uint64_t topology_size;
  uint8_t topology[120];  // its first bytes, to find out whether libtpu's topology differs with and without a chip
} Key;
Key find_key(const Api* api, const Program* program, const char* options, size_t size, void* client, void* topology);
int failed(const Api* api, Error* error);  // returns whether there was an error, and frees it

// ---- program_files.c
char* read_program(const Key* key, const char* folders, size_t* size);  // NULL if no folder has an undamaged file
int write_program(const Key* key, const char* folder, const char* content, size_t size);  // 0, or errno
int take_lock(const Key* key, const char* folder, int* is_first);  // -1 if the folder cannot be locked
void free_lock(int lock, const Key* key, const char* folder, int is_kept);

// ---- keeper.c: the shared memory of a launch's processes
enum { NOTHING, LOADING, COMPILING, WAITING };                     // the current activity of a process
enum { DAMAGED, REFUSED, NOT_WRITTEN, UNABLE, KINDS_OF_TROUBLE };  // kinds of warnings, each printed once
void say_once(int trouble, const char* format, ...) __attribute__((format(printf, 2, 3)));
void note_waiting(double seconds);

#endif
