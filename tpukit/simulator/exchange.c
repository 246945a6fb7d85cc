// Where the devices of all processes meet: one file in memory that they share.
//
// Every device has a slot in it. A collective has three steps. Each device waits until all have read the slots of the
// collective before. It writes its operands into its slot and counts that. It waits until all have counted, and reads
// what it needs. A device that waits notices within a second if a process has ended, and gives up at the time limit.
// The first that gives up writes the reason into the file, and all others fail with the same text.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "simulator.h"

typedef struct {
  int pid;          // 0: has not come
  int left;         // it gave its chips back
  uint64_t born;    // its start time: a pid may be another process's by now
} Process;

typedef struct {
  uint64_t brought;      // collectives it has brought its operands to
  uint64_t read;         // ... and has read the others' of
  uint64_t fingerprint;  // of the last one: must be everybody's
  char what[232];        // the same in words
} Device;

typedef struct {
  uint32_t bell;    // rung at every change, which wakes who waits
  uint32_t failed;  // 0, 1 while the words are written, 2
  int processes, cores;
  char failure[1024];
  Process process[MOST_DEVICES];
  Device device[MOST_DEVICES];
} Meeting;

static Meeting* meeting;
enum { HEAD = 65536 };  // bytes before the first slot
// A sparse file: only what a collective touches becomes memory. All gradients of a step may come in one.
static const size_t SLOT = (size_t)2 << 30;

// In a recording all other devices bring the same operands as this one: there is one slot, and no process to wait for.
char* slot_of(int device) { return (char*)meeting + HEAD + (is_recording() ? 0 : device * SLOT); }
size_t slot_size(void) { return SLOT; }

#define LOAD(word) __atomic_load_n(&(word), __ATOMIC_ACQUIRE)
#define STORE(word, value) __atomic_store_n(&(word), value, __ATOMIC_RELEASE)

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double patience(void) {
  const char* seconds = getenv("SIMULATOR_TIMEOUT");
  return seconds && atof(seconds) > 0 ? atof(seconds) : 300;
}

static void ring(void) {
  __atomic_add_fetch(&meeting->bell, 1, __ATOMIC_ACQ_REL);
  syscall(SYS_futex, &meeting->bell, FUTEX_WAKE, 1 << 30, NULL, NULL, 0);
}

static void sleep_until_rung(uint32_t heard) {
  struct timespec most = {.tv_nsec = 500000000};  // then the caller tests whether the missing processes are alive
  syscall(SYS_futex, &meeting->bell, FUTEX_WAIT, heard, &most, NULL, 0);
}

// ---- a failure is everybody's

