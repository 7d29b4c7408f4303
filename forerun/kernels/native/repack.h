// From the blocks of a GGUF file to packed matrices and from those to floats. No number is rounded on the way.
#pragma once
#include "formats.h"
#include "vector.h"

namespace {

// 256 weights of a file's row as integers that are not negative, with the scales of their groups as they are stored.
struct Unpacked {
  uint8_t q[SUPER];
  uint16_t scale[8], minimum[8];  // half precision: of each 32, or in the first place of all 256
  uint8_t small[16], least[8];    // the lower level, Q6_K's sixteen with their signs
};

inline uint16_t half_at(const uint8_t *p) {
  uint16_t h;
  memcpy(&h, p, 2);
  return h;
}
inline void nibbles(const uint8_t *p, uint8_t *q, int n) {  // low halves first, then high ones
  for (int i = 0; i < n; i++) q[i] = p[i] & 15, q[n + i] = p[i] >> 4;
}
inline void fifth_bits(const uint8_t *p, uint8_t *q) {
  uint32_t bits;
  memcpy(&bits, p, 4);
  for (int i = 0; i < 32; i++) q[i] |= (uint8_t)((bits >> i & 1) << 4);
}

const int8_t NONLINEAR[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};  // IQ4_NL's

// A group of 32 values of one of the types with one level of scales.
void unpack_simple(int type, const uint8_t *p, int g, Unpacked &u) {
  uint8_t *q = u.q + 32 * g;
  bool minimum = type == GGML_Q4_1 || type == GGML_Q5_1;
  if (type == GGML_MXFP4) {  // a byte e: 2^(e - 128) times the doubled values; 255 is no number
    u.scale[g] = p[0] == 255 ? 0x7f80 : to_bf16(ldexpf(1.0f, p[0] - 128));
    nibbles(p + 1, q, 16);
    return;
  }
  u.scale[g] = half_at(p);
  if (minimum) u.minimum[g] = half_at(p + 2);
  p += minimum ? 4 : 2;
  if (type == GGML_Q8_0) {
    for (int i = 0; i < 32; i++) q[i] = p[i] ^ 128;
  } else if (type == GGML_IQ4_NL) {
    for (int i = 0; i < 16; i++) q[i] = (uint8_t)(NONLINEAR[p[i] & 15] + 128), q[16 + i] = (uint8_t)(NONLINEAR[p[i] >> 4] + 128);
  } else if (type == GGML_Q5_0 || type == GGML_Q5_1) {
    nibbles(p + 4, q, 16);
    fifth_bits(p, q);
  } else {
    nibbles(p, q, 16);
  }
}

// 256 values of one of the types with two levels of scales.
void unpack_super(int type, const uint8_t *p, Unpacked &u) {
  if (type == GGML_Q4_K || type == GGML_Q5_K) {
    u.scale[0] = half_at(p), u.minimum[0] = half_at(p + 2) ^ 0x8000;  // what is taken off there is added here
    const uint8_t *b = p + 4, *high = p + 16, *low = p + (type == GGML_Q5_K ? 48 : 16);
    for (int j = 0; j < 4; j++) {
      u.small[j] = b[j] & 63, u.least[j] = b[4 + j] & 63;
      u.small[4 + j] = (uint8_t)((b[8 + j] & 15) | b[j] >> 6 << 4);
      u.least[4 + j] = (uint8_t)(b[8 + j] >> 4 | b[4 + j] >> 6 << 4);
    }
    for (int r = 0; r < 4; r++) nibbles(low + 32 * r, u.q + 64 * r, 32);
    if (type == GGML_Q5_K)
      for (int g = 0; g < 8; g++)
        for (int j = 0; j < 32; j++) u.q[32 * g + j] |= (uint8_t)((high[j] >> g & 1) << 4);
  } else if (type == GGML_Q6_K) {
    for (int h = 0; h < 2; h++) {
      const uint8_t *low = p + 64 * h, *high = p + 128 + 32 * h;
      for (int k = 0; k < 4; k++)
        for (int j = 0; j < 32; j++) {
          int four = k < 2 ? low[32 * k + j] & 15 : low[32 * (k - 2) + j] >> 4;
          u.q[128 * h + 32 * k + j] = (uint8_t)(four | (high[j] >> 2 * k & 3) << 4);
        }
    }
    memcpy(u.small, p + 192, 16);
    u.scale[0] = half_at(p + 208);
  } else {  // Q3_K: its -4 to 3 are Q6_K's numbers too
    const uint8_t *high = p, *low = p + 32, *b = p + 96;
    for (int h = 0; h < 2; h++)
      for (int k = 0; k < 4; k++)
        for (int j = 0; j < 32; j++) {
          int q = (low[32 * h + j] >> 2 * k & 3) + (high[j] >> (4 * h + k) & 1) * 4 - 4;
          u.q[128 * h + 32 * k + j] = (uint8_t)(q + 32);
        }
    for (int j = 0; j < 16; j++) {
      int s = (j < 8 ? b[j] & 15 : b[j - 8] >> 4) | (b[8 + j % 4] >> 2 * (j / 4) & 3) << 4;
      u.small[j] = (uint8_t)(s - 32);
    }
    u.scale[0] = half_at(p + 108);
  }
}

inline bool finite(uint16_t h) { return (h & 0x7c00) != 0x7c00; }
inline bool finite(uint16_t h, bool is_bf16) { return is_bf16 ? (h & 0x7f80) != 0x7f80 : finite(h); }

// The integers of 256 (or fewer, in groups of 32) inputs of output o into a block, from input k on: four at a time, as
// they lie one behind the other on both sides.
template <int BITS> void place_all(const uint8_t *q, int count, uint8_t *block, int k, int o) {
  uint8_t *to = block + k / 32 * 128 * BITS + o * 4;
  for (int g = 0; g < count; g += 32, q += 32, to += 128 * BITS) {
    uint32_t four[8], high[2] = {};
    memcpy(four, q, 32);
    for (int t = 0; t < 8; t++) {
      if (BITS == 8) memcpy(to + t * 128, four + t, 4);
      uint32_t above = four[t] >> 4 & 0x0f0f0f0f;
      if (BITS == 5) high[0] |= above << t;
      if (BITS == 6) high[t / 4] |= above << (t % 4 * 2);
    }
    for (int t = 0; BITS < 8 && t < 4; t++) {
      uint32_t both = (four[2 * t] & 0x0f0f0f0f) | (four[2 * t + 1] & 0x0f0f0f0f) << 4;
      memcpy(to + t * 128, &both, 4);
    }
    for (int h = 0; BITS < 8 && h < BITS - 4; h++) memcpy(to + 512 + h * 128, high + h, 4);
  }
}

// Rows of a file, one for each output (null: zeros), to a packed matrix, `weight` and `scale` of its first block. Returns
// whether all scales are finite.
bool repack(int type, int format, const uint8_t *const *rows, int outputs, int inputs, void *weight, void *scale) {
  Layout l = layout(format);
  int padded = (int)padded_inputs(inputs), blocks = (outputs + BLOCK - 1) / BLOCK;
  int64_t bytes = (int64_t)BLOCK * padded * l.bits / 8, scales = scale_bytes(format, padded);
  memset(weight, 0, bytes * blocks);
  memset(scale, 0, scales * blocks);
  int each = type == GGML_Q8_0 ? 34 : type == GGML_Q4_1 ? 20 : type == GGML_Q5_0 ? 22 : type == GGML_Q5_1 ? 24
             : type == GGML_Q4_K ? 144 : type == GGML_Q5_K ? 176 : type == GGML_Q6_K ? 210 : type == GGML_Q3_K ? 110
             : type == GGML_MXFP4 ? 17 : 18;
  auto place_row = l.bits == 8 ? place_all<8> : l.bits == 6 ? place_all<6> : l.bits == 5 ? place_all<5> : place_all<4>;
  bool fine = true;
  Unpacked u{};
  for (int n = 0; n < outputs; n++) {
    const uint8_t *p = rows[n];
    if (!p) continue;
    int o = n % BLOCK;
    uint8_t *block = (uint8_t *)weight + n / BLOCK * bytes;
    uint8_t *to = (uint8_t *)scale + n / BLOCK * scales;
    for (int k = 0; k < inputs; k += SUPER) {
      int count = inputs - k < SUPER ? inputs - k : SUPER;
      if (l.two_level) {
        unpack_super(type, p, u);
        p += each;
        memcpy(to + 2 * o, u.scale, 2);
        if (l.minimum) memcpy(to + LEVEL + 2 * o, u.minimum, 2);
        fine = fine && finite(u.scale[0]) && (!l.minimum || finite(u.minimum[0]));
        to += header_bytes(format);
        for (int g = 0; g < 8; g++, to += 2 * BLOCK) {
          to[o] = l.group == 16 ? u.small[2 * g] : u.small[g];
          to[BLOCK + o] = l.group == 16 ? u.small[2 * g + 1] : u.least[g];
        }
      } else {
        for (int g = 0; g < count / 32; g++, p += each) {
          unpack_simple(type, p, g, u);
          memcpy(to + 2 * o, u.scale + g, 2);
          if (l.minimum) memcpy(to + LEVEL + 2 * o, u.minimum + g, 2);
          fine = fine && finite(u.scale[g], l.coded) && (!l.minimum || finite(u.minimum[g]));
          to += header_bytes(format);
        }
      }
      place_row(u.q, count, block, k, o);
    }
  }
  return fine;
}

// Row `output` of a packed matrix as floats [inputs]: how embeddings are read, and what tests compare with.
void unpack_row(const Matrix &a, int64_t output, float *to) {
  Layout l = layout(a.format);
  int o = output % BLOCK;
  const uint8_t *block = (const uint8_t *)a.weight + output / BLOCK * block_bytes(a);
  const uint8_t *scales = (const uint8_t *)a.scale + output / BLOCK * scale_bytes(a.format, a.padded);
  if (!l.group) {
    for (int k = 0; k < a.inputs; k++)
      if (a.format == F32) to[k] = ((const float *)block)[k * BLOCK + o];
      else if (a.format == F16) to[k] = half(((const uint16_t *)block)[k * BLOCK + o]);
      else if (a.format == BF16) to[k] = from_bf16(((const uint16_t *)block)[k / 2 * 2 * BLOCK + 2 * o + k % 2]);
      else to[k] = ((const float *)a.scale)[output] * (float)(take(8, block, k, o) - l.offset);
    return;
  }
  float scale = 0, minimum = 0, upper_scale = 0, upper_minimum = 0;
  for (int k = 0; k < a.inputs; k++) {
    if (l.two_level && k % SUPER == 0) {
      upper_scale = half(half_at(scales + 2 * o)), upper_minimum = l.minimum ? half(half_at(scales + LEVEL + 2 * o)) : 0;
      scales += header_bytes(a.format);
    }
    if (k % 32 == 0 && !l.two_level) {
      scale = l.coded ? from_bf16(half_at(scales + 2 * o)) : half(half_at(scales + 2 * o));
      minimum = l.minimum ? half(half_at(scales + LEVEL + 2 * o)) : 0;
      scales += header_bytes(a.format);
    }
    if (k % 16 == 0 && l.two_level) {
      const uint8_t *small = scales + k % SUPER / 32 * 2 * BLOCK + o;
      if (l.group == 16) scale = upper_scale * (float)(int8_t)small[k % 32 / 16 * BLOCK];
      else scale = upper_scale * (float)small[0], minimum = upper_minimum * (float)small[BLOCK];
    }
    int q = take(l.bits, block, k, o);
    float v = scale * (float)((l.coded ? mx_values[q] : q) - l.offset);
    to[k] = l.minimum ? v + minimum : v;
    if (l.two_level && k % SUPER == SUPER - 1) scales += SUPER / 32 * 2 * BLOCK;
  }
}

}  // namespace
