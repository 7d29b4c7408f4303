// All operations, written once over 16-lane vectors and compiled once for each instruction set (VARIANT names it).
//
// The rule that makes speculation exact: what a row gets depends on that row's data alone. Every output accumulates over
// its inputs in one fixed order, whatever the number of rows, tiles or threads; attention walks keys in groups of 16
// by logical position. Contraction is off and fused multiply-adds are explicit, so that every tile height rounds alike.
#include <cmath>
#include <cstring>
#include <immintrin.h>

#include "common.h"

namespace {

typedef float vf __attribute__((vector_size(64), aligned(64)));
typedef float vfu __attribute__((vector_size(64), aligned(4)));
typedef int32_t vi __attribute__((vector_size(64), aligned(64)));
typedef uint32_t vu __attribute__((vector_size(64), aligned(64)));
typedef uint16_t vh __attribute__((vector_size(32), aligned(2)));
typedef int8_t vb __attribute__((vector_size(16), aligned(1)));

constexpr int W = 16;

inline vf set1(float x) { return vf{} + x; }
inline vf load(const float *p) { return *reinterpret_cast<const vfu *>(p); }
inline void store(float *p, vf v) { *reinterpret_cast<vfu *>(p) = v; }
inline vf as_float(vi x) { return (vf)x; }  // the bits, not the value
inline vi as_int(vf x) { return (vi)x; }
inline vf pick(vi mask, vf a, vf b) { return as_float((mask & as_int(a)) | (~mask & as_int(b))); }

#if defined(__AVX512F__)
inline vf fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline vf largest(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
inline vi nearest(vf a) { return (vi)_mm512_cvtps_epi32((__m512)a); }
#elif defined(__FMA__)
inline vf fma(vf a, vf b, vf c) {
  union { vf v; __m256 h[2]; } x{a}, y{b}, z{c};
  for (int i = 0; i < 2; i++) z.h[i] = _mm256_fmadd_ps(x.h[i], y.h[i], z.h[i]);
  return z.v;
}
inline vf largest(vf a, vf b) { return pick(a > b, a, b); }
inline vi nearest(vf a) {
  union { vf v; __m256 h[2]; } x{a};
  union { vi v; __m256i h[2]; } y;
  for (int i = 0; i < 2; i++) y.h[i] = _mm256_cvtps_epi32(x.h[i]);
  return y.v;
}
#else
inline vf fma(vf a, vf b, vf c) { return a * b + c; }
inline vf largest(vf a, vf b) { return pick(a > b, a, b); }
inline vi nearest(vf a) {
  vi r;
  for (int i = 0; i < W; i++) r[i] = (int32_t)lrintf(a[i]);
  return r;
}
#endif

inline float sum(vf v) {  // in one fixed order
  float a[W];
  store(a, v);
  for (int s = W / 2; s; s /= 2)
    for (int i = 0; i < s; i++) a[i] = a[i] + a[i + s];
  return a[0];
}
inline float top(vf v) {
  float m = v[0];
  for (int i = 1; i < W; i++) m = v[i] > m ? v[i] : m;
  return m;
}

inline vf from_bf16(const uint16_t *p) {
  vu x = __builtin_convertvector(*reinterpret_cast<const vh *>(p), vu) << 16;
  return (vf)x;
}
inline void to_bf16(uint16_t *p, vf v) {  // round to nearest, ties to even
  vu x = (vu)v;
  x = (x + 0x7fff + ((x >> 16) & 1)) >> 16;
  *reinterpret_cast<vh *>(p) = __builtin_convertvector(x, vh);
}
inline float half(uint16_t h) {  // IEEE half, finite
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
  float f;
  uint32_t bits = rest << 13;
  memcpy(&f, &bits, 4);
  f = f * 0x1p112f;
  memcpy(&bits, &f, 4);
  bits |= sign;
  memcpy(&f, &bits, 4);
  return f;
}
inline uint16_t to_half(float f) {
  uint32_t x;
  memcpy(&x, &f, 4);
  uint32_t sign = (x >> 16) & 0x8000, rest = x & 0x7fffffff;
  float scaled;
  memcpy(&scaled, &rest, 4);
  scaled = scaled * 0x1p-112f;
  memcpy(&rest, &scaled, 4);
  rest = (rest + 0xfff + ((rest >> 13) & 1)) >> 13;
  return (uint16_t)(sign | (rest > 0x7bff ? 0x7bff : rest));
}
inline vf half16(const uint16_t *p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#else
  vf r;
  for (int i = 0; i < W; i++) r[i] = half(p[i]);
  return r;
#endif
}

// exp on 16 lanes: x = n ln 2 + r, a polynomial of degree 6 on r; relative error below 2e-7. Arguments are clamped.
inline vf vexp(vf x) {
  x = pick(x < -87.0f, set1(-87.0f), x);
  x = pick(x > 88.0f, set1(88.0f), x);
  vi n = nearest(x * 1.44269504f);
  vf f = __builtin_convertvector(n, vf);
  vf r = fma(f, set1(-0.693145752f), x);
  r = fma(f, set1(-1.42860677e-6f), r);
  vf p = set1(1.0f / 720);
  p = fma(p, r, set1(1.0f / 120));
  p = fma(p, r, set1(1.0f / 24));
  p = fma(p, r, set1(1.0f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  return p * as_float((n + 127) << 23);
}
inline vf vtanh(vf x) {
  vf e = vexp(x * 2.0f);
  return (e - 1.0f) / (e + 1.0f);
}
inline vf activate(vf x, int kind) {
  if (kind == SILU) return x / (vexp(-x) + 1.0f);
  if (kind == GELU_TANH) return x * 0.5f * (vtanh((x + x * x * x * 0.044715f) * 0.797884561f) + 1.0f);
  if (kind == GELU)
    for (int i = 0; i < W; i++) x[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.707106781f));
  return x;
}

// ---------------------------------------------------------------- one row: norms and conversion

// out = norm(x) [n]; vectors along the row, the tail padded with zeros.
void normalise(const float *x, const Norm &norm, int n, float *out) {
  if (norm.kind == NO_NORM) {
    if (out != x) memcpy(out, x, sizeof(float) * n);
    return;
  }
  auto part = [&](const float *p, int i) {
    if (i + W <= n) return load(p + i);
    vf v{};
    for (int j = 0; i + j < n; j++) v[j] = p[i + j];
    return v;
  };
  float mean = 0;
  if (norm.kind == LAYER) {
    vf s{};
    for (int i = 0; i < n; i += W) s = s + part(x, i);
    mean = sum(s) / n;
  }
  vf s{};
  for (int i = 0; i < n; i += W) {
    vf v = part(x, i) - mean;
    if (i + W > n)
      for (int j = n - i; j < W; j++) v[j] = 0;
    s = fma(v, v, s);
  }
  float scale = 1.0f / sqrtf(sum(s) / n + norm.eps);
  int i = 0;
  for (; i + W <= n; i += W) {
    vf y = (load(x + i) - mean) * scale * load(norm.weight + i);
    store(out + i, norm.bias ? y + load(norm.bias + i) : y);
  }
  for (; i < n; i++) {
    float y = (x[i] - mean) * scale * norm.weight[i];
    out[i] = norm.bias ? y + norm.bias[i] : y;
  }
}

// A row of activations as the product wants it, in scratch: values, then scales [P/64], then sums [P/32].
struct Row {
  char *base;
  int padded;
  float *f32() const { return (float *)base; }
  uint16_t *bf16() const { return (uint16_t *)base; }
  int8_t *int8() const { return (int8_t *)base; }
  float *scales() const { return (float *)(base + (int64_t)padded * 4); }
  int32_t *sums() const { return (int32_t *)(base + (int64_t)padded * 4) + padded / GROUP8; }
};

void convert(const float *x, int n, int format, Row row) {  // x is padded with zeros to row.padded
  for (int i = n; i < row.padded; i++) const_cast<float *>(x)[i] = 0;
  if (format == F32) memcpy(row.f32(), x, sizeof(float) * row.padded);
  if (format == BF16)
    for (int i = 0; i < row.padded; i += W) to_bf16(row.bf16() + i, load(x + i));
  if (format != INT8 && format != INT4) return;
  for (int g = 0; g < row.padded / GROUP8; g++) {
    const float *v = x + g * GROUP8;
    vf most{};
    for (int i = 0; i < GROUP8; i += W) {
      vf a = load(v + i);
      most = largest(most, largest(a, -a));
    }
    float amax = top(most), inverse = amax > 0 ? 127.0f / amax : 0.0f;
    row.scales()[g] = amax / 127.0f;
    for (int half_ = 0; half_ < 2; half_++) {
      vi total{};
      for (int i = half_ * 32; i < half_ * 32 + 32; i += W) {
        vi q = nearest(load(v + i) * inverse);
        total = total + q;
        *reinterpret_cast<vb *>(row.int8() + g * GROUP8 + i) = __builtin_convertvector(q, vb);
      }
      int32_t t = 0;
      for (int j = 0; j < W; j++) t += total[j];
      row.sums()[2 * g + half_] = t;
    }
  }
}

// ---------------------------------------------------------------- products: M rows times a block of 32 outputs

template <int M> struct Tile { vf v[M][2]; };

inline void ahead(const void *p) {  // the weight stream is read once, forwards
  _mm_prefetch((const char *)p + 1024, _MM_HINT_T0);
  _mm_prefetch((const char *)p + 1088, _MM_HINT_T0);
}

template <int M> inline Tile<M> product_f32(const float *w, const Row *rows, int padded) {
  Tile<M> t{};
  for (int k = 0; k < padded; k++, w += BLOCK) {
    vf w0 = load(w), w1 = load(w + W);
    ahead(w);
    for (int m = 0; m < M; m++) {
      vf x = set1(rows[m].f32()[k]);
      t.v[m][0] = fma(w0, x, t.v[m][0]);
      t.v[m][1] = fma(w1, x, t.v[m][1]);
    }
  }
  return t;
}

#if defined(__AVX512BF16__)
template <int M> inline Tile<M> product_bf16(const uint16_t *w, const Row *rows, int padded) {
  __m512 acc[M][2];
  for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = _mm512_setzero_ps();
  for (int k = 0; k < padded; k += 2, w += 2 * BLOCK) {
    __m512bh w0 = (__m512bh)_mm512_loadu_si512(w), w1 = (__m512bh)_mm512_loadu_si512(w + 32);
    ahead(w);
    for (int m = 0; m < M; m++) {
      __m512bh x = (__m512bh)_mm512_set1_epi32(*(const int32_t *)(rows[m].bf16() + k));
      acc[m][0] = _mm512_dpbf16_ps(acc[m][0], w0, x);
      acc[m][1] = _mm512_dpbf16_ps(acc[m][1], w1, x);
    }
  }
  Tile<M> t;
  for (int m = 0; m < M; m++)
    for (int c = 0; c < 2; c++) t.v[m][c] = (vf)acc[m][c];
  return t;
}
#else
template <int M> inline Tile<M> product_bf16(const uint16_t *w, const Row *rows, int padded) {
  Tile<M> t{};
  for (int k = 0; k < padded; k += 2, w += 2 * BLOCK)
    for (int c = 0; c < 2; c++) {
      vu pair = *reinterpret_cast<const vu *>(w + c * BLOCK);  // low half: input k, high half: input k + 1
      vu low = pair << 16, high = pair & 0xffff0000u;
      vf even = (vf)low, odd = (vf)high;
      for (int m = 0; m < M; m++) {
        uint32_t a = (uint32_t)rows[m].bf16()[k] << 16, b = (uint32_t)rows[m].bf16()[k + 1] << 16;
        float x, y;
        memcpy(&x, &a, 4);
        memcpy(&y, &b, 4);
        t.v[m][c] = fma(odd, set1(y), fma(even, set1(x), t.v[m][c]));
      }
    }
  return t;
}
#endif

// acc += four unsigned weights times four signed activations, in each of 16 lanes
inline vi dot4(vi acc, vi weights, const int8_t *x) {
  int32_t four;
  memcpy(&four, x, 4);
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)weights, _mm512_set1_epi32(four));
#else
  for (int b = 0; b < 4; b++) acc = acc + ((weights >> (8 * b)) & 0xff) * (int32_t)x[b];
  return acc;
#endif
}
inline vi bytes(const void *p) {
  vi v;
  memcpy(&v, p, 64);
  return v;
}

// INT8 weights are stored plus 128, INT4 plus 8: the sum of the activations takes that off again, exactly. The float sums
// live in `out`: the integer ones need the registers, and a group is long enough to pay for the way to memory.
template <int M> inline void product_int8(const uint8_t *w, const Row *rows, int padded, float (*out)[BLOCK]) {
  const int8_t *x[M];
  for (int m = 0; m < M; m++) {
    x[m] = rows[m].int8();
    store(out[m], vf{});
    store(out[m] + W, vf{});
  }
  for (int g = 0; g < padded / GROUP8; g++) {
    vi acc[M][2];
    for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = vi{} - 128 * (rows[m].sums()[2 * g] + rows[m].sums()[2 * g + 1]);
    for (int k = g * GROUP8; k < (g + 1) * GROUP8; k += 4, w += 4 * BLOCK) {
      vi w0 = bytes(w), w1 = bytes(w + 64);
      ahead(w);
      for (int m = 0; m < M; m++) {
        acc[m][0] = dot4(acc[m][0], w0, x[m] + k);
        acc[m][1] = dot4(acc[m][1], w1, x[m] + k);
      }
    }
    for (int m = 0; m < M; m++) {
      vf scale = set1(rows[m].scales()[g]);
      for (int c = 0; c < 2; c++)
        store(out[m] + c * W, fma(__builtin_convertvector(acc[m][c], vf), scale, load(out[m] + c * W)));
    }
  }
}

template <int M>
inline void product_int4(const uint8_t *w, const uint16_t *scale, const Row *rows, int padded, float (*out)[BLOCK]) {
  const int8_t *x[M];
  for (int m = 0; m < M; m++) {
    x[m] = rows[m].int8();
    store(out[m], vf{});
    store(out[m] + W, vf{});
  }
  for (int g = 0; g < padded / GROUP4; g++, scale += BLOCK) {
    vi acc[M][2];
    for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = vi{} - 8 * rows[m].sums()[g];
    for (int k = g * GROUP4; k < (g + 1) * GROUP4; k += 8, w += 4 * BLOCK) {
      ahead(w);
      for (int c = 0; c < 2; c++) {
        vi both = bytes(w + 64 * c), low = both & 0x0f0f0f0f, high = (both >> 4) & 0x0f0f0f0f;
        for (int m = 0; m < M; m++) {
          acc[m][c] = dot4(acc[m][c], low, x[m] + k);
          acc[m][c] = dot4(acc[m][c], high, x[m] + k + 4);
        }
      }
    }
    vf s[2] = {half16(scale), half16(scale + W)};
    for (int m = 0; m < M; m++)
      for (int c = 0; c < 2; c++)
        store(out[m] + c * W, fma(__builtin_convertvector(acc[m][c], vf), s[c] * rows[m].scales()[g / 2], load(out[m] + c * W)));
  }
}

template <int M> void product(const Matrix &a, int block, const Row *rows, float (*out)[BLOCK]) {
  int64_t at = (int64_t)block * BLOCK * a.padded;
  if (a.format == INT4)
    return product_int4<M>((const uint8_t *)a.weight + at / 2, (const uint16_t *)a.scale + at / GROUP4, rows, a.padded, out);
  if (a.format == INT8) {
    product_int8<M>((const uint8_t *)a.weight + at, rows, a.padded, out);
    for (int m = 0; m < M; m++)
      for (int c = 0; c < 2; c++)
        store(out[m] + c * W, load(out[m] + c * W) * load((const float *)a.scale + block * BLOCK + c * W));
    return;
  }
  Tile<M> t = a.format == F32 ? product_f32<M>((const float *)a.weight + at, rows, a.padded)
                              : product_bf16<M>((const uint16_t *)a.weight + at, rows, a.padded);
  for (int m = 0; m < M; m++)
    for (int c = 0; c < 2; c++) store(out[m] + c * W, t.v[m][c]);
}

using Product = void (*)(const Matrix &, int, const Row *, float (*)[BLOCK]);
constexpr int TALLEST = 12;
const Product products[TALLEST + 1] = {nullptr,     product<1>, product<2>, product<3>,  product<4>,  product<5>, product<6>,
                                       product<7>,  product<8>, product<9>, product<10>, product<11>, product<12>};

// ---------------------------------------------------------------- operations

struct Share { int from, to; };
inline Share share(int n, int thread, int threads) {
  return {(int)((int64_t)n * thread / threads), (int)((int64_t)n * (thread + 1) / threads)};
}
inline float *at(const Program *p, const Batch *b, int buffer, int64_t row) {
  return b->buffers[buffer] + row * p->widths[buffer];
}

void embed(const Program *p, const Op *op, const Batch *b, int thread, int threads) {
  Share s = share(b->tokens, thread, threads);
  int hidden = op->matrix.inputs;
  for (int t = s.from; t < s.to; t++) {
    float *out = at(p, b, op->out, t);
    int64_t from = b->ids[t] * hidden;
    for (int i = 0; i < hidden; i++) {
      float v;
      if (op->matrix.format == BF16) {
        uint32_t bits = (uint32_t)((const uint16_t *)op->table)[from + i] << 16;
        memcpy(&v, &bits, 4);
      } else {
        v = ((const float *)op->table)[from + i];
      }
      out[i] = v * op->scale + (op->positions ? op->positions[b->positions[t] * hidden + i] : 0.0f);
    }
  }
}

Row scratch_row(const Matrix &a, const Batch *b, int row) {
  return {(char *)b->scratch + row * scratch_row_bytes(a.inputs), a.padded};
}

void prepare(const Program *p, const Op *op, const Batch *b, int thread, int threads) {
  const Matrix &a = op->matrix;
  Share s = share(op->wanted ? b->wanted : b->tokens, thread, threads);
  alignas(64) float row[a.padded + W];
  for (int t = s.from; t < s.to; t++) {
    normalise(at(p, b, op->in, op->wanted ? b->want[t] : t), op->norm, a.inputs, row);
    convert(row, a.inputs, a.format, scratch_row(a, b, t));
  }
}

void finish_tile(const Program *p, const Op *op, const Batch *b, int block, int first, int rows, float (*tile)[BLOCK]) {
  const Matrix &a = op->matrix;
  int count = a.outputs - block * BLOCK < BLOCK ? a.outputs - block * BLOCK : BLOCK;
  for (int m = 0; m < rows; m++) {
    vf v[2] = {load(tile[m]), load(tile[m] + W)};
    if (a.bias)
      for (int c = 0; c < 2; c++) v[c] = v[c] + load(a.bias + block * BLOCK + c * W);
    if (op->gated) {  // 16 gates, then the 16 values they let through
      v[0] = activate(v[0], op->activation) * v[1];
      float *out = at(p, b, op->out, first + m) + block * W;
      if (count == BLOCK) store(out, v[0]);
      else for (int i = 0; i < count / 2; i++) out[i] = v[0][i];
      continue;
    }
    float *out = at(p, b, op->out, first + m) + block * BLOCK;
    for (int c = 0; c < 2; c++) {
      if (op->activation) v[c] = activate(v[c], op->activation);
      if (op->softcap > 0) v[c] = vtanh(v[c] / op->softcap) * op->softcap;
      if (count == BLOCK) {
        store(out + c * W, op->residual ? load(out + c * W) + v[c] : v[c]);
        continue;
      }
      for (int i = 0; i < W; i++) {
        int j = c * W + i;
        if (j < count) out[j] = op->residual ? out[j] + v[c][i] : v[c][i];
      }
    }
  }
}

void multiply(const Program *p, const Op *op, const Batch *b, int thread, int threads) {
  const Matrix &a = op->matrix;
  int rows = op->wanted ? b->wanted : b->tokens, tallest = a.format == INT8 || a.format == INT4 ? 8 : TALLEST;
  Share s = share((a.outputs + BLOCK - 1) / BLOCK, thread, threads);
  int tiles = (rows + tallest - 1) / tallest;
  alignas(64) float tile[TALLEST][BLOCK];
  for (int block = s.from; block < s.to; block++)
    for (int i = 0; i < tiles; i++) {
      Share r = share(rows, i, tiles);
      Row row[TALLEST];
      for (int m = r.from; m < r.to; m++) row[m - r.from] = scratch_row(a, b, m);
      products[r.to - r.from](a, block, row, tile);
      finish_tile(p, op, b, block, r.from, r.to - r.from, tile);
    }
}

void after(const Program *p, const Op *op, const Batch *b, int thread, int threads) {
  Share s = share(b->tokens, thread, threads);
  int n = op->matrix.outputs, target = op->layer;  // `out` holds the product, `layer` names the residual stream
  float row[n];
  for (int t = s.from; t < s.to; t++) {
    normalise(at(p, b, op->out, t), op->after, n, row);
    float *x = at(p, b, target, t);
    for (int i = 0; i < n; i++) x[i] = x[i] + row[i];
  }
}

// Norms and rotary embedding of queries and keys; keys and values go to the cache.
void rotate(const Program *p, const Op *op, const Batch *b, int thread, int threads) {
  Share s = share(b->tokens, thread, threads);
  int d = p->head_dim, half_ = op->rotary / 2;
  for (int t = s.from; t < s.to; t++) {
    float *head = at(p, b, op->in, t);
    for (int h = 0; h < p->heads + p->kv_heads; h++, head += d) {
      const Norm &norm = h < p->heads ? op->norm : op->key_norm;
      if (norm.kind != NO_NORM) normalise(head, norm, d, head);
      if (!op->cosine) continue;
      const float *cosine = op->cosine + b->positions[t] * half_, *sine = op->sine + b->positions[t] * half_;
      int i = 0;
      for (; i + W <= half_; i += W) {
        vf x = load(head + i), y = load(head + half_ + i), c = load(cosine + i), d_ = load(sine + i);
        store(head + i, x * c - y * d_);
        store(head + half_ + i, y * c + x * d_);
      }
      for (; i < half_; i++) {
        float x = head[i], y = head[i + half_];
        head[i] = x * cosine[i] - y * sine[i];
        head[i + half_] = y * cosine[i] + x * sine[i];
      }
    }
    const float *key = at(p, b, op->in, t) + p->heads * d, *value = key + p->kv_heads * d;
    int64_t to = op->layer * b->layer_stride + b->store[t] * p->kv_heads * d;
    int n = p->kv_heads * d, i = 0;
    for (; i + W <= n; i += W) {
      vf k = load(key + i), v = load(value + i);
      if (b->kv_format == BF16) {
        to_bf16((uint16_t *)b->keys + to + i, k);
        to_bf16((uint16_t *)b->values + to + i, v);
      } else {
        store((float *)b->keys + to + i, k);
        store((float *)b->values + to + i, v);
      }
    }
    for (; i < n; i++) {
      if (b->kv_format == BF16) {
        auto round = [](float f) {
          uint32_t x;
          memcpy(&x, &f, 4);
          return (uint16_t)((x + 0x7fff + ((x >> 16) & 1)) >> 16);
        };
        ((uint16_t *)b->keys)[to + i] = round(key[i]);
        ((uint16_t *)b->values)[to + i] = round(value[i]);
      } else {
        ((float *)b->keys)[to + i] = key[i];
        ((float *)b->values)[to + i] = value[i];
      }
    }
  }
}

inline vf cached(const void *data, int format, int64_t i) {
  return format == BF16 ? from_bf16((const uint16_t *)data + i) : load((const float *)data + i);
}

// Sixteen keys of one head, channel by channel: block[c][j] is channel c of key j. Missing keys are zero.
void transpose_keys(const void *keys, int format, const int64_t *offsets, int count, int d, float *block) {
  for (int c = 0; c < d; c += W) {
    vf r[W];
    for (int j = 0; j < W; j++) r[j] = j < count ? cached(keys, format, offsets[j] + c) : vf{};
    for (int s = W / 2; s; s /= 2) {  // swap off-diagonal s x s blocks
      for (int j = 0; j < W; j++) {
        if (j & s) continue;
        vi low, high;
        for (int i = 0; i < W; i++) low[i] = i & s ? W + (i ^ s) : i, high[i] = i & s ? W + i : i ^ s;
        vf a = r[j], e = r[j | s];
        r[j] = __builtin_shuffle(a, e, low);
        r[j | s] = __builtin_shuffle(a, e, high);
      }
    }
    for (int j = 0; j < W; j++) store(block + (c + j) * W, r[j]);
  }
}

constexpr int TOKENS = 8;     // tokens of one slot that share what they read of the cache
constexpr int SHARERS = 16;   // query heads that share a key head, at most, in one go

// One token, one key head, one group of 16 keys: scores, running maximum and sum, weighted values.
struct State { float most, total; };

void attend_group(const Program *p, const Op *op, const Batch *b, const float *q, int sharers, const float *block,
                  const int64_t *offsets, int from, int to, State *state, float *out) {
  int d = p->head_dim, wide = (d + W - 1) / W * W;
  vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  vi seen = (lane >= from) & (lane < to);
  vf score[SHARERS];
  for (int g = 0; g < sharers; g++) score[g] = vf{};
  for (int c = 0; c < d; c++) {
    vf k = load(block + c * W);
    for (int g = 0; g < sharers; g++) score[g] = fma(k, set1(q[g * d + c]), score[g]);
  }
  alignas(64) float weight[SHARERS][W];
  for (int g = 0; g < sharers; g++) {
    vf s = score[g] * op->scale;
    if (op->softcap > 0) s = vtanh(s / op->softcap) * op->softcap;
    s = pick(seen, s, set1(-INFINITY));
    float most = top(s);
    most = most > state[g].most ? most : state[g].most;
    float keep = state[g].total > 0 ? vexp(set1(state[g].most - most))[0] : 0.0f;
    vf e = pick(seen, vexp(s - most), vf{});
    state[g].total = state[g].total * keep + sum(e);
    state[g].most = most;
    store(weight[g], e);
    for (int c = 0; c < d; c += W) store(out + g * wide + c, load(out + g * wide + c) * keep);
  }
  for (int c = 0; c < d; c += W) {
    vf acc[SHARERS];
    for (int g = 0; g < sharers; g++) acc[g] = load(out + g * wide + c);
    for (int j = from; j < to; j++) {
      vf v = cached(b->values, b->kv_format, offsets[j] + c);
      for (int g = 0; g < sharers; g++) acc[g] = fma(v, set1(weight[g][j]), acc[g]);
    }
    for (int g = 0; g < sharers; g++) store(out + g * wide + c, acc[g]);
  }
}

// Tokens first..last-1 are of one slot. Groups of keys that all of them see in the same rows are read once.
void attend_tile(const Program *p, const Op *op, const Batch *b, int first, int last, int kv_head, int sharer) {
  int d = p->head_dim, group = p->heads / p->kv_heads;
  int sharers = group - sharer < SHARERS ? group - sharer : SHARERS, wide = (d + W - 1) / W * W;
  int head = kv_head * group + sharer;
  alignas(64) float block[wide * W];
  alignas(64) float out[TOKENS][SHARERS * wide];
  State state[TOKENS][SHARERS];
  int longest = 0, common = INT32_MAX;
  int keys[TOKENS];
  for (int t = first; t < last; t++) {
    keys[t - first] = b->direct[t] + b->extra_at[t + 1] - b->extra_at[t];
    longest = keys[t - first] > longest ? keys[t - first] : longest;
    common = b->direct[t] < common ? b->direct[t] : common;
    memset(out[t - first], 0, sizeof(float) * sharers * wide);
    for (int g = 0; g < sharers; g++) state[t - first][g] = {-INFINITY, 0.0f};
  }
  int64_t layer = op->layer * b->layer_stride, width = (int64_t)p->kv_heads * d;
  for (int start = 0; start < longest; start += W) {
    bool ready = false;
    int64_t offsets[W];
    for (int t = first; t < last; t++) {
      int n = keys[t - first], begin = op->window > 0 && n > op->window ? n - op->window : 0;
      int from = begin > start ? begin - start : 0, to = n - start < W ? n - start : W;
      if (from >= to) continue;
      bool same = start + to <= common && to == W;
      if (!same || !ready) {
        for (int j = 0; j < to; j++) {
          int i = start + j;
          int64_t row = i < b->direct[t] ? b->rows[t][i] : b->extra[b->extra_at[t] + i - b->direct[t]];
          offsets[j] = layer + row * width + (int64_t)kv_head * d;
        }
        transpose_keys(b->keys, b->kv_format, offsets, to, d, block);
        ready = same;
      }
      const float *q = at(p, b, op->in, t) + (int64_t)head * d;
      attend_group(p, op, b, q, sharers, block, offsets, from, to, state[t - first], out[t - first]);
    }
  }
  for (int t = first; t < last; t++)
    for (int g = 0; g < sharers; g++) {
      float *to = at(p, b, op->out, t) + (int64_t)(head + g) * d;
      for (int c = 0; c < d; c++) to[c] = out[t - first][g * wide + c] / state[t - first][g].total;
    }
}

void attend(const Program *p, const Op *op, const Batch *b, int thread, int threads) {
  int group = p->heads / p->kv_heads, item = 0;
  for (int first = 0; first < b->tokens;) {
    int last = first + 1;
    while (last < b->tokens && last - first < TOKENS && b->rows[last] == b->rows[first]) last++;
    for (int h = 0; h < p->kv_heads; h++)
      for (int sharer = 0; sharer < group; sharer += SHARERS)
        if (item++ % threads == thread) attend_tile(p, op, b, first, last, h, sharer);
    first = last;
  }
}

int phases(const Op *op) { return op->kind == LINEAR ? (op->after.kind == NO_NORM ? 2 : 3) : 1; }

void run(const Program *p, const Op *op, const Batch *b, int thread, int threads, int phase) {
  if (op->kind == EMBED) embed(p, op, b, thread, threads);
  else if (op->kind == ROTATE) rotate(p, op, b, thread, threads);
  else if (op->kind == ATTEND) attend(p, op, b, thread, threads);
  else if (phase == 0) prepare(p, op, b, thread, threads);
  else if (phase == 1) multiply(p, op, b, thread, threads);
  else after(p, op, b, thread, threads);
}

// ---------------------------------------------------------------- packing

float scale_of_group(const float *v, int n) {  // 4 bits: the scale with the least squared error, over a few candidates
  float most = 0;
  for (int i = 0; i < n; i++)
    if (fabsf(v[i]) > fabsf(most)) most = v[i];
  if (most == 0) return 0;
  float best = 0, least = INFINITY;
  for (int c = -6; c <= 6; c++) {
    float s = half(to_half(most / (-8.0f + 0.1f * c))), error = 0;
    if (s == 0) continue;
    for (int i = 0; i < n; i++) {
      float q = rintf(v[i] / s);
      q = q < -8 ? -8 : q > 7 ? 7 : q;
      error += (v[i] - q * s) * (v[i] - q * s);
    }
    if (error < least) least = error, best = s;
  }
  return best;
}

void pack(int format, const float *source, int outputs, int inputs, void *weight, void *scale) {
  int padded = (int)padded_inputs(inputs), blocks = (outputs + BLOCK - 1) / BLOCK;
  float rows[padded];
  for (int block = 0; block < blocks; block++)
    for (int o = 0; o < BLOCK; o++) {
      int n = block * BLOCK + o;
      for (int k = 0; k < padded; k++) rows[k] = n < outputs && k < inputs ? source[(int64_t)n * inputs + k] : 0.0f;
      int64_t base = (int64_t)block * BLOCK * padded;
      if (format == F32)
        for (int k = 0; k < padded; k++) ((float *)weight)[base + (int64_t)k * BLOCK + o] = rows[k];
      if (format == BF16)
        for (int k = 0; k < padded; k++) {
          uint32_t x;
          memcpy(&x, &rows[k], 4);
          ((uint16_t *)weight)[base + (int64_t)(k / 2) * 2 * BLOCK + o * 2 + k % 2] = (uint16_t)((x + 0x7fff + ((x >> 16) & 1)) >> 16);
        }
      if (format == INT8) {
        float most = 0;
        for (int k = 0; k < padded; k++) most = fabsf(rows[k]) > most ? fabsf(rows[k]) : most;
        float s = most / 127.0f;
        ((float *)scale)[n] = s;
        for (int k = 0; k < padded; k++) {
          int q = s > 0 ? (int)lrintf(rows[k] / s) : 0;
          ((uint8_t *)weight)[base + (int64_t)(k / 4) * 4 * BLOCK + o * 4 + k % 4] = (uint8_t)(q + 128);
        }
      }
      if (format == INT4)
        for (int g = 0; g < padded / GROUP4; g++) {
          float s = scale_of_group(rows + g * GROUP4, GROUP4);
          ((uint16_t *)scale)[base / GROUP4 + (int64_t)g * BLOCK + o] = to_half(s);
          for (int i = 0; i < GROUP4; i++) {
            int k = g * GROUP4 + i, q = s != 0 ? (int)rintf(rows[k] / s) : 0;
            q = (q < -8 ? -8 : q > 7 ? 7 : q) + 8;
            uint8_t *to = (uint8_t *)weight + base / 2 + (int64_t)(k / 8) * 4 * BLOCK + (o / W) * 64 + (o % W) * 4 + k % 4;
            *to = k % 8 < 4 ? (uint8_t)((*to & 0xf0) | q) : (uint8_t)((*to & 0x0f) | q << 4);
          }
        }
    }
}

// ---------------------------------------------------------------- the draw

typedef uint64_t vl __attribute__((vector_size(64)));
typedef double vd __attribute__((vector_size(64)));
typedef float vf8 __attribute__((vector_size(32)));

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15ull;

template <typename T> inline T mix(T x) {  // SplitMix64's finaliser, as in rng.py
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}
inline double gumbel(uint64_t key, int token) {
  double u = ((double)(mix(key + (uint64_t)(token + 1) * GOLDEN) >> 12) + 0.5) * 0x1p-52;
  return -log(-log(u));
}

// argmax of score + Gumbel noise. With u the token's uniform and `best` the best sum so far, the token can win only if
// -log u <= exp(score - best), and 1 - u <= -log u: so most tokens are ruled out without a logarithm.
int64_t draw(const float *scores, uint64_t key, int vocab) {
  int winner = 0;
  for (int i = 1; i < vocab; i++)
    if (scores[i] > scores[winner]) winner = i;
  double best = scores[winner] + gumbel(key, winner);
  const vl lane = {1, 2, 3, 4, 5, 6, 7, 8};
  for (int i = 0; i < vocab; i += W) {
    vf s;
    for (int j = 0; j < W; j++) s[j] = i + j < vocab ? scores[i + j] : -INFINITY;
    vf chance = vexp(pick(s > -1e30f, s - (float)best, set1(-1e30f))) * 1.0001f;
    alignas(64) float left[W];
    for (int h = 0; h < 2; h++) {
      vl x = mix(vl{} + key + (lane + (uint64_t)(i + 8 * h)) * GOLDEN) >> 12;
      vd rest = (0x1p52 - 0.5 - __builtin_convertvector(x, vd)) * 0x1p-52;  // 1 - u
      vf8 small = __builtin_convertvector(rest, vf8);
      memcpy(left + 8 * h, &small, 32);
    }
    vi open = load(left) <= chance;
    for (int j = 0; j < W; j++) {
      if (!open[j] || i + j == winner || s[j] == -INFINITY) continue;
      double sum = s[j] + gumbel(key, i + j);
      if (sum > best || (sum == best && i + j < winner)) best = sum, winner = i + j;
    }
  }
  return winner;
}

const Variant variant = {NAME, run, phases, pack, draw};

}  // namespace

const Variant *VARIANT = &variant;
