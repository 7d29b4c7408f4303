// Attention over pages and tree nodes. A token walks its keys in groups of 64 by logical position, whatever rows of the
// cache they lie in, and keeps a running maximum and sum from group to group.
//
// What one head reads lies in one piece: keys in blocks of 16 rows, channel by channel [rows / 16][head_dim][16], so that
// 16 scores come from whole vectors; values row by row [rows][head_dim].
#pragma once
#include "vector.h"

namespace {

constexpr int KEYS = 64;          // keys of a group
constexpr int BLOCKS = KEYS / W;  // of a group
constexpr int TOKENS = 8;         // tokens of one slot that share what they read of the cache
constexpr int SHARERS = 16;       // query heads of one key head, at most, in one go
#if defined(__AVX512F__)
constexpr int VECTORS = 16;       // sums that keep the arithmetic busy and fit into registers
constexpr int TOGETHER = 8;       // queries whose sums are in registers at once
#else
constexpr int VECTORS = 4;
constexpr int TOGETHER = 4;
#endif
#define FETCH(p) _mm_prefetch((const char *)(p), _MM_HINT_T0)  // GCC leaves out calls of a function that does only this
template <int G> constexpr int SUMS = VECTORS / G >= 4 ? 4 : VECTORS / G >= 2 ? 2 : 1;  // of them, for each of G queries

inline vf widen(const uint16_t *p) { return from_bf16(p); }
inline vf widen(const float *p) { return load(p); }
inline void round_to(float x, float *to) { *to = x; }
inline void round_to(float x, uint16_t *to) { *to = to_bf16(x); }

// Keys and values of one head of one layer.
template <typename T> struct Head {
  T *keys, *values;
  int d;

  Head(const Op *op, const Batch *b, int head) : d(op->head_dim) {
    int64_t at = (op->kv_width + (int64_t)head * d) * b->cache_rows;
    keys = (T *)b->keys + at, values = (T *)b->values + at;
  }
  T *key(int64_t row) const { return keys + row / W * W * d + row % W; }  // channel c is c * W further on
  T *value(int64_t row) const { return values + row * d; }
  void put(int64_t row, const float *key_, const float *value_) const {
    for (int c = 0; c < d; c++) round_to(key_[c], key(row) + c * W);
    for (int c = 0; c < d; c++) round_to(value_[c], value(row) + c);
  }
};

// Blocks put together from rows that lie anywhere; `held` says which row each lane has, and only what differs is read.
template <typename T> struct Gathered {
  T *keys, *values;  // [BLOCKS][d][W], [KEYS][d] and a vector more
  int64_t held[KEYS];

  Gathered(T *keys_, T *values_) : keys(keys_), values(values_) {}
  void forget() {
    for (int j = 0; j < KEYS; j++) held[j] = -1;
  }
  NOINLINE void hold(const Head<T> &head, const int64_t *rows, int first, int count) {
    for (int j = first; j < first + count; j++) {
      if (held[j] == rows[j]) continue;
      const T *key = head.key(rows[j]);
      for (int c = 0; c < head.d; c++) keys[(first * head.d) + c * W + j - first] = key[c * W];
      memcpy(values + j * head.d, head.value(rows[j]), sizeof(T) * head.d);
      held[j] = rows[j];
    }
  }
};

// Whether rows lie one behind the other from the beginning of a block on.
NOINLINE bool in_place(const int64_t *rows, int count) {
  int64_t other = rows[0] % W;
  for (int j = 1; j < count; j++) other |= rows[j] ^ (rows[0] + j);
  return !other;
}

// Where the keys and values of one group are: in the cache, or gathered from it where rows are not one behind the other.
template <typename T> struct Group {
  const T *keys[BLOCKS], *values[BLOCKS];
  int ahead;  // elements to what is fetched beforehand, the next group: pages mostly lie one behind the other

  NOINLINE void find(const Head<T> &head, const int64_t *rows, int n, Gathered<T> &gathered) {
    bool in_cache = true;
    for (int first = 0; first < n; first += W) {
      const int count = n - first < W ? n - first : W;
      in_cache = in_cache && in_place(rows + first, count);
      if (in_cache) {
        set(first / W, head.key(rows[first]), head.value(rows[first]));
        continue;
      }
      gathered.hold(head, rows, first, count);
      set(first / W, gathered.keys + first * head.d, gathered.values + first * head.d);
    }
  }

 private:
  void set(int block, const T *key, const T *value) {  // further blocks are read too, but not looked at
    for (int i = block; i < BLOCKS; i++) keys[i] = key, values[i] = value;
  }
};

// One query head of one token, and what it has gathered so far. It sees the keys [from, to) of the group.
struct Query {
  const float *q;
  float *out;  // [wide]
  float most, total;
  int from, to;
};

// out[g][16 * first ...] of G queries, J blocks of keys. Inlined, GCC keeps one of the sums in memory.
template <int G, int J, typename T>
NOINLINE void score(const float *const *q, int d, const Group<T> &group, float (*out)[KEYS], int first) {
  const T *const *keys = group.keys;
  const int ahead = group.ahead;
  vf acc[G][J];
  EACH(g, G, EACH(j, J, acc[g][j] = set1(0)));
  for (int c = 0; c < d; c++)
    EACH(j, J, {
      vf k = widen(keys[first + j] + c * W);
      FETCH(keys[first + j] + c * W + ahead);
      EACH(g, G, acc[g][j] = fma(k, set1(q[g][c]), acc[g][j]));
    });
  EACH(g, G, EACH(j, J, store(out[g] + (first + j) * W, acc[g][j])));
}

// Scores of the blocks [low, high) become weights; what was gathered before is scaled to the new maximum.
NOINLINE void weigh(const Op *op, Query &query, float *weight, int low, int high, int wide) {
  vf highest = set1(-INFINITY);
  vi lane;
  for (int i = 0; i < W; i++) lane[i] = i;
  for (int j = low; j < high; j++) {
    vf s = load(weight + j * W) * op->scale;
    if (op->softcap > 0) s = vtanh(s / op->softcap) * op->softcap;
    if (j * W < query.from || (j + 1) * W > query.to) {
      vi key = lane + j * W;
      s = pick((key >= set1i(query.from)) & (key < set1i(query.to)), s, set1(-INFINITY));
    }
    highest = largest(highest, s);
    store(weight + j * W, s);
  }
  float now = top(highest), keep = 1;
  if (query.most < now) {
    keep = query.total > 0 ? vexp(set1(query.most - now))[0] : 0.0f;
    query.most = now;
  }
  vf all = set1(0);
  for (int j = low; j < high; j++) {  // what is not seen gets 2^-125, which adds nothing to a sum of 1 or more; NaN stays NaN
    vf e = exp_within(largest(set1(-87), load(weight + j * W) - query.most));
    all = all + e;
    store(weight + j * W, e);
  }
  query.total = query.total * keep + sum(all);
  if (keep != 1.0f)
    for (int c = 0; c < wide; c += W) store(query.out + c, load(query.out + c) * keep);
}

// out[g] += weights [from, to) times values, C vectors of channels at a time. What vectors take past the last channel is
// the next row's and stays there.
template <int G, int C, typename T>
inline void gather(const float (*weight)[KEYS], int from, int to, const Group<T> &group, int d, int wide, float *const *out) {
  const T *const *values = group.values;
  const int ahead = group.ahead;
  for (int c = 0; c < wide; c += C * W) {
    vf acc[G][C];
    EACH(g, G, EACH(i, C, acc[g][i] = load(out[g] + c + i * W)));
    for (int j = from; j < to;) {
      const T *row = values[j / W] + (j % W) * d + c;
      for (int end = to < (j / W + 1) * W ? to : (j / W + 1) * W; j < end; j++, row += d)
        EACH(i, C, {
          vf v = widen(row + i * W);
          FETCH(row + i * W + ahead);
          EACH(g, G, acc[g][i] = fma(v, set1(weight[g][j]), acc[g][i]));
        });
    }
    EACH(g, G, EACH(i, C, store(out[g] + c + i * W, acc[g][i])));
  }
}
template <int G, typename T>
NOINLINE void gather_any(const float (*weight)[KEYS], int from, int to, const Group<T> &group, int d, int wide,
                         float *const *out) {
  constexpr int C = SUMS<G>;
  if (from >= to) return;
  if (wide % (C * W) == 0) gather<G, C>(weight, from, to, group, d, wide, out);
  else gather<G, 1>(weight, from, to, group, d, wide, out);
}

// G queries over a group of keys; values that all of them see are read once.
template <int G, typename T> void attend_queries(const Op *op, Query *const *queries, const Group<T> &group, int d) {
  constexpr int J = SUMS<G>;
  int wide = (d + W - 1) / W * W, from = KEYS, to = 0, from_all = 0, to_all = KEYS;
  const float *q[G];
  float *out[G];
  for (int g = 0; g < G; g++) {
    const Query &query = *queries[g];
    q[g] = query.q, out[g] = query.out;
    from = query.from < from ? query.from : from, from_all = query.from > from_all ? query.from : from_all;
    to = query.to > to ? query.to : to, to_all = query.to < to_all ? query.to : to_all;
  }
  if (from_all >= to_all) from_all = to_all = KEYS;
  alignas(64) float weight[G][KEYS];
  int low = from / W, high = (to + W - 1) / W, first = low;
  for (; first + J <= high; first += J) score<G, J>(q, d, group, weight, first);
  EACH(rest, J, if (rest && high - first == rest) score<G, rest ? rest : 1>(q, d, group, weight, first));
  for (int g = 0; g < G; g++) {
    weigh(op, *queries[g], weight[g], low, high, wide);
    const int before = queries[g]->to < from_all ? queries[g]->to : from_all;
    gather_any<1>(weight + g, queries[g]->from, before, group, d, wide, out + g);
  }
  gather_any<G>(weight, from_all, to_all, group, d, wide, out);
  for (int g = 0; g < G; g++) gather_any<1>(weight + g, to_all, queries[g]->to, group, d, wide, out + g);
}

// Queries that see the same group, at most as many at a time as their sums fit into registers.
template <typename T> void attend_group(const Op *op, Query *const *queries, int count, const Group<T> &group, int d) {
  const int parts = (count + TOGETHER - 1) / TOGETHER;
  for (int part = 0; part < parts; part++) {
    const Share own = share(count, part, parts);
    EACH(g, TOGETHER, if (own.to - own.from == g + 1) attend_queries<g + 1>(op, queries + own.from, group, d));
  }
}

// Tokens first .. last - 1 are of one slot; what they see of a group in common is read once for all of them.
template <typename T> void attend_tile(const Program *p, const Op *op, const Batch *b, int first, int last, int kv_head, int sharer) {
  const int d = op->head_dim, wide = (d + W - 1) / W * W, share = op->heads / op->kv_heads;
  const int sharers = share - sharer < SHARERS ? share - sharer : SHARERS, head = kv_head * share + sharer;
  alignas(64) T keys[KEYS * d], values[KEYS * d + W];
  alignas(64) float out[TOKENS * sharers][wide];
  const Head<T> cached(op, b, kv_head);
  Gathered<T> gathered(keys, values);
  Query queries[TOKENS * SHARERS], *waiting[TOKENS * SHARERS];
  memset(out, 0, sizeof(float) * (last - first) * sharers * wide);
  const int64_t *line = b->rows[first];
  int longest = 0, straight = 0, seen[TOKENS];
  for (int t = first; t < last; t++) {
    seen[t - first] = b->direct[t] + b->extra_at[t + 1] - b->extra_at[t];
    longest = seen[t - first] > longest ? seen[t - first] : longest;
    straight = b->direct[t] > straight ? b->direct[t] : straight;
    for (int g = 0; g < sharers; g++) {
      Query &query = queries[(t - first) * sharers + g];
      query = {at(p, b, op->in, t) + (int64_t)(head + g) * d, out[(t - first) * sharers + g], -INFINITY, 0, 0, 0};
      if (op->sink_logits) query.most = op->sink_logits[head + g], query.total = 1;
    }
  }
  for (int start = 0; start < longest; start += KEYS) {
    gathered.forget();
    Group<T> group;
    group.ahead = start + KEYS < longest ? KEYS * d : 0;
    int count = 0, others = 0, other[TOKENS];
    for (int t = first; t < last; t++) {
      int n = seen[t - first], begin = op->window > 0 && n > op->window ? n - op->window : 0;
      if (start < op->sinks) begin = start;  // a group is seen from where it begins
      if (op->chunk > 0 && begin < (n - 1) / op->chunk * op->chunk) begin = (n - 1) / op->chunk * op->chunk;
      const int from = begin > start ? begin - start : 0, to = n - start < KEYS ? n - start : KEYS;
      if (from >= to) continue;
      Query *query = queries + (t - first) * sharers;
      for (int g = 0; g < sharers; g++) query[g].from = from, query[g].to = to;
      if (start + to > b->direct[t]) other[others++] = t;
      else for (int g = 0; g < sharers; g++) waiting[count++] = query + g;
    }
    if (count) {
      group.find(cached, line + start, straight - start < KEYS ? straight - start : KEYS, gathered);
      attend_group(op, waiting, count, group, d);
    }
    for (int i = 0; i < others; i++) {  // they see rows that are not the next ones of their slot
      const int t = other[i], direct = b->direct[t] - start, to = queries[(t - first) * sharers].to;
      int64_t mixed[KEYS];
      for (int j = 0; j < to; j++) mixed[j] = j < direct ? line[start + j] : b->extra[b->extra_at[t] + j - direct];
      group.find(cached, mixed, to, gathered);
      for (int g = 0; g < sharers; g++) waiting[g] = queries + (t - first) * sharers + g;
      attend_group(op, waiting, sharers, group, d);
    }
  }
  for (int t = first; t < last; t++)
    for (int g = 0; g < sharers; g++) {
      const Query &query = queries[(t - first) * sharers + g];
      float *to = at(p, b, op->out, t) + (int64_t)(head + g) * d;
      for (int c = 0; c < d; c += W) store_some(to + c, load(query.out + c) / query.total, d - c);
    }
}

// The first token behind `first` that is of another slot.
inline int end_of_run(const Batch *b, int first) {
  int last = first + 1;
  while (last < b->tokens && b->rows[last] == b->rows[first]) last++;
  return last;
}

// Tiles lie evenly among the items, so that each thread begins with as many. Where there are few they are made smaller.
void attend(const Program *p, const Op *op, const Batch *b, int item, int items) {
  const int sharers = op->heads / op->kv_heads, parts = (sharers + SHARERS - 1) / SHARERS;
  const int of_tokens = op->kv_heads * parts;  // tiles of the same tokens
  int runs = 0, tiles = 0;
  for (int first = 0; first < b->tokens; first = end_of_run(b, first)) runs++;
  const int least = (items / 2 + runs * of_tokens - 1) / (runs * of_tokens);  // tiles of the tokens of a run
  auto tiles_of = [&](int count) {
    const int needed = (count + TOKENS - 1) / TOKENS;
    return needed > least ? needed : count < least ? count : least;
  };
  for (int first = 0; first < b->tokens; first = end_of_run(b, first)) tiles += tiles_of(end_of_run(b, first) - first) * of_tokens;
  const Share own = share(tiles, item, items);
  auto tile_of = b->kv_format == BF16 ? attend_tile<uint16_t> : attend_tile<float>;
  int tile = 0;
  for (int first = 0; first < b->tokens && tile < own.to; first = end_of_run(b, first)) {
    const int count = end_of_run(b, first) - first, of_run = tiles_of(count);
    for (int i = 0; i < of_run * of_tokens; i++, tile++) {
      if (tile < own.from || tile >= own.to) continue;
      const Share tokens = share(count, i % of_run, of_run);
      const int head = i / of_run;
      tile_of(p, op, b, first + tokens.from, first + tokens.to, head / parts, head % parts * SHARERS);
    }
  }
}

}  // namespace
