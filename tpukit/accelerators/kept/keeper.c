// A PJRT plugin in front of the real one, that keeps what was compiled and loads it in the next session.
//
// torch_xla loads this library because TPU_LIBRARY_PATH names it, in a worker. It hands every call on to the real plugin
// (libtpu, or the simulator) and answers one itself: PJRT_Client_Compile looks for a file of that program first,
// and writes one after a compile. Whatever goes wrong with that, the program is compiled, as without this library.
//
// The kernel calls kept_open before it forks the workers, and each of them kept_join before it starts its client; the
// page that they share counts, and lets each warning be printed once.
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
typedef struct {  // the same fields are in compile_cache.py
  int64_t loaded, compiled, doing;
  double loading_seconds, compiling_seconds, waiting_seconds;  // of loading, those of waiting are a part
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

// Returns what the processes of a launch will share; `names` are the folders, a line each.
Page* kept_open(const char* names) {
  page = mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  folders = strdup(names);
  return page == MAP_FAILED ? NULL : page;
}

void kept_close(Page* of_a_launch) { munmap(of_a_launch, sizeof *of_a_launch); }

// Returns what this process will have done.
Done* kept_join(const char* file) {
  plugin_file = strdup(file);
  mine = &page->done[__atomic_fetch_add(&page->processes, 1, __ATOMIC_ACQ_REL) % MOST_PROCESSES];
  return mine;
}

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

static void* load(void* client, const Key* key) {
  Load args = ARGS(Load, .client = client);
  mine->doing = LOADING;
  char* content = read_program(key, folders, &args.size);
  args.bytes = content;
  if (content && failed(plugin, plugin->call[DESERIALIZE_AND_LOAD](&args))) {
    say_once(REFUSED, "the compiler's library refuses what it once made, so it is compiled again");
    args.loaded = NULL;
  }
  free(content);
  return args.loaded;
}

// Writes an executable into the first folder; returns whether it is there.
static int keep(const Api* of, void* executable, const Key* key) {
  Serialized args = ARGS(Serialized, .of = executable);
  if (failed(of, of->call[SERIALIZE](&args))) {
    say_once(UNABLE, "the compiler's library cannot write its programs, so none is kept");
    return 0;
  }
  int why = write_program(key, folders, args.bytes, args.size);
  if (why) say_once(NOT_WRITTEN, "none is kept in %.*s: %s", (int)strcspn(folders, "\n"), folders, strerror(why));
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

static Error* compile(void* given) {
  Compile* args = given;
  double began = now();
  int lock = -1, is_first = 1, is_kept = 0;
  Key key = find_key(plugin, args->program, args->options, args->options_size, args->client, NULL);
  void* loaded = load(args->client, &key);
  if (!loaded) {
    lock = take_lock(&key, folders, &is_first);
    if (lock >= 0) loaded = load(args->client, &key);  // somebody may have kept it meanwhile
  }
  if (loaded) {
    free_lock(lock, &key, folders, 1);
    args->executable = loaded;
    count(&mine->loaded, &mine->loading_seconds, began);
    return NULL;
  }
  if (!is_first) free_lock(lock, &key, folders, 0), lock = -1;
  mine->doing = COMPILING;
  began = now();
  Error* error = plugin->call[CLIENT_COMPILE](args);
  count(&mine->compiled, &mine->compiling_seconds, began);
  if (!error && is_first) is_kept = keep_loaded(args->executable, &key);
  free_lock(lock, &key, folders, is_kept);
  return error;
}

// Writes what was compiled for a topology, without a device, as a client's would be; returns whether it is there.
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
  api = malloc(plugin->struct_size);  // its own size: a newer plugin's table is longer than what is known here
  memcpy(api, plugin, plugin->struct_size);
  int can = plugin->version.major == 0 && plugin->struct_size >= sizeof *plugin + (CLIENT_TOPOLOGY + 1) * sizeof *api->call;
  if (can && mine) api->call[CLIENT_COMPILE] = compile;
  else say_once(UNABLE, "the compiler's library is another than is known here, so none is kept");
  return api;
}
