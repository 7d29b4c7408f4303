// Attention over pages and tree nodes. A token walks its keys in groups of 64 by logical position, whatever rows of the
// cache they lie in, and keeps a running maximum and sum from group to group.
#pragma once
#include "vector.h"

namespace {

constexpr int KEYS = 64;      // keys of a group
constexpr int TOKENS = 8;     // tokens of one slot that share what they read of the cache
constexpr int SHARERS = 16;   // query heads of one key head, at most, in one go
constexpr int TOGETHER = 4;   // of these, heads whose sums are in registers at once
#if defined(__AVX512F__)
constexpr int VECTORS = 8;    // sums that keep the arithmetic busy
#else
constexpr int VECTORS = 4;
#endif

inline vf cached(const void *data, int format, int64_t i, int count) {  // zeros past `count`
  if (count >= W) return format == BF16 ? from_bf16((const uint16_t *)data + i) : load((const float *)data + i);
  alignas(64) uint16_t narrow[W] = {};
  alignas(64) float full[W] = {};
  if (format == BF16) memcpy(narrow, (const uint16_t *)data + i, sizeof(uint16_t) * count);
  else memcpy(full, (const float *)data + i, sizeof(float) * count);
  return format == BF16 ? from_bf16(narrow) : load(full);
}

#if defined(__AVX512F__)
inline void transpose(vf r[W]) {
  for (int s = W / 2; s; s /= 2)  // swap off-diagonal s x s blocks
    for (int j = 0; j < W; j++) {
      if (j & s) continue;
      vi low, high;
      for (int i = 0; i < W; i++) low[i] = i & s ? W + (i ^ s) : i, high[i] = i & s ? W + i : i ^ s;
      vf a = r[j], e = r[j | s];
      r[j] = __builtin_shuffle(a, e, low);
      r[j | s] = __builtin_shuffle(a, e, high);
    }
}
#else
inline void transpose(vf r[W]) {  // 4 x 4 blocks by 4 x 4 blocks
  alignas(64) float from[W][W], to[W][W];
  for (int j = 0; j < W; j++) store(from[j], r[j]);
  for (int i = 0; i < W; i += 4)
    for (int j = 0; j < W; j += 4) {
      __m128 a = _mm_load_ps(&from[i][j]), b = _mm_load_ps(&from[i + 1][j]);
      __m128 c = _mm_load_ps(&from[i + 2][j]), d = _mm_load_ps(&from[i + 3][j]);
      _MM_TRANSPOSE4_PS(a, b, c, d);
      _mm_store_ps(&to[j][i], a), _mm_store_ps(&to[j + 1][i], b);
      _mm_store_ps(&to[j + 2][i], c), _mm_store_ps(&to[j + 3][i], d);
    }
  for (int j = 0; j < W; j++) r[j] = load(to[j]);
}
#endif

// The keys and values of one group and one key head, as floats: keys channel by channel [wide][KEYS], values [KEYS][wide];
// `wide` is the head size rounded up to whole vectors. `held` says which place of the cache each column has now; only what differs is read again.
struct KeyBlock {
  float *keys, *values;
  int d, wide;
  int64_t held[KEYS];

  void forget() {
    for (int j = 0; j < KEYS; j++) held[j] = -1;
    memset(keys, 0, sizeof(float) * wide * KEYS);
  }
  void hold(const Batch *b, const int64_t *places, int count) {
    for (int first = 0; first < count; first += W) {
      int last = first + W < count ? first + W : count, other = 0;
      for (int j = first; j < last; j++) other += held[j] != places[j];
      if (!other) continue;
      if (other > 4) read(b, places, first, last);
      else
        for (int j = first; j < last; j++)
          if (held[j] != places[j]) read_one(b, places[j], j);
      for (int j = first; j < last; j++) held[j] = places[j];
    }
  }