const char* fail_run(const char* format, ...) {
  uint32_t none = 0;
  if (__atomic_compare_exchange_n(&meeting->failed, &none, 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
    va_list values;
    va_start(values, format);
    vsnprintf(meeting->failure, sizeof meeting->failure, format, values);
    va_end(values);
    STORE(meeting->failed, 2);
    ring();
  }
  // The writer may be killed before it has finished; then the text is incomplete.
  for (int i = 0; LOAD(meeting->failed) != 2 && i < 1000; i++) usleep(1000);
  return meeting->failure;
}

// ---- who is alive

// A process's start time in clock ticks since boot; 0 if it has ended. A killed child that its parent has not waited
// for yet still answers kill(pid, 0), but is a zombie here.
static uint64_t start_time(int pid) {
  char path[64], text[1024];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  FILE* file = fopen(path, "r");
  size_t size = file ? fread(text, 1, sizeof text - 1, file) : 0;
  if (file) fclose(file);
  text[size] = 0;
  char* after_name = strrchr(text, ')');  // the name may hold anything
  if (!after_name || strlen(after_name) < 3 || strchr("ZXx", after_name[2])) return 0;
  char* at = after_name + 2;
  for (int number = 3; at && number < 22; number++) {  // proc(5): state is number 3, starttime 22
    at = strchr(at, ' ');
    if (at) at++;
  }
  return at ? strtoull(at, NULL, 10) : 0;
}

static int has_ended(const Process* process) {
  return process->pid && (process->left || start_time(process->pid) != process->born);
}

// ---- waiting

typedef enum { COME, READ, BROUGHT } Wanted;

static int is_missing(int device, Wanted wanted, uint64_t number) {
  if (wanted == COME) return !LOAD(meeting->process[process_of(device)].pid);
  return LOAD(*(wanted == READ ? &meeting->device[device].read : &meeting->device[device].brought)) < number;
}

static int first_missing(Wanted wanted, uint64_t number) {
  for (int device = 0; device < topology.world; device++)
    if (is_missing(device, wanted, number)) return device;
  return -1;
}

// The first missing device whose process has ended, or -1. It may have come just before its process ended, so
// `is_missing` is tested again.
static int first_ended(Wanted wanted, uint64_t number) {
  for (int device = 0; device < topology.world; device++)
    if (is_missing(device, wanted, number) && has_ended(&meeting->process[process_of(device)]) &&
        is_missing(device, wanted, number))
      return device;
  return -1;
}

static const char* tell_ended(int rank, uint64_t number, const char* what) {
  const Process* process = &meeting->process[process_of(rank)];
  return fail_run("rank %d has gone before collective %lu, where the others wait: %s.\n"
                  "  found: its process %d (pid %d) %s after %lu collective(s)\n"
                  "  fix:   see what rank %d printed last; every rank must stay until all are done",
                  rank, (unsigned long)number, what, process_of(rank), process->pid,
                  process->left ? "gave its chips back" : "ended", (unsigned long)LOAD(meeting->device[rank].brought),
                  rank);
}

static const char* tell_late(int rank, uint64_t number, const char* what) {
  return fail_run("rank %d has not come to collective %lu for %.3g s: %s.\n"
                  "  found: its process %d (pid %d) is alive and has come to %lu\n"
                  "  fix:   every rank must run the same collectives; if it is only slow, set SIMULATOR_TIMEOUT (seconds) higher",
                  rank, (unsigned long)number, patience(), what, process_of(rank),
                  meeting->process[process_of(rank)].pid, (unsigned long)LOAD(meeting->device[rank].brought));
}

static const char* tell_absent(int rank) {
  int here = 0, process = process_of(rank);
  for (int p = 0; p < topology.processes; p++) here += meeting->process[p].pid != 0;
  return fail_run("process %d has not taken its chip for %.3g s.\n  found: %d of %d processes have\n"
                  "  fix:   start all of them, with the same SIMULATOR_MEMORY; if it is only slow, set SIMULATOR_TIMEOUT "
                  "(seconds) higher", process, patience(), here, topology.processes);
}

static const char* wait_for_all(Wanted wanted, uint64_t number, const char* what) {
  double start = now(), looked = start;
  for (;;) {
    uint32_t heard = LOAD(meeting->bell);
    int missing = first_missing(wanted, number);
    if (missing < 0) return NULL;
    if (LOAD(meeting->failed)) return fail_run("-");
    if (now() - looked > 0.2) {
      int ended = first_ended(wanted, number);
      if (ended >= 0) return tell_ended(ended, number, what);
      if (now() - start > patience())
        return wanted == COME ? tell_absent(missing) : tell_late(missing, number, what);
      looked = now();
    }
    sleep_until_rung(heard);
  }
}

// ---- the three steps of a collective

const char* begin_collective(int device, const char* what) {
  if (is_recording()) return NULL;
  if (LOAD(meeting->failed)) return fail_run("-");
  uint64_t before = meeting->device[device].brought;
  return wait_for_all(READ, before, what);
}

const char* bring(int device, const char* what, uint64_t fingerprint) {
  if (is_recording()) return NULL;
  Device* mine = &meeting->device[device];
  uint64_t number = mine->brought + 1;
  snprintf(mine->what, sizeof mine->what, "%s", what);
  mine->fingerprint = fingerprint;
  STORE(mine->brought, number);
  ring();
  const char* failed = wait_for_all(BROUGHT, number, what);
  if (failed) return failed;
  for (int rank = 0; rank < topology.world; rank++) {
    const Device* other = &meeting->device[rank];
    if (other->fingerprint != fingerprint)
      return fail_run("the ranks disagree about collective %lu.\n  found: rank %d runs %s; rank %d runs %s%s\n"
                      "  fix:   every rank must run the same collectives, of the same shapes, in the same order",
                      (unsigned long)number, device, what, rank, other->what,
                      strcmp(what, other->what) ? "" : ", with other groups or further operands");
  }
  return NULL;
}

void end_collective(int device) {
  STORE(meeting->device[device].read, meeting->device[device].brought);
  ring();
}

// ---- coming and leaving

static int is_empty(void) {
  for (int p = 0; p < MOST_DEVICES; p++)
    if (meeting->process[p].pid && !has_ended(&meeting->process[p])) return 0;
  return 1;
}

// Locks (F_WRLCK) or unlocks (F_UNLCK) the file; a process that is killed unlocks it too.
static void set_lock(int file, short kind) {
  struct flock all = {.l_type = kind, .l_whence = SEEK_SET};
  while (fcntl(file, F_SETLKW, &all) < 0 && errno == EINTR) continue;
}

// Takes this process's place. A file without a living process begins a new run: code that starts one group of processes
// after the other (xmp.spawn) can keep its environment.
static PJRT_Error* sit_down(int file) {
  if (lseek(file, 0, SEEK_END) < HEAD || is_empty()) {
    size_t size = HEAD + topology.world * SLOT;
    if (ftruncate(file, 0) || ftruncate(file, (off_t)size))
      return failure(PJRT_Error_Code_RESOURCE_EXHAUSTED, "the shared file cannot be made %zu bytes long: %s", size,
                     strerror(errno));
    meeting->processes = topology.processes;
    meeting->cores = topology.cores;
  }
  if (meeting->processes != topology.processes || meeting->cores != topology.cores)
    return failure(PJRT_Error_Code_INVALID_ARGUMENT,
                   "the processes do not agree how many they are.\n  found: %d with %d device(s) each here, %d with %d "
                   "in the shared file\n  fix:   give every run a SIMULATOR_MEMORY of its own, and all its processes the "
                   "same TPU_PROCESS_BOUNDS", topology.processes, topology.cores, meeting->processes, meeting->cores);
  Process* mine = &meeting->process[topology.process];
  if (mine->pid)
    return failure(PJRT_Error_Code_ALREADY_EXISTS,
                   "two processes want the same chip.\n  found: pid %d and pid %d are both process %d\n"
                   "  fix:   give each a CLOUD_TPU_TASK_ID of its own, and every run a SIMULATOR_MEMORY of its own",
                   mine->pid, (int)getpid(), topology.process);
  mine->born = start_time(getpid());
  STORE(mine->pid, (int)getpid());
  return NULL;
}

PJRT_Error* take_chips(void) {
  if (meeting) return NULL;  // a second client of this process
  const char* path = getenv("SIMULATOR_MEMORY");
  int shared = topology.processes > 1 && !is_recording(), file = -1;
  if (!shared) file = memfd_create("simulator", MFD_CLOEXEC);
  else if (path) file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0)
    return failure(PJRT_Error_Code_NOT_FOUND,
                   "the processes of this run have nowhere to meet.\n  found: SIMULATOR_MEMORY=%s: %s\n  fix:   set it to "
                   "a file that stays open until they have ended, as tpukit's environment() does",
                   path ? path : "(not set)", shared && !path ? "needed for more than one process" : strerror(errno));
  set_lock(file, F_WRLCK);
  meeting = mmap(NULL, HEAD + topology.world * SLOT, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  PJRT_Error* error = meeting != MAP_FAILED ? sit_down(file)
                                            : failure(PJRT_Error_Code_RESOURCE_EXHAUSTED,
                                                      "the shared file cannot be mapped: %s", strerror(errno));
  set_lock(file, F_UNLCK);
  close(file);  // the mapping stays
  if (error) {
    meeting = NULL;
    return error;
  }
  ring();
  // As with libtpu, no process gets its client before all have started.
  const char* failed = is_recording() ? NULL : wait_for_all(COME, 0, "the start");
  return failed ? failure(PJRT_Error_Code_DEADLINE_EXCEEDED, "%s", failed) : NULL;
}

void leave(void) {
  if (!meeting) return;
  STORE(meeting->process[topology.process].left, 1);
  ring();
}
