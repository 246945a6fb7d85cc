// A PJRT plugin in front of the real plugin: it stores compiled programs in files, and loads them in the next session.
//
// In a worker, torch_xla loads this library, because TPU_LIBRARY_PATH names it. The library passes every call to the
// real plugin (libtpu, or the simulator), except PJRT_Client_Compile: this call first looks for a file with the program,
// and writes a file after a compilation. If any of this fails, the program is compiled, as without this library.
//
// The kernel calls kept_open before it forks the workers. Each worker calls kept_join before it starts its client. They
// share a page of memory, which has the counts of all processes, and by which each warning is printed only once.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "kept.h"

enum { MOST_PROCESSES = 256 };
typedef struct {  // the counts of one process; compile_cache.py has the same fields
  int64_t loaded, compiled, doing;  // `doing`: NOTHING, LOADING, COMPILING or WAITING
  double loading_seconds, compiling_seconds, waiting_seconds;  // loading_seconds includes waiting_seconds
} Done;
typedef struct {
  int64_t processes, warned[KINDS_OF_TROUBLE];
  Done done[MOST_PROCESSES];
} Page;

static Page* page;
static Done* mine;
static const char *folders = "", *plugin_file = "";
static const Api* plugin;
static Api* api;

// Returns the page that the processes of a launch share. `names`: the folders, one per line.
Page* kept_open(const char* names) {
  page = mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  folders = strdup(names);
  return page == MAP_FAILED ? NULL : page;
}

void kept_close(Page* of_a_launch) { munmap(of_a_launch, sizeof *of_a_launch); }

// Returns the counts of this process. `file`: the path of the real plugin.
Done* kept_join(const char* file) {
  plugin_file = strdup(file);
  mine = &page->done[__atomic_fetch_add(&page->processes, 1, __ATOMIC_ACQ_REL) % MOST_PROCESSES];
  return mine;
}

// Prints a warning, unless a process of the launch has printed a warning of this kind before.
void say_once(int trouble, const char* format, ...) {
  char line[4600] = "compiled programs: ";
  if (!page || __atomic_exchange_n(&page->warned[trouble], 1, __ATOMIC_ACQ_REL)) return;
  va_list values;
  va_start(values, format);
  vsnprintf(line + strlen(line), sizeof line - 64, format, values);
  va_end(values);
  dprintf(STDERR_FILENO, "%s\n", line);
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

void note_waiting(double seconds) {
  mine->doing = WAITING;
  mine->waiting_seconds += seconds;
}

// Returns the loaded program of a key; NULL if no folder has it, or if the plugin does not accept the file.
static void* load(void* client, const Key* key) {
  Load args = ARGS(Load, .client = client);
  mine->doing = LOADING;
  char* content = read_program(key, folders, &args.size);
  args.bytes = content;
  if (content && failed(plugin, plugin->call[DESERIALIZE_AND_LOAD](&args))) {
    say_once(REFUSED, "the compiler's library rejects a stored program, so it is compiled again");
    args.loaded = NULL;
  }
  free(content);
  return args.loaded;
}

// Writes an executable into the first folder; returns 1 if the file was written, 0 after an error.
static int keep(const Api* of, void* executable, const Key* key) {
  Serialized args = ARGS(Serialized, .of = executable);
  if (failed(of, of->call[SERIALIZE](&args))) {
    say_once(UNABLE, "the compiler's library cannot write its programs, so none is stored");
    return 0;
  }
  int why = write_program(key, folders, args.bytes, args.size);
  if (why) say_once(NOT_WRITTEN, "no program is stored in %.*s: %s", (int)strcspn(folders, "\n"), folders, strerror(why));
  args.destroy(args.owner);
  return !why;
}

static int keep_loaded(void* loaded, const Key* key) {
  Asked got = ARGS(Asked, .of = loaded);
  if (failed(plugin, plugin->call[GET_EXECUTABLE](&got))) return 0;
  int is_kept = keep(plugin, got.got, key);
  Asked destroyed = {.struct_size = offsetof(Asked, got), .of = got.got};
  failed(plugin, plugin->call[EXECUTABLE_DESTROY](&destroyed));
  return is_kept;
}

static void count(int64_t* programs, double* seconds, double began) {
  __atomic_fetch_add(programs, 1, __ATOMIC_ACQ_REL);
  *seconds += now() - began;
  mine->doing = NOTHING;
}

// PJRT_Client_Compile: load the program, or compile and store it. Of several processes that need the same program, only
// the one that gets the lock first compiles it; the others wait for its lock, and then load the file.
static Error* compile(void* given) {
  Compile* args = given;
  double began = now();
  int lock = -1, is_first = 1, is_kept = 0;
  Key key = find_key(plugin, args->program, args->options, args->options_size, args->client, NULL);
  void* loaded = load(args->client, &key);
  if (!loaded) {
    lock = take_lock(&key, folders, &is_first);
    if (lock >= 0) loaded = load(args->client, &key);  // another process may have stored it meanwhile
  }
  if (loaded) {
    free_lock(lock, &key, folders, 1);
    args->executable = loaded;
    count(&mine->loaded, &mine->loading_seconds, began);
    return NULL;
  }
  // The process before has compiled the program but could not store it. So compile without holding up the others.
  if (!is_first) free_lock(lock, &key, folders, 0), lock = -1;
  mine->doing = COMPILING;
  began = now();
  Error* error = plugin->call[CLIENT_COMPILE](args);
  count(&mine->compiled, &mine->compiling_seconds, began);
  if (!error && is_first) is_kept = keep_loaded(args->executable, &key);
  free_lock(lock, &key, folders, is_kept);
  return error;
}

// Stores a program that was compiled for a topology without a device, under the key that a client with such a device
// would use. Returns 1 if the file was written.
int kept_write(const Api* of, const Program* program, const char* options, size_t size, void* topology, void* executable) {
  Key key = find_key(of, program, options, size, NULL, topology);
  return keep(of, executable, &key);
}

const Api* GetPjrtApi(void) {
  if (api) return api;
  void* handle = dlopen(plugin_file, RTLD_NOW | RTLD_LOCAL);
  const Api* (*get)(void) = handle ? (const Api* (*)(void))dlsym(handle, "GetPjrtApi") : NULL;
  if (!get) dprintf(STDERR_FILENO, "%s cannot be loaded: %s\n", plugin_file, dlerror());
  plugin = get ? get() : NULL;
  if (!plugin) return NULL;
  api = malloc(plugin->struct_size);  // copy the whole table: a newer plugin's is longer than the one declared here
  memcpy(api, plugin, plugin->struct_size);
  int can = plugin->version.major == 0 && plugin->struct_size >= sizeof *plugin + (CLIENT_TOPOLOGY + 1) * sizeof *api->call;
  if (can && mine) api->call[CLIENT_COMPILE] = compile;
  else say_once(UNABLE, "the compiler's library has an unknown interface, so no program is stored");
  return api;
}