 private:
  void read(const Batch *b, const int64_t *places, int first, int last) {
    for (int c = 0; c < d; c += W) {
      vf r[W];
      for (int j = 0; j < W; j++) r[j] = first + j < last ? cached(b->keys, b->kv_format, places[first + j] + c, d - c) : set1(0);
      transpose(r);
      for (int j = 0; j < W; j++) store(keys + (c + j) * KEYS + first, r[j]);
      for (int j = first; j < last; j++) store(values + j * wide + c, cached(b->values, b->kv_format, places[j] + c, d - c));
    }
    for (int j = last; j < first + W; j++) held[j] = -1;  // their keys are zero now
  }
  void read_one(const Batch *b, int64_t place, int j) {
    for (int c = 0; c < d; c += W) {
      vf k = cached(b->keys, b->kv_format, place + c, d - c);
      for (int i = 0; i < W; i++) keys[(c + i) * KEYS + j] = k[i];
      store(values + j * wide + c, cached(b->values, b->kv_format, place + c, d - c));
    }
  }
};

// What one token has gathered so far for each of its heads.
struct State { float most[SHARERS], total[SHARERS]; };

// score[g][16 * first ...] of G heads, J vectors of 16 keys
template <int G, int J> inline void score(const float *q, int stride, int d, const float *keys, int first, float (*out)[KEYS]) {
  vf acc[G][J];
  for (int g = 0; g < G; g++)
    for (int j = 0; j < J; j++) acc[g][j] = set1(0);
  for (int c = 0; c < d; c++)
    for (int j = 0; j < J; j++) {
      vf k = load(keys + c * KEYS + (first + j) * W);
      for (int g = 0; g < G; g++) acc[g][j] = fma(k, set1(q[g * stride + c]), acc[g][j]);
    }
  for (int g = 0; g < G; g++)
    for (int j = 0; j < J; j++) store(out[g] + (first + j) * W, acc[g][j]);
}

// out[g] += weights [from, to) times values, C vectors of channels at a time
template <int G, int C> inline void gather(const float (*weight)[KEYS], int from, int to, const float *values, int wide, float *out) {
  for (int c = 0; c < wide; c += C * W) {
    vf acc[G][C];
    for (int g = 0; g < G; g++)
      for (int i = 0; i < C; i++) acc[g][i] = load(out + g * wide + c + i * W);
    for (int j = from; j < to; j++)
      for (int i = 0; i < C; i++) {
        vf v = load(values + j * wide + c + i * W);
        for (int g = 0; g < G; g++) acc[g][i] = fma(v, set1(weight[g][j]), acc[g][i]);
      }
    for (int g = 0; g < G; g++)
      for (int i = 0; i < C; i++) store(out + g * wide + c + i * W, acc[g][i]);
  }
}

// G heads of one token over the keys [from, to) of a block.
template <int G> void attend_heads(const Op *op, const float *q, int d, const KeyBlock &block, int from, int to, float *most, float *total, float *out) {
  constexpr int J = VECTORS / G >= 4 ? 4 : VECTORS / G >= 2 ? 2 : 1;
  constexpr int C = J;
  int wide = block.wide;
  alignas(64) float weight[G][KEYS];
  int low = from / (W * J) * J, high = (to + W - 1) / W;
  for (int first = low; first < high; first += J) score<G, J>(q, d, d, block.keys, first, weight);
  vi lane;
  for (int i = 0; i < W; i++) lane[i] = i;
  for (int g = 0; g < G; g++) {
    vf highest = set1(-INFINITY);
    for (int j = low; j < high; j++) {
      vf s = load(weight[g] + j * W) * op->scale;
      if (op->softcap > 0) s = vtanh(s / op->softcap) * op->softcap;
      vi key = lane + j * W;
      s = pick((key >= set1i(from)) & (key < set1i(to)), s, set1(-INFINITY));
      highest = largest(highest, s);
      store(weight[g] + j * W, s);
    }
    float now = top(highest);
    now = now > most[g] ? now : most[g];
    float keep = total[g] > 0 ? vexp(set1(most[g] - now))[0] : 0.0f;
    vf all = set1(0);
    for (int j = low; j < high; j++) {
      vf s = load(weight[g] + j * W), e = pick(s > -INFINITY, vexp(s - now), set1(0));
      all = all + e;
      store(weight[g] + j * W, e);
    }
    total[g] = total[g] * keep + sum(all);
    most[g] = now;
    if (keep != 1.0f)
      for (int c = 0; c < d; c += W) store(out + g * wide + c, load(out + g * wide + c) * keep);
  }
  if (wide % (C * W) == 0) gather<G, C>(weight, from, to, block.values, wide, out);
  else gather<G, 1>(weight, from, to, block.values, wide, out);
}

// Tokens first..last-1 are of one slot: a group of keys is read once for all of them, and changed where a tree branches.
void attend_tile(const Program *p, const Op *op, const Batch *b, int first, int last, int kv_head, int sharer) {
  int d = p->head_dim, wide = (d + W - 1) / W * W, group = p->heads / p->kv_heads;
  int sharers = group - sharer < SHARERS ? group - sharer : SHARERS, head = kv_head * group + sharer;
  alignas(64) float keys[wide * KEYS], values[KEYS * wide], out[TOKENS][sharers * wide];
  KeyBlock block{keys, values, d, wide, {}};
  State state[TOKENS];
  memset(out, 0, sizeof(float) * TOKENS * sharers * wide);
  int longest = 0, seen[TOKENS];
  for (int t = first; t < last; t++) {
    int i = t - first;
    seen[i] = b->direct[t] + b->extra_at[t + 1] - b->extra_at[t];
    longest = seen[i] > longest ? seen[i] : longest;
    for (int g = 0; g < sharers; g++) state[i].most[g] = -INFINITY, state[i].total[g] = 0;
  }
  int64_t base = op->layer * b->layer_stride + (int64_t)kv_head * d, width = (int64_t)p->kv_heads * d;
  for (int start = 0; start < longest; start += KEYS) {
    block.forget();
    for (int t = first; t < last; t++) {
      int n = seen[t - first], begin = op->window > 0 && n > op->window ? n - op->window : 0;
      int from = begin > start ? begin - start : 0, to = n - start < KEYS ? n - start : KEYS;
      if (from >= to) continue;
      int64_t places[KEYS];
      for (int j = 0; j < to; j++) {
        int i = start + j;
        places[j] = base + width * (i < b->direct[t] ? b->rows[t][i] : b->extra[b->extra_at[t] + i - b->direct[t]]);
      }
      block.hold(b, places, to);
      const float *q = at(p, b, op->in, t) + (int64_t)head * d;
      State &s = state[t - first];
      for (int g = 0; g < sharers; g += TOGETHER) {
        int count = sharers - g < TOGETHER ? sharers - g : TOGETHER;
        auto heads = count == 4 ? attend_heads<4> : count == 3 ? attend_heads<3> : count == 2 ? attend_heads<2> : attend_heads<1>;
        heads(op, q + g * d, d, block, from, to, s.most + g, s.total + g, out[t - first] + g * wide);
      }
    }
  }
  for (int t = first; t < last; t++)
    for (int g = 0; g < sharers; g++) {
      float *to = at(p, b, op->out, t) + (int64_t)(head + g) * d;
      for (int c = 0; c < d; c++) to[c] = out[t - first][g * wide + c] / state[t - first].total[g];
    }
}

void attend(const Program *p, const Op *op, const Batch *b, int item, int items) {
  int group = p->heads / p->kv_heads, tile = 0;
  for (int first = 0; first < b->tokens;) {
    int last = first + 1;
    while (last < b->tokens && last - first < TOKENS && b->rows[last] == b->rows[first]) last++;
    for (int h = 0; h < p->kv_heads; h++)
      for (int sharer = 0; sharer < group; sharer += SHARERS)
        if (tile++ % items == item) attend_tile(p, op, b, first, last, h, sharer);
    first = last;
  }
}

}  // namespace
