// The packed formats: how many bits a weight has, what shares a scale, and where the bits of 32 inputs times 32 outputs lie.
//
// A block is 32 outputs. INT4 and what follows it in `Format` hold the integers of GGUF's types as they are stored there,
// in groups of inputs. The weights of 32 inputs of a block lie together:
//
//   8 bits: eight lines of 128 bytes; in line t, inputs 4t to 4t + 3 of output 0, of output 1, and so on.
//   4 bits: four lines; in line t the low halves of the bytes are inputs 8t to 8t + 3, the high halves 8t + 4 to 8t + 7.
//   5 bits: the lines of 4 bits, then one whose byte 4o + j holds the fifth bits: bit t is that of input 4t + j.
//   6 bits: the lines of 4 bits, then two; two bits of byte 4o + j of line h, from 2t up, are those of input 16h + 4t + j.
//
// Scales lie apart, in the order of inputs, 32 outputs side by side: in half precision (of MXFP4 in bfloat16, which holds its
// powers of two) for each group, behind it the minimum where there is one; or, of two levels, in half precision for 256 inputs (and that of the minima), followed by
// whole numbers of a byte for each of their groups.
#pragma once
#include "common.h"

namespace {

struct Layout {
  int bits, group, offset;    // of a weight; inputs that share a scale; what is added to make integers unsigned
  bool two_level, minimum;    // the scale of a group is a byte times that of 256 inputs; groups have a least value
  bool coded = false;         // the four bits are an index into MX_VALUES, and scales are bfloat16
};

constexpr Layout layout(int format) {
  return format == INT4   ? Layout{4, 32, 8, false, false}
         : format == Q8_0 ? Layout{8, 32, 128, false, false}
         : format == Q4_1 ? Layout{4, 32, 0, false, true}
         : format == Q5_0 ? Layout{5, 32, 16, false, false}
         : format == Q5_1 ? Layout{5, 32, 0, false, true}
         : format == Q4_K ? Layout{4, 32, 0, true, true}
         : format == Q5_K ? Layout{5, 32, 0, true, true}
         : format == Q6_K ? Layout{6, 16, 32, true, false}
         : format == MXFP4 ? Layout{4, 32, 12, false, false, true}
         : format == INT8 ? Layout{8, 0, 128, false, false}
         : format == F32  ? Layout{32, 0, 0, false, false}
                          : Layout{16, 0, 0, false, false};
}
constexpr bool grouped(int format) { return layout(format).group; }
constexpr bool bytes_as_they_are(int format) { return format == INT8 || format == Q8_0; }  // products of AVX2 want 16 bits

// The values of e2m1, doubled, plus 12: 0, 1/2, 1, 3/2, 2, 3, 4, 6 and their negatives.
#define MX_VALUES 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0
constexpr uint8_t mx_values[16] = {MX_VALUES};

constexpr int SUPER = 256;                                     // inputs under one scale of the upper of two levels
constexpr int LEVEL = BLOCK * 2;                               // bytes of half-precision numbers for a block
constexpr int chunk_bytes(int format) { return 128 * layout(format).bits; }  // of the weights of 32 inputs
constexpr int header_bytes(int format) { return LEVEL * (layout(format).minimum ? 2 : 1); }
constexpr int scale_bytes(int format, int inputs) {            // of a block, for so many inputs
  return !grouped(format)            ? 0
         : layout(format).two_level ? inputs / SUPER * (header_bytes(format) + SUPER / 32 * 2 * BLOCK)
                                    : inputs / 32 * header_bytes(format);
}
inline int64_t block_bytes(const Matrix &a) { return (int64_t)BLOCK * a.padded * layout(a.format).bits / 8; }

// Where the number of input k of a block lies.
inline int low_byte(int bits, int k, int o) {  // byte of 8 bits, or that with the lower four
  int t = k % 32 / 4, j = k % 4;
  return k / 32 * 128 * bits + (bits == 8 ? t * 128 : t / 2 * 128) + o * 4 + j;
}
inline int upper(int bits, int k, int o) {  // byte with what is above the lower four
  return k / 32 * 128 * bits + 512 + (bits == 6 ? k % 32 / 16 * 128 : 0) + o * 4 + k % 4;
}
inline int take(int bits, const uint8_t *block, int k, int o) {  // unsigned
  int t = k % 32 / 4, low = block[low_byte(bits, k, o)];
  if (bits == 8) return low;
  low = low >> (t % 2 * 4) & 15;
  if (bits == 4) return low;
  int high = block[upper(bits, k, o)];
  return low | (bits == 5 ? (high >> t & 1) : (high >> (t % 4 * 2) & 3)) << 4;
}
inline void put(int bits, uint8_t *block, int k, int o, int q) {  // into zeros
  int t = k % 32 / 4;
  uint8_t &low = block[low_byte(bits, k, o)];
  if (bits == 8) {
    low = (uint8_t)q;
    return;
  }
  low |= (uint8_t)((q & 15) << (t % 2 * 4));
  if (bits > 4) block[upper(bits, k, o)] |= (uint8_t)(q >> 4 << (bits == 5 ? t : t % 4 * 2));
}

}  // namespace
