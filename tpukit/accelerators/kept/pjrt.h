/* Copyright 2022 The OpenXLA Authors.

Licensed under the Apache License, Version 2.0 (the "License");
you may not use this file except in compliance with the License.
You may obtain a copy of the License at

    http://www.apache.org/licenses/LICENSE-2.0

Unless required by applicable law or agreed to in writing, software
distributed under the License is distributed on an "AS IS" BASIS,
WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
See the License for the specific language governing permissions and
limitations under the License.
==============================================================================*/

// The declarations of OpenXLA's xla/pjrt/c/pjrt_c_api.h, version 0.81, that this library needs: libtpu does not come with
// this header. Changed: only these declarations are here, and a function is called by its index in the plugin's table.
// Within a major version, functions are only added at the end of this table.
#ifndef KEPT_PJRT_H_
#define KEPT_PJRT_H_

#include <stddef.h>

typedef struct Error Error;
typedef Error* Function(void* args);
typedef struct {
  size_t struct_size;
  void* extension_start;
  struct {
    size_t struct_size;
    void* extension_start;
    int major, minor;
  } version;
  Function* call[];
} Api;
enum {  // indices in `call`
  ERROR_DESTROY = 0, CLIENT_PLATFORM_VERSION = 14, CLIENT_COMPILE = 20, EXECUTABLE_DESTROY = 40, SERIALIZE = 49,
  GET_EXECUTABLE = 51, DESERIALIZE_AND_LOAD = 56, TOPOLOGY_PLATFORM_VERSION = 85, TOPOLOGY_SERIALIZE = 87,
  CLIENT_TOPOLOGY = 95
};

// The arguments of functions. The first field is the size of the struct in the caller's version of the header.
#define ARGS(Type, ...) (Type){.struct_size = sizeof(Type), __VA_ARGS__}
typedef struct {
  size_t struct_size;
  void* extension_start;
  void* of;  // the error or the executable that is destroyed, the client or the executable that is asked
  void* got;  // the client's topology, the loaded executable's executable
} Asked;
typedef struct {
  size_t struct_size;
  void *extension_start, *of;
  const char* bytes;
  size_t size;
} Text;
typedef struct {
  size_t struct_size;
  void *extension_start, *of;
  const char* bytes;
  size_t size;
  void* owner;
  void (*destroy)(void* owner);
} Serialized;
typedef struct {
  size_t struct_size;
  void *extension_start, *client;
  const char* bytes;
  size_t size;
  void* loaded;
  void* later[8];  // room for fields of later versions: a plugin rejects a smaller struct than its own, but not a larger
} Load;
typedef struct {
  size_t struct_size;
  void* extension_start;
  const char* code;
  size_t code_size;
  const char* format;
  size_t format_size;
} Program;
typedef struct {
  size_t struct_size;
  void *extension_start, *client;
  const Program* program;
  const char* options;
  size_t options_size;
  void* executable;
} Compile;

#endif
