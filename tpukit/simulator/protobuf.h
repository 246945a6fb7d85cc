// As much of protobuf's wire format as reading and rewriting an HLO module takes.
#ifndef SIMULATOR_PROTOBUF_H_
#define SIMULATOR_PROTOBUF_H_

#include "simulator.h"

typedef struct {
  const uint8_t *at, *end;
} Span;

typedef struct {
  int number;       // of the field
  uint64_t value;   // of an integer
  Span content;     // of a string, bytes or a message; empty for a number
  Span whole;       // with its tag
  int is_integer;
} Field;

int next_field(Span* message, Field* field);  // 0 at the end, or where the bytes are no protobuf
int equals(Span text, const char* other);
int integers(const Field* field, int* numbers, int count, int most);  // adds a repeated integer's, packed or not

void put(Bytes* to, const void* bytes, size_t size);
void put_integer(Bytes* to, int number, uint64_t value);
void put_content(Bytes* to, int number, const void* bytes, size_t size);

#endif
