// As much of protobuf's wire format as reading and rewriting an HLO module takes.
#include "protobuf.h"

#include <stdlib.h>
#include <string.h>

static uint64_t read_varint(Span* from) {
  uint64_t value = 0;
  for (int shift = 0; from->at < from->end && shift < 64; shift += 7) {
    uint8_t byte = *from->at++;
    value |= (uint64_t)(byte & 127) << shift;
    if (byte < 128) break;
  }
  return value;
}

int next_field(Span* message, Field* field) {
  if (message->at >= message->end) return 0;
  *field = (Field){.whole = {message->at, message->at}};
  uint64_t tag = read_varint(message), size = 0;
  field->number = (int)(tag >> 3);
  switch (tag & 7) {
    case 0: field->value = read_varint(message); field->is_integer = 1; break;
    case 1: size = 8; break;
    case 2: size = read_varint(message); break;
    case 5: size = 4; break;
    default: return 0;
  }
  if (size > (uint64_t)(message->end - message->at)) return 0;
  field->content = (Span){message->at, message->at + size};
  message->at += size;
  field->whole.end = message->at;
  return 1;
}

int equals(Span text, const char* other) {
  size_t size = strlen(other);
  return (size_t)(text.end - text.at) == size && !memcmp(text.at, other, size);
}

int integers(const Field* field, int* numbers, int count, int most) {
  if (field->is_integer) {
    if (count < most) numbers[count] = (int)field->value;
    return count + (count < most);
  }
  for (Span packed = field->content; packed.at < packed.end && count < most;) numbers[count++] = (int)read_varint(&packed);
  return count;
}

void put(Bytes* to, const void* bytes, size_t size) {
  if (to->size + size > to->room) {
    to->room = 2 * (to->size + size) + 1024;
    to->bytes = realloc(to->bytes, to->room);
  }
  memcpy(to->bytes + to->size, bytes, size);
  to->size += size;
}

static void put_varint(Bytes* to, uint64_t value) {
  uint8_t bytes[10];
  int size = 0;
  for (; value > 127; value >>= 7) bytes[size++] = (uint8_t)(value | 128);
  bytes[size++] = (uint8_t)value;
  put(to, bytes, size);
}

void put_integer(Bytes* to, int number, uint64_t value) {
  put_varint(to, (uint64_t)number << 3);
  put_varint(to, value);
}

void put_content(Bytes* to, int number, const void* bytes, size_t size) {
  put_varint(to, (uint64_t)number << 3 | 2);
  put_varint(to, size);
  put(to, bytes, size);
}
