/* Copyright 2023 The OpenXLA Authors.

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

// What the simulator needs of three of OpenXLA's headers that the plugin's package does not bring (jaxlib does, at 80 MB):
//   xla/ffi/api/c_api.h, version 0.1, as in jaxlib 0.8.0: how XLA calls a function of ours.
//   xla/pjrt/c/pjrt_c_api_ffi_extension.h and pjrt_c_api_profiler_extension.h, of PJRT 0.81.
// Changed: only these declarations are here; functions that are never called have no types.
#ifndef SIMULATOR_XLA_FFI_H_
#define SIMULATOR_XLA_FFI_H_

#include <stddef.h>
#include <stdint.h>

#include "pjrt_c_api.h"

#define XLA_FFI_API_MAJOR 0
#define XLA_FFI_API_MINOR 1

typedef enum { XLA_FFI_Extension_Metadata = 1 } XLA_FFI_Extension_Type;

typedef struct XLA_FFI_Extension_Base {
  size_t struct_size;
  XLA_FFI_Extension_Type type;
  struct XLA_FFI_Extension_Base* next;
} XLA_FFI_Extension_Base;

typedef struct {
  size_t struct_size;
  XLA_FFI_Extension_Base* extension_start;
  int major_version;
  int minor_version;
} XLA_FFI_Api_Version;

typedef struct XLA_FFI_Error XLA_FFI_Error;

typedef enum { XLA_FFI_Error_Code_ABORTED = 10 } XLA_FFI_Error_Code;

typedef struct {
  size_t struct_size;
  XLA_FFI_Extension_Base* extension_start;
  const char* message;
  XLA_FFI_Error_Code errc;
} XLA_FFI_Error_Create_Args;

typedef enum {
  XLA_FFI_DataType_PRED = 1,
  XLA_FFI_DataType_S8 = 2,
  XLA_FFI_DataType_S16 = 3,
  XLA_FFI_DataType_S32 = 4,
  XLA_FFI_DataType_S64 = 5,
  XLA_FFI_DataType_U8 = 6,
  XLA_FFI_DataType_U16 = 7,
  XLA_FFI_DataType_U32 = 8,
  XLA_FFI_DataType_U64 = 9,
  XLA_FFI_DataType_F16 = 10,
  XLA_FFI_DataType_F32 = 11,
  XLA_FFI_DataType_F64 = 12,
  XLA_FFI_DataType_C64 = 15,
  XLA_FFI_DataType_BF16 = 16,
  XLA_FFI_DataType_C128 = 18,
} XLA_FFI_DataType;

typedef struct {
  size_t struct_size;
  XLA_FFI_Extension_Base* extension_start;
  XLA_FFI_DataType dtype;
  void* data;
  int64_t rank;
  int64_t* dims;
} XLA_FFI_Buffer;

typedef struct XLA_FFI_ExecutionContext XLA_FFI_ExecutionContext;

typedef struct {
  const char* ptr;
  size_t len;
} XLA_FFI_ByteSpan;

typedef enum { XLA_FFI_ExecutionStage_EXECUTE = 3 } XLA_FFI_ExecutionStage;

typedef struct {
  size_t struct_size;
  XLA_FFI_Extension_Base* extension_start;
  int64_t size;
  void* types;
  void** args;
} XLA_FFI_Args;

typedef struct {
  size_t struct_size;
  XLA_FFI_Extension_Base* extension_start;
  int64_t size;
  void* types;
  void** rets;
} XLA_FFI_Rets;

typedef struct {
  size_t struct_size;
  XLA_FFI_Extension_Base* extension_start;
  int64_t size;
  void* types;
  void** names;
  void** attrs;
} XLA_FFI_Attrs;

typedef struct XLA_FFI_Api XLA_FFI_Api;

typedef struct {
  size_t struct_size;
  XLA_FFI_Extension_Base* extension_start;
  const XLA_FFI_Api* api;
  XLA_FFI_ExecutionContext* ctx;
  XLA_FFI_ExecutionStage stage;
  XLA_FFI_Args args;
  XLA_FFI_Rets rets;
  XLA_FFI_Attrs attrs;
  void* future;
} XLA_FFI_CallFrame;

typedef XLA_FFI_Error* XLA_FFI_Handler(XLA_FFI_CallFrame* call_frame);

typedef struct {
  size_t struct_size;
  XLA_FFI_Extension_Base* extension_start;
  XLA_FFI_ExecutionContext* ctx;
  int32_t device_ordinal;
} XLA_FFI_DeviceOrdinal_Get_Args;

typedef struct {
  size_t struct_size;
  XLA_FFI_Api_Version api_version;
  uint32_t traits;
  int64_t state_type_id;
} XLA_FFI_Metadata;

typedef struct {
  XLA_FFI_Extension_Base extension_base;
  XLA_FFI_Metadata* metadata;
} XLA_FFI_Metadata_Extension;

struct XLA_FFI_Api {
  size_t struct_size;
  XLA_FFI_Extension_Base* extension_start;
  XLA_FFI_Api_Version api_version;
  void* internal_api;
  XLA_FFI_Error* (*XLA_FFI_Error_Create)(XLA_FFI_Error_Create_Args* args);
  void* XLA_FFI_Error_GetMessage;
  void* XLA_FFI_Error_Destroy;
  void* XLA_FFI_Handler_Register;
  void* XLA_FFI_Stream_Get;
  void* XLA_FFI_TypeId_Register;
  void* XLA_FFI_ExecutionContext_Get;
  void* XLA_FFI_State_Set;
  void* XLA_FFI_State_Get;
  void* XLA_FFI_DeviceMemory_Allocate;
  void* XLA_FFI_DeviceMemory_Free;
  void* XLA_FFI_ThreadPool_Schedule;
  void* XLA_FFI_ThreadPool_NumThreads;
  void* XLA_FFI_Future_Create;
  void* XLA_FFI_Future_SetAvailable;
  void* XLA_FFI_Future_SetError;
  void* XLA_FFI_RunId_Get;
  XLA_FFI_Error* (*XLA_FFI_DeviceOrdinal_Get)(XLA_FFI_DeviceOrdinal_Get_Args* args);
};

typedef struct {
  size_t struct_size;
  const char* target_name;
  size_t target_name_size;
  XLA_FFI_Handler* handler;
  const char* platform_name;
  size_t platform_name_size;
  int traits;
} PJRT_FFI_Register_Handler_Args;

typedef struct {
  PJRT_Extension_Base base;
  void* type_id_register;
  void* user_data_add;
  PJRT_Error* (*register_handler)(PJRT_FFI_Register_Handler_Args* args);
} PJRT_FFI_Extension;

typedef struct PLUGIN_Profiler_Error PLUGIN_Profiler_Error;

typedef struct {
  size_t struct_size;
  const char* options;
  size_t options_size;
  void* profiler;
} PLUGIN_Profiler_Create_Args;

typedef struct {
  size_t struct_size;
  void* profiler;
  uint8_t* buffer;
  size_t buffer_size_in_bytes;
} PLUGIN_Profiler_CollectData_Args;

typedef struct {
  size_t struct_size;
  void* priv;
  void (*error_destroy)(void* args);
  void (*error_message)(void* args);
  PLUGIN_Profiler_Error* (*error_get_code)(void* args);
  PLUGIN_Profiler_Error* (*create)(PLUGIN_Profiler_Create_Args* args);
  PLUGIN_Profiler_Error* (*destroy)(void* args);
  PLUGIN_Profiler_Error* (*start)(void* args);
  PLUGIN_Profiler_Error* (*stop)(void* args);
  PLUGIN_Profiler_Error* (*collect_data)(PLUGIN_Profiler_CollectData_Args* args);
} PLUGIN_Profiler_Api;

typedef struct {
  PJRT_Extension_Base base;
  PLUGIN_Profiler_Api* profiler_api;
  int64_t traceme_context_id;
} PJRT_Profiler_Extension;

#endif
