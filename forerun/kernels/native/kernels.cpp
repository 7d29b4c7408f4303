// All operations, written once over 16-lane vectors and compiled once for each instruction set (VARIANT names it).
//
// The rule that makes speculation exact: what a row gets depends on that row's data alone. Every output accumulates over
// its inputs in one fixed order, whatever the number of rows, tiles or threads; attention walks keys in fixed groups
// by logical position. Contraction is off and fused multiply-adds are explicit, so that every tile height rounds alike.
#include "attention.h"
#include "draw.h"
#include "products.h"

namespace {

// ---------------------------------------------------------------- one row: norms and conversion

float mean_of(const float *x, int n) {
  vf s{};
  for (int i = 0; i < n; i += W) s = s + load_some(x + i, n - i);
  return sum(s) / n;
}

float mean_square(const float *x, float mean, int n) {  // of the distances from `mean`
  vf s{};
  for (int i = 0; i < n; i += W) {
    vf v = load_some(x + i, n - i) - mean;
    for (int j = n - i; j < W; j++) v[j] = 0;
    s = fma(v, v, s);
  }
  return sum(s) / n;
}

// out = norm(x) [n]; vectors along the row, the tail padded with zeros.
void normalise(const float *x, const Norm &norm, int n, float *out) {
  if (norm.kind == NO_NORM) {
    if (out != x) memcpy(out, x, sizeof(float) * n);
    return;
  }
  if (norm.kind == FACTORS) {
    for (int i = 0; i < n; i++) out[i] = x[i] * norm.weight[i];
    return;
  }
  const float mean = norm.kind == LAYER ? mean_of(x, n) : 0;
  const float scale = 1.0f / sqrtf(mean_square(x, mean, n) + norm.eps);
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

inline void to_integers(int8_t *to, vi x) { to_bytes(to, x); }

template <typename T> void quantise(const float *x, int format, Quantised<T> &to) {  // 64 of them
  vf most{};
  for (int i = 0; i < GROUP8; i += W) {
    vf a = load(x + i);
    most = largest(most, largest(a, -a));
  }
  float amax = top(most), inverse = amax > 0 ? 127.0f / amax : 0.0f;
  int32_t sums[GROUP8 / W];
  for (int i = 0; i < GROUP8; i += W) {
    vi q = nearest(load(x + i) * inverse);
    sums[i / W] = sum(q);
    to_integers(to.x + i, q);
  }
  to.scale = amax / 127.0f;
  Layout l = layout(format);
  int per = format == INT8 ? GROUP8 / W : l.group / W;  // sums of a group
  for (int i = 0; i < GROUP8 / W; i += per) {
    int32_t total = 0;
    for (int j = i; j < i + per; j++) total += sums[j];
    if (l.minimum) to.sum[i / per] = (float)total;
    else to.start[i / per] = -l.offset * total;
  }
}

void convert(const float *x, int n, int format, Row row) {  // x is padded with zeros to row.padded
  for (int i = n; i < row.padded; i++) const_cast<float *>(x)[i] = 0;
#if defined(__AVX512BF16__)
  if (format == BF16)
    for (int i = 0; i < row.padded; i += W) to_bf16(row.bf16() + i, load(x + i));
#else
  if (format == BF16) format = F32;  // without products of bfloat16, activations are not rounded to it either
#endif
  if (format == F16) format = F32;
  if (format == F32) memcpy(row.f32(), x, sizeof(float) * row.padded);
  for (int g = 0; g < row.padded / GROUP8; g++) {
    if (bytes_as_they_are(format)) quantise(x + g * GROUP8, format, row.int8()[g]);
    else if (grouped(format)) quantise(x + g * GROUP8, format, row.grouped()[g]);
  }
}

// ---------------------------------------------------------------- operations

void embed(const Program *p, const Op *op, const Batch *b, int item, int items) {
  Share s = share(b->tokens, item, items);
  const Matrix &a = op->matrix;
  int hidden = a.inputs;
  for (int t = s.from; t < s.to; t++) {
    float *out = at(p, b, op->out, t) + op->column;
    int64_t id = op->count && b->ids[t] >= op->count ? 0 : b->ids[t], from = id * hidden;
    if (!op->table) unpack_row(a, id, out);
    else if (a.format == BF16) for (int i = 0; i < hidden; i++) out[i] = from_bf16(((const uint16_t *)op->table)[from + i]);
    else memcpy(out, (const float *)op->table + from, sizeof(float) * hidden);
    for (int i = 0; i < hidden; i++)
      out[i] = out[i] * op->scale + (op->positions ? op->positions[b->positions[t] * hidden + i] : 0.0f);
  }
}

// Rows lie close, and none a power of two behind the other: what tiles read at the same time would share the same few lines
// of the first cache.
Row scratch_row(const Matrix &a, const Batch *b, int row) {
  return {(char *)b->scratch + row * (row_bytes(a.format, a.padded) + 64), a.padded};
}

int parts_of_input(const Op *op) { return op->spread ? op->slots : 1; }

void prepare(const Program *p, const Op *op, const Batch *b, int item, int items) {
  const Matrix &a = op->matrix;
  Share s = share(op->wanted ? b->wanted : b->tokens, item, items);
  alignas(64) float row[a.padded + W];
  const int parts = parts_of_input(op);
  for (int t = s.from; t < s.to; t++)
    for (int i = 0; i < parts; i++) {
      const float *in = at(p, b, op->in, op->wanted ? b->want[t] : t) + op->in_column;
      normalise(in + (int64_t)i * (op->in_stride ? op->in_stride : a.inputs), op->norm, a.inputs, row);
      convert(row, a.inputs, a.format, scratch_row(a, b, t * parts + i));
    }
}

inline vf gated(vf gate, vf x, int activation) {
  if (activation != CLAMPED_SWIGLU) return activate(gate, activation) * x;
  gate = pick(gate > 7.0f, set1(7.0f), gate);
  x = pick(x > 7.0f, set1(7.0f), pick(x < -7.0f, set1(-7.0f), x));
  return (x + 1.0f) * (gate / (vexp(gate * -1.702f) + 1.0f));
}

// A tile of outputs comes to `to`, a pointer for each row to where the result of the matrix begins. `first` is the block of
// the whole matrix at which that result begins.
void finish_tile(const Op *op, int block, int first, int rows, float (*tile)[BLOCK], float *const *to) {
  const Matrix &a = op->matrix;
  int count = a.outputs - block * BLOCK < BLOCK ? a.outputs - block * BLOCK : BLOCK;
  for (int m = 0; m < rows; m++) {
    vf v[2] = {load(tile[m]), load(tile[m] + W)};
    if (a.bias)
      for (int c = 0; c < 2; c++) v[c] = v[c] + load(a.bias + block * BLOCK + c * W);
    if (op->gated) {  // 16 gates, then the 16 values they let through
      if (op->scale != 0) v[0] = v[0] * op->scale;
      v[0] = gated(v[0], v[1], op->activation);
      float *out = to[m] + (block - first) * W;
      if (count == BLOCK) store(out, v[0]);
      else for (int i = 0; i < count / 2; i++) out[i] = v[0][i];
      continue;
    }
    float *out = to[m] + (block - first) * BLOCK;
    for (int c = 0; c < 2; c++) {
      if (op->combine == GATED) {  // the gates are the result of another matrix
        const int left = count - c * W, n = left < 0 ? 0 : left < W ? left : W;
        alignas(64) float there[W] = {};
        memcpy(there, out + c * W, sizeof(float) * n);
        store(there, gated(load(there), v[c], op->activation));
        memcpy(out + c * W, there, sizeof(float) * n);
        continue;
      }
      if (op->activation == XIELU) v[c] = xielu(v[c], op->xielu);
      else if (op->activation) v[c] = activate(v[c], op->activation);
      if (op->scale != 0) v[c] = v[c] * op->scale;
      if (op->softcap > 0) v[c] = vtanh(v[c] / op->softcap) * op->softcap;
      auto combine = [&](auto there, auto new_) {
        return op->combine == ADD ? there + new_ : op->combine == TIMES ? there * new_ : new_;
      };
      if (count == BLOCK) {
        store(out + c * W, op->combine ? combine(load(out + c * W), v[c]) : v[c]);
        continue;
      }
      for (int i = 0; i < W; i++) {
        int j = c * W + i;
        if (j < count) out[j] = combine(out[j], v[c][i]);
      }
    }
  }
}

void multiply(const Program *p, const Op *op, const Batch *b, int item, int items) {
  const Matrix &a = op->matrix;
  int rows = op->wanted ? b->wanted : b->tokens, parts = (rows + MOST - 1) / MOST;
  Share s = share((a.outputs + BLOCK - 1) / BLOCK, item, items);
  alignas(64) float tile[MOST][BLOCK];
  Row row[rows];
  float *to[rows];
  for (int m = 0; m < rows; m++) row[m] = scratch_row(a, b, m), to[m] = at(p, b, op->out, m) + op->column;
  for (int block = s.from; block < s.to; block++)
    for (int i = 0; i < parts; i++) {
      Share part = share(rows, i, parts);
      int count = part.to - part.from;
      products(a, block, row + part.from, count, tile);
      finish_tile(op, block, 0, count, tile, to + part.from);
    }
}

// The same where each row goes through experts of its own. An expert that a pass needs is read once, for all of its rows;
// each item finds them anew, which takes little time beside a product.
void multiply_experts(const Program *p, const Op *op, const Batch *b, int item, int items) {
  const Matrix &a = op->matrix;
  const int slots = op->slots, entries = b->tokens * slots, blocks = a.outputs / BLOCK / op->experts;
  const int width = op->out_stride ? op->out_stride : op->gated ? blocks * W : blocks * BLOCK, parts_in = parts_of_input(op);
  int first[op->experts + 1], next[op->experts], order[entries], present[op->experts], distinct = 0;
  auto expert_of = [&](int entry) {
    if (op->choice < 0) return entry % slots;
    return (int)at(p, b, op->choice, entry / slots)[op->choice_column + entry % slots];
  };
  memset(first, 0, sizeof(first));
  for (int i = 0; i < entries; i++) first[expert_of(i) + 1]++;
  for (int e = 0; e < op->experts; e++) {
    if (first[e + 1]) present[distinct++] = e;
    first[e + 1] += first[e], next[e] = first[e];
  }
  for (int i = 0; i < entries; i++) order[next[expert_of(i)]++] = i;
  Share s = share(distinct * blocks, item, items);
  alignas(64) float tile[MOST][BLOCK];
  for (int unit = s.from; unit < s.to; unit++) {
    const int expert = present[unit / blocks], block = expert * blocks + unit % blocks;
    for (int from = first[expert]; from < first[expert + 1]; from += MOST) {
      const int left = first[expert + 1] - from, count = left < MOST ? left : MOST;
      Row row[MOST];
      float *to[MOST];
      for (int m = 0; m < count; m++) {
        const int entry = order[from + m];
        row[m] = scratch_row(a, b, parts_in > 1 ? entry : entry / slots);
        to[m] = at(p, b, op->out, entry / slots) + op->column + (int64_t)(entry % slots) * width;
      }
      products(a, block, row, count, tile);
      if (op->weighted)
        for (int m = 0; m < count; m++) {
          const int entry = order[from + m];
          const float weight = at(p, b, op->choice, entry / slots)[op->choice_column + slots + entry % slots];
          for (int c = 0; c < BLOCK; c += W) store(tile[m] + c, load(tile[m] + c) * weight);
        }
      finish_tile(op, block, expert * blocks, count, tile, to);
    }
  }
}

// Choose experts: the `slots` best by score plus bias, the first of equal ones; with groups, only from the best groups.
void route_row(const Op *op, const float *logits, float *choice) {
  const int experts = op->experts, size = experts / (op->groups > 1 ? op->groups : 1);
  float score[experts], rank[experts];
  float most = -INFINITY, total = 0;
  for (int e = 0; e < experts; e++) most = logits[e] > most ? logits[e] : most;
  for (int e = 0; e < experts; e++) {
    score[e] = op->scores == SOFTMAX ? expf(logits[e] - most) : op->scores == SIGMOIDS ? 1.0f / (1.0f + expf(-logits[e])) : logits[e];
    total += score[e];
  }
  for (int e = 0; e < experts; e++) {
    if (op->scores == SOFTMAX) score[e] /= total;
    rank[e] = score[e] + (op->choice_bias ? op->choice_bias[e] : 0);
  }
  if (op->groups > 1) {
    float rated[op->groups];
    bool used[op->groups];
    for (int g = 0; g < op->groups; g++) {
      float first = -INFINITY, second = -INFINITY;
      for (int e = g * size; e < (g + 1) * size; e++)
        if (rank[e] > first) second = first, first = rank[e];
        else if (rank[e] > second) second = rank[e];
      rated[g] = op->best > 1 ? first + second : first, used[g] = false;
    }
    for (int i = 0; i < op->used_groups; i++) {
      int best = -1;
      for (int g = 0; g < op->groups; g++)
        if (!used[g] && (best < 0 || rated[g] > rated[best])) best = g;
      used[best] = true;
    }
    for (int e = 0; e < experts; e++)
      if (!used[e / size]) rank[e] = -INFINITY;
  }
  float sum = 0, *weights = choice + op->slots;
  for (int s = 0; s < op->slots; s++) {
    int best = -1;
    for (int e = 0; e < experts; e++)
      if (rank[e] > -INFINITY && (best < 0 || rank[e] > rank[best])) best = e;
    if (best < 0) best = 0;  // scores that are not finite: any expert is valid
    choice[s] = (float)best, weights[s] = score[best];
    rank[best] = -INFINITY;
  }
  if (op->scores == LOGITS) {
    const float top_ = weights[0];
    for (int s = 0; s < op->slots; s++) weights[s] = expf(weights[s] - top_);
  }
  if (op->scores == LOGIT_SIGMOIDS)
    for (int s = 0; s < op->slots; s++) weights[s] = 1.0f / (1.0f + expf(-weights[s]));
  for (int s = 0; s < op->slots; s++) sum += weights[s];
  for (int s = 0; s < op->slots; s++) {
    if (op->normalised || op->scores == LOGITS) weights[s] /= sum + op->epsilon;
    weights[s] *= op->route_scale;
    if (op->expert_scale) weights[s] *= op->expert_scale[(int)choice[s]];
  }
}

void route(const Program *p, const Op *op, const Batch *b, int item, int items) {
  Share s = share(b->tokens, item, items);
  for (int t = s.from; t < s.to; t++) route_row(op, at(p, b, op->in, t), at(p, b, op->choice, t) + op->choice_column);
}

// out = (out +) scale * gate * norm(weighted sum of the parts of `in`), the parts in the order of their slots.
void mix(const Program *p, const Op *op, const Batch *b, int item, int items) {
  Share s = share(b->tokens, item, items);
  const int n = op->count;
  float row[n];
  for (int t = s.from; t < s.to; t++) {
    const float *in = at(p, b, op->in, t) + op->in_column;
    const float *weights = op->choice < 0 ? nullptr : at(p, b, op->choice, t) + op->choice_column + op->slots;
    for (int i = 0; i < n; i++) row[i] = weights ? in[i] * weights[0] : in[i];
    for (int slot = 1; slot < op->slots; slot++) {
      const float weight = weights ? weights[slot] : 1.0f;
      for (int i = 0; i < n; i++) row[i] = row[i] + in[(int64_t)slot * n + i] * weight;
    }
    normalise(row, op->after, n, row);
    float factor = op->scale;
    if (op->gate >= 0) factor = factor / (1.0f + expf(-at(p, b, op->gate, t)[0]));
    float *out = at(p, b, op->out, t) + op->column;
    for (int i = 0; i < n; i++) {
      float x = row[i] * factor;
      out[i] = op->combine == ADD ? out[i] + x : op->combine == TIMES ? out[i] * x : x;
    }
  }
}

// out = activation(what of a gate exceeds the cutoff of its row, or 0) * up
void cut_off(const Program *p, const Op *op, const Batch *b, int item, int items) {
  Share s = share(b->tokens, item, items);
  const int n = op->count;
  for (int t = s.from; t < s.to; t++) {
    const float *gates = at(p, b, op->in, t), *ups = gates + n;
    float *out = at(p, b, op->out, t);
    const float mean = mean_of(gates, n), cutoff = mean + sqrtf(mean_square(gates, mean, n)) * op->scale;
    for (int i = 0; i < n; i += W) {
      const vf gate = load_some(gates + i, n - i) - cutoff;
      const vf inner = gated(pick(gate > 0.0f, gate, set1(0)), load_some(ups + i, n - i), op->activation);
      store_some(out + i, inner, n - i);
    }
  }
}

// out[i] += sum over j of factor[i][j] * in[j], in the order of j; `in` may be `out`.
void blend(const Program *p, const Op *op, const Batch *b, int item, int items) {
  Share s = share(b->tokens, item, items);
  const int n = op->count, inputs = p->widths[op->in] / n, outputs = p->widths[op->out] / n;
  float x[inputs];
  for (int t = s.from; t < s.to; t++) {
    const float *in = at(p, b, op->in, t), *factor = at(p, b, op->gate, t);
    float *out = at(p, b, op->out, t);
    for (int k = 0; k < n; k++) {
      for (int j = 0; j < inputs; j++) x[j] = in[(int64_t)j * n + k];
      for (int i = 0; i < outputs; i++) {
        float total = out[(int64_t)i * n + k];
        for (int j = 0; j < inputs; j++) total += factor[i * inputs + j] * x[j];
        out[(int64_t)i * n + k] = total;
      }
    }
  }
}

void rescale(const Program *p, const Op *op, const Batch *b, int item, int items) {
  Share s = share(b->tokens, item, items);
  const int n = op->count, streams = p->widths[op->out] / n;
  for (int t = s.from; t < s.to; t++) {
    float *stream = at(p, b, op->out, t);
    const float target = sqrtf(mean_square(stream, 0, n));
    for (int i = 1; i < streams; i++) {
      stream += n;
      const float own = mean_square(stream, 0, n), factor = target / sqrtf(own > op->epsilon ? own : op->epsilon);
      for (int k = 0; k < n; k++) stream[k] *= factor;
    }
  }
}

// Divide by the root of the mean square.
void normalise_plain(float *x, float eps, int n) {
  float total = 0;
  for (int i = 0; i < n; i++) total += x[i] * x[i];
  float factor = 1.0f / sqrtf(total / n + eps);
  for (int i = 0; i < n; i++) x[i] *= factor;
}

// Norms and rotary embedding of queries and keys; keys and values go to the cache.
void rotate(const Program *p, const Op *op, const Batch *b, int item, int items) {
  Share s = share(b->tokens, item, items);
  const int d = op->head_dim, half_ = op->rotary / 2, queries = op->heads * d, keys = op->kv_heads * d;
  for (int t = s.from; t < s.to; t++) {
    float *head = at(p, b, op->in, t);
    if (op->qk_norm == BY_ROW) {
      normalise(head, op->norm, queries, head);
      if (keys) normalise(head + queries, op->key_norm, keys, head + queries);
    }
    for (int h = 0; h < op->heads + op->kv_heads; h++, head += d) {
      const Norm &norm = h < op->heads ? op->norm : op->key_norm;
      auto normalise_head = [&](int when) {
        if (op->qk_norm == when && norm.kind != NO_NORM) normalise(head, norm, d, head);
      };
      normalise_head(BY_HEAD);
      if (!op->cosine) {
        normalise_head(AFTER_ROPE);
        continue;
      }
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
      normalise_head(AFTER_ROPE);
    }
    float *query = at(p, b, op->in, t), *key = query + queries, *value = key + keys;
    for (int i = 0; op->query_scale && i < queries; i++) query[i] *= op->query_scale[b->positions[t]];
    for (int h = 0; h < op->kv_heads; h++, key += d, value += d) {
      if (op->value_norm) normalise_plain(value, op->epsilon, d);
      if (b->kv_format == BF16) Head<uint16_t>(op, b, h).put(b->store[t], key, value);
      else Head<float>(op, b, h).put(b->store[t], key, value);
    }
  }
}

// Read the matrix and do nothing with it, as fast as memory gives it.
void read(const Op *op, int item, int items) {
  const Matrix &a = op->matrix;
  Share s = share((a.outputs + BLOCK - 1) / BLOCK, item, items);
  const char *p = (const char *)a.weight + (int64_t)s.from * BLOCK * a.padded, *end = (const char *)a.weight + (int64_t)s.to * BLOCK * a.padded;
  typedef int64_t lanes __attribute__((vector_size(32), aligned(8)));
  lanes total[4] = {};
  for (; p < end; p += 128) {
    _mm_prefetch(p + 4096, _MM_HINT_T1);
    _mm_prefetch(p + 4160, _MM_HINT_T1);
    for (int i = 0; i < 4; i++) total[i] += *(const lanes *)(p + 32 * i);
  }
  volatile int64_t sink = (total[0] + total[1] + total[2] + total[3])[0];
  (void)sink;
}

void activate_row(float *x, int kind, int n) {
  int i = 0;
  for (; i + W <= n; i += W) store(x + i, activate(load(x + i), kind));
  vf tail{};
  for (int j = i; j < n; j++) tail[j - i] = x[j];
  tail = activate(tail, kind);
  for (; i < n; i++) x[i] = tail[i % W];
}

}  // namespace

#include "recurrent.h"

namespace {

// Copy a buffer as it is now: a hidden state that a drafter reads.
void save(const Program *p, const Op *op, const Batch *b, int item, int items) {
  Share s = share(b->tokens, item, items);
  int n = p->widths[op->in];
  for (int t = s.from; t < s.to; t++) {
    float *out = at(p, b, op->out, t);
    normalise(at(p, b, op->in, t), op->norm, n, out);
    normalise(out, op->after, n, out);
    if (op->activation) activate_row(out, op->activation, n);
  }
}

void run(const Program *p, const Op *op, const Batch *b, int item, int items, int phase) {
  if (op->kind == EMBED) embed(p, op, b, item, items);
  else if (op->kind == ROTATE) rotate(p, op, b, item, items);
  else if (op->kind == ATTEND) attend(p, op, b, item, items);
  else if (op->kind == READ) read(op, item, items);
  else if (op->kind == SAVE) save(p, op, b, item, items);
  else if (op->kind == ROUTE) route(p, op, b, item, items);
  else if (op->kind == MIX) mix(p, op, b, item, items);
  else if (op->kind == CONVOLVE) convolve(p, op, b, item, items);
  else if (op->kind == RECUR) recur(p, op, b, item, items);
  else if (op->kind == GATE) gate_output(p, op, b, item, items);
  else if (op->kind == CUTOFF) cut_off(p, op, b, item, items);
  else if (op->kind == BLEND) blend(p, op, b, item, items);
  else if (op->kind == RESCALE) rescale(p, op, b, item, items);
  else if (phase == 0) prepare(p, op, b, item, items);
  else if (phase == 1 && op->experts) multiply_experts(p, op, b, item, items);
  else multiply(p, op, b, item, items);
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
      if (format == F16)  // what a file holds in half precision: nothing is rounded
        for (int k = 0; k < padded; k++) ((uint16_t *)weight)[base + (int64_t)k * BLOCK + o] = to_half(rows[k]);
      if (format == BF16)
        for (int k = 0; k < padded; k++)
          ((uint16_t *)weight)[base + (int64_t)(k / 2) * 2 * BLOCK + o * 2 + k % 2] = to_bf16(rows[k]);
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
      if (format == INT4 && o == 0) memset((uint8_t *)weight + base / 2, 0, BLOCK * padded / 2);
      if (format == INT4)
        for (int g = 0; g < padded / GROUP4; g++) {
          float s = scale_of_group(rows + g * GROUP4, GROUP4);
          ((uint16_t *)scale)[base / GROUP4 + (int64_t)g * BLOCK + o] = to_half(s);
          for (int i = 0; i < GROUP4; i++) {
            int k = g * GROUP4 + i, q = s != 0 ? (int)rintf(rows[k] / s) : 0;
            q = (q < -8 ? -8 : q > 7 ? 7 : q) + 8;
            put(4, (uint8_t *)weight + base / 2, k, o, q);
          }
        }
    }
}

#if defined(__AMX_INT8__)
bool works() { return tiles_work(); }
#else
bool works() { return true; }
#endif

const Variant variant = {NAME, works, run, pack, repack, unpack_row, draw, sample, rank};

}  // namespace

const Variant *VARIANT = &variant;
