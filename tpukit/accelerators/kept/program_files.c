// The files of compiled programs; a file's name is the program's key. A file's checksum is compared before the plugin
// gets its content, because the plugin may crash on an incomplete program. A damaged file is not an error: the program is
// compiled again.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "kept.h"

typedef struct {
  char magic[8];
  Key key;
  Digest digest;  // of the content
  uint64_t size;  // of the content, which follows
} Head;
static const char magic[8] = "TPUKEEP\1";

enum { ROOM = 4096 };

static char* path_of(const Key* key, const char* folder, size_t length, const char* suffix, char path[ROOM]) {
  int at = snprintf(path, ROOM - 80, "%.*s/", (int)length, folder);
  for (int i = 0; i < 16; i++) at += sprintf(path + at, "%02x", key->key.bytes[i]);
  strcpy(path + at, suffix);
  return path;
}

// Returns the content of an open file; NULL if it is damaged or belongs to another key. The caller frees the content.
static char* read_whole(int file, const Key* key, size_t* size) {
  struct stat facts;
  Head head;
  if (fstat(file, &facts) || !S_ISREG(facts.st_mode) || read(file, &head, sizeof head) != sizeof head) return NULL;
  if (memcmp(head.magic, magic, sizeof magic) || memcmp(&head.key, key, sizeof *key)) return NULL;
  if (head.size != (uint64_t)facts.st_size - sizeof head) return NULL;
  char* content = malloc(head.size + 1);
  ssize_t had = 0, more = 1;
  for (*size = 0; content && *size < head.size && more > 0; *size += (size_t)had)
    had = more = read(file, content + *size, head.size - *size);
  Digest digest = digest_of(content, content && *size == head.size ? *size : 0);
  if (content && *size == head.size && !memcmp(&digest, &head.digest, sizeof digest)) return content;
  free(content);
  return NULL;
}

char* read_program(const Key* key, const char* folders, size_t* size) {
  char path[ROOM], *content = NULL;
  for (const char* folder = folders; *folder && !content; folder += folder[strcspn(folder, "\n")] == '\n') {
    size_t length = strcspn(folder, "\n");
    // O_NOFOLLOW: do not follow a symbolic link. O_NONBLOCK: do not wait if the file is a pipe.
    int file = open(path_of(key, folder, length, ".pjrt", path), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    folder += length;
    if (file < 0 && errno == ENOENT) continue;
    content = file < 0 ? NULL : read_whole(file, key, size);
    if (content) futimens(file, NULL);  // mark the file as used: the least recently used files are removed
    else say_once(DAMAGED, "%s is not used: it is damaged, or another version has written it", path);
    if (file >= 0) close(file);
  }
  return content;
}

int write_program(const Key* key, const char* folder, const char* content, size_t size) {
  char path[ROOM], part[ROOM], suffix[32];
  Head head = {.key = *key, .digest = digest_of(content, size), .size = size};
  memcpy(head.magic, magic, sizeof magic);
  snprintf(suffix, sizeof suffix, ".%d.part", (int)getpid());
  path_of(key, folder, strcspn(folder, "\n"), ".pjrt", path);
  // Write under another name and rename the complete file, because this process may be killed while it writes.
  int file = open(path_of(key, folder, strcspn(folder, "\n"), suffix, part), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  FILE* stream = file < 0 ? NULL : fdopen(file, "wb");
  if (!stream) return errno;
  errno = 0;
  int whole = fwrite(&head, sizeof head, 1, stream) == 1 && fwrite(content, 1, size, stream) == size;
  whole = !fflush(stream) && whole && !fsync(file);
  int why = errno;
  if (fclose(stream) && whole) whole = 0, why = errno;
  if (whole && rename(part, path)) whole = 0, why = errno;
  if (whole) return 0;
  unlink(part);
  return why ? why : EIO;
}

// ---- one lock per key: one process compiles the program, and the others wait and then load its file

enum { MOST_SECONDS = 900 };  // limit of the wait for another process's compilation; then this process compiles, too

// Waits for the lock and returns it; -1 if it cannot be locked. The system releases the lock of a process that ends.
// `is_first`: 0 if another process had the lock, and has compiled the program but stored no file. Otherwise 1: if there
// is no file, this process must compile the program and store it.
int take_lock(const Key* key, const char* folder, int* is_first) {
  char path[ROOM];
  struct timespec pause = {0, 20000000};
  struct stat facts = {0};
  int lock = open(path_of(key, folder, strcspn(folder, "\n"), ".lock", path), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  *is_first = 1;
  if (lock < 0) return -1;
  for (double waited = 0; flock(lock, LOCK_EX | LOCK_NB); waited += 0.02) {
    // Some network drives have no locks: there, each process compiles the program itself.
    if (errno != EWOULDBLOCK || waited > MOST_SECONDS) {
      close(lock);
      return -1;
    }
    note_waiting(0.02);
    nanosleep(&pause, NULL);
    *is_first = 0;
  }
  if (!*is_first) *is_first = !fstat(lock, &facts) && facts.st_size == 0;
  return lock;
}

void free_lock(int lock, const Key* key, const char* folder, int is_kept) {
  char path[ROOM];
  if (lock < 0) return;
  // If no file was stored, set the size of the lock's file to 1. The waiting processes then see that they must compile
  // the program themselves, and need not wait for each other.
  if (!is_kept && ftruncate(lock, 1)) return (void)close(lock);
  unlink(path_of(key, folder, strcspn(folder, "\n"), ".lock", path));
  close(lock);
}
