// The files of compiled programs, each under its key. One is checked whole before a plugin sees it, which may crash on
// half of one; nothing that is wrong with a file is an error.
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

// Returns the content of an open file if it is whole and this program's.
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
    // Not through a link, and not waiting for the other end of a pipe.
    int file = open(path_of(key, folder, length, ".pjrt", path), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    folder += length;
    if (file < 0 && errno == ENOENT) continue;
    content = file < 0 ? NULL : read_whole(file, key, size);
    if (content) futimens(file, NULL);  // the oldest are removed: those that nobody has used for longest
    else say_once(DAMAGED, "%s is damaged, or not what this version has kept, and is not used", path);
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
  // Under another name first, and moved to its place whole: this process may be killed.
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

// ---- one lock a key, so that of several processes one compiles a program, and the others load what it has kept

enum { MOST_SECONDS = 900 };  // that a process waits for another's compile; then it compiles itself

// Returns the lock, once nobody else has it. Whoever ends, ends its hold on it as well. `is_first` says whether the
// program is to be compiled and kept here: nobody was waited for, or who had the lock was ended before it could.
int take_lock(const Key* key, const char* folder, int* is_first) {
  char path[ROOM];
  struct timespec pause = {0, 20000000};
  struct stat facts = {0};
  int lock = open(path_of(key, folder, strcspn(folder, "\n"), ".lock", path), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  *is_first = 1;
  if (lock < 0) return -1;
  for (double waited = 0; flock(lock, LOCK_EX | LOCK_NB); waited += 0.02) {
    if (errno != EWOULDBLOCK || waited > MOST_SECONDS) {  // network drives without locks: each compiles for itself
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
  // For those who wait for it: there will be no file, and they need not wait for each other. A size takes no room.
  if (!is_kept && ftruncate(lock, 1)) return (void)close(lock);
  unlink(path_of(key, folder, strcspn(folder, "\n"), ".lock", path));
  close(lock);
}
