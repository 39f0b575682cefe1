// CRC-32 as in zlib, at the speed of memory: by carry-less multiplication, where the CPU has it. For bindings.cpp.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gemini {

// Whether crc32 can be called here.
bool has_crc32();

// Goes on from `crc` (0 at the beginning) over num_bytes, a multiple of 16 and at least 64.
uint32_t crc32(const void* data, size_t num_bytes, uint32_t crc);

}  // namespace gemini
