// Recurrent layers: causal convolutions, and states that each token changes (gated delta rule, Mamba-2, lightning attention).
//
// A slot keeps the state behind its committed tokens but for the last few. Those are pending: of each there is a record,
// the small inputs of its change, and the next pass applies them before its own tokens while it sweeps over the state
// anyway. Known tokens of a pass, which are certain to stay, change the state at once; of each further node the pass
// leaves a record. A commit moves records. So a state is read and written once a pass, as plain decoding does, whatever is
// drafted, and a token's change is computed in the same order however it comes about.
#pragma once
#include "vector.h"

namespace {

// Where the numbers of a record are, and how long it is.
struct RecordLayout {
  int u, k, d, decay, factor, size;
  explicit RecordLayout(const Op *op)
      : u(0), k(op->taps > 1 ? op->channels : 0), d(k + op->key_heads * op->key_size), decay(d + op->value_heads * op->value_size),
        factor(decay + op->value_heads), size(factor + op->value_heads) {}
};

// The inputs of a convolution and the records of one layer in one half of a slot's memory. `history` are the inputs of the
// tokens before the first record, the oldest first.
struct Half {
  float *history, *records;
  int channels, taps, record;
  Half(const Op *op, float *base)
      : history(base + op->half_at), records(history + (op->taps - 1) * op->channels), channels(op->channels), taps(op->taps),
        record(RecordLayout(op).size) {}
  float *row(int i) const { return records + (int64_t)i * record; }
  // The input of a token `back` before record 0.
  const float *before(int back) const { return history + (int64_t)(taps - 1 - back) * channels; }
};

// What a run, the tokens of one slot in a pass, looks like. Nodes are numbered as in `parents`: known tokens, nodes of
// earlier passes, nodes of this one.
struct Run {
  int first, count, known, offset, pending;
  const int32_t *parents;
  Run(const Recurrent *r, int run)
      : first(r->first[run]), count(r->count[run]), known(r->known[run]), offset(r->offset[run]), pending(r->pending[run]),
        parents(r->parents + r->parents_at[run]) {}
  int nodes() const { return offset + count; }
  int token(int node) const { return first + node - offset; }  // of the pass
};

// The input of the convolution for a token of this pass: as it stands in the buffer, or the product of two parts of it.
inline float input_of(const Op *op, const float *row, int c) {
  return op->gated ? row[op->in_column + c] * row[op->in_column + 2 * op->channels + c] : row[op->in_column + c];
}

void convolve_node(const Program *p, const Op *op, const Batch *b, const Recurrent *r, int run_, int node) {
  const Run run(r, run_);
  const Half from(op, r->from[run_]), to(op, r->to[run_]);
  const int taps = op->taps, channels = op->channels;
  const float *own = at(p, b, op->in, run.token(node));
  float *out = at(p, b, op->out, run.token(node));
  if (taps == 1) {  // no convolution, and nothing of it in records
    memcpy(out, own + op->in_column, sizeof(float) * channels);
    activate_row(out, op->activation, channels);
    return;
  }
  // the inputs of the tokens before it, the nearest first; a null stands for one of this pass, which `row` has
  const float *stored[8] = {}, *row[8] = {};
  int at_ = run.parents[node], back = 0;
  for (int i = 0; i < taps - 1; i++) {
    if (at_ >= run.offset) row[i] = at(p, b, op->in, run.token(at_));
    else if (at_ >= 0) stored[i] = to.row(at_ - run.known);
    else if (back < run.pending) stored[i] = from.row(run.pending - 1 - back++);
    else stored[i] = from.before(1 + back++ - run.pending);
    if (at_ >= 0) at_ = run.parents[at_];
  }
  float *record = node >= run.known ? to.row(node - run.known) : nullptr;
  for (int c = 0; c < channels; c++) {
    const float u = input_of(op, own, c), *weight = op->conv_weight + (int64_t)c * taps;
    float sum = op->conv_bias ? op->conv_bias[c] : 0.0f;
    for (int i = taps - 2; i >= 0; i--) sum += weight[taps - 2 - i] * (row[i] ? input_of(op, row[i], c) : stored[i][c]);
    sum += weight[taps - 1] * u;
    out[c] = sum;
    if (record) record[c] = u;
  }
  if (op->gated) {
    for (int c = 0; c < channels; c++) out[c] *= own[op->in_column + channels + c];
    return;
  }
  activate_row(out, op->activation, channels);
}

// Keys, decays and factors of a token, from what the convolution left in `out`; they follow there, and in its record.
void prepare_node(const Program *p, const Op *op, const Batch *b, const Recurrent *r, int run_, int node) {
  const Run run(r, run_);
  const RecordLayout layout(op);
  const int size = op->key_size, heads = op->value_heads;
  float *out = at(p, b, op->out, run.token(node)), *decay = out + op->channels, *factor = decay + heads;
  // [heads] of the decay, then those of beta; or null where decays are the same for all tokens
  const float *inputs = op->gate < 0 ? nullptr : at(p, b, op->gate, run.token(node));
  if (op->delta) {
    auto normalise_all = [&](float *x, float scale) {
      for (int h = 0; h < op->key_heads; h++, x += size) {
        float total = 0;
        for (int i = 0; i < size; i++) total += x[i] * x[i];
        const float f = scale / sqrtf(total + 1e-6f);
        for (int i = 0; i < size; i++) x[i] *= f;
      }
    };
    normalise_all(out + op->query_at, 1.0f / sqrtf((float)size));
    normalise_all(out + op->key_at, 1.0f);
  }
  for (int h = 0; h < heads; h++) {
    float step = 1.0f;
    if (inputs) {
      const float x = inputs[h] + op->decay_bias[h];
      step = x > 20.0f ? x : log1pf(expf(x));
    }
    decay[h] = expf(op->decay_rate[h] * step);
    factor[h] = op->delta ? 1.0f / (1.0f + expf(-inputs[heads + h])) : step;
  }
  if (node < run.known) return;
  float *record = Half(op, r->to[run_]).row(node - run.known);
  memcpy(record + layout.k, out + op->key_at, sizeof(float) * op->key_heads * size);
  memcpy(record + layout.decay, decay, sizeof(float) * heads);
  memcpy(record + layout.factor, factor, sizeof(float) * heads);
}

void convolve(const Program *p, const Op *op, const Batch *b, int item, int items) {
  const Recurrent *r = b->recurrent;
  Share s = share(b->tokens, item, items);
  for (int run_ = 0; run_ < r->runs; run_++) {
    const Run run(r, run_);
    for (int node = run.offset; node < run.nodes(); node++) {
      const int t = run.token(node);
      if (t < s.from || t >= s.to) continue;
      convolve_node(p, op, b, r, run_, node);
      if (op->value_heads) prepare_node(p, op, b, r, run_, node);
    }
  }
}

// One token's change of 16 columns of a head's state [key_size][16], as it was computed before: from its record.
inline void replay(float *state, const float *k, int size, float decay, float factor, bool delta, vf d) {
  for (int i = 0; i < size; i++) {
    const float key = delta ? k[i] : factor * k[i];
    store(state + i * W, fma(set1(key), d, load(state + i * W) * decay));
  }
}

// The same of a new token, from `before` to `after`; returns its output. d is what the delta rule makes of v.
inline vf advance(
    const float *before, float *after, const float *q, const float *k, int size, float decay, float factor, bool delta, vf v,
    vf *d
) {
  if (delta) {
    vf m = set1(0);
    for (int i = 0; i < size; i++) m = fma(load(before + i * W) * decay, set1(k[i]), m);
    v = (v - m) * factor;
  }
  *d = v;
  vf o = set1(0);
  for (int i = 0; i < size; i++) {
    const float key = delta ? k[i] : factor * k[i];
    const vf s = fma(set1(key), v, load(before + i * W) * decay);
    store(after + i * W, s);
    o = fma(s, set1(q[i]), o);
  }
  return o;
}

// 16 columns of one head over the tokens of one run.
void sweep(const Program *p, const Op *op, const Batch *b, const Recurrent *r, int run_, int head, int block) {
  const Run run(r, run_);
  const RecordLayout layout(op);
  const Half from(op, r->from[run_]), to(op, r->to[run_]);
  const int size = op->key_size, key_head = op->tiled ? head % op->key_heads : head / (op->value_heads / op->key_heads);
  const int blocks = (op->value_size + W - 1) / W, column = head * op->value_size + block * W;
  const int lanes = op->value_size - block * W < W ? op->value_size - block * W : W;
  const int64_t state_at = op->state_at + (int64_t)(head * blocks + block) * size * W;
  float *state = r->state[run_] + state_at;
  const int nodes = run.nodes() - run.known;
  alignas(64) float scratch[(nodes > 0 ? nodes : 1) * size * W];
  int applied = 0, mark = r->marks_at[run_];
  auto reached = [&]() {  // a mark asks for a copy of the state behind so many tokens
    applied++;
    while (mark < r->marks_at[run_ + 1] && r->marks[mark] == applied)
      memcpy(r->mark_to[mark++] + state_at, state, sizeof(float) * size * W);
  };
  for (int i = 0; i < run.pending; i++) {
    const float *record = from.row(i);
    replay(state, record + layout.k + key_head * size, size, record[layout.decay + head], record[layout.factor + head], op->delta,
           load_some(record + layout.d + column, lanes));
    reached();
  }
  auto token = [&](int node, const float *before, float *after) {
    const float *row = at(p, b, op->in, run.token(node)), *decay = row + op->channels, *factor = decay + op->value_heads;
    vf d, o = advance(before, after, row + op->query_at + key_head * size, row + op->key_at + key_head * size, size, decay[head],
                      factor[head], op->delta, load_some(row + op->value_at + column, lanes), &d);
    store_some(at(p, b, op->out, run.token(node)) + column, o, lanes);
    return d;
  };
  for (int node = 0; node < run.known; node++) {
    token(node, state, state);
    reached();
  }
  for (int node = run.known; node < run.nodes(); node++) {
    const int parent = run.parents[node];
    const float *before = parent < run.known ? state : scratch + (int64_t)(parent - run.known) * size * W;
    float *after = scratch + (int64_t)(node - run.known) * size * W, *record = to.row(node - run.known);
    if (node < run.offset) {
      memcpy(after, before, sizeof(float) * size * W);
      replay(after, record + layout.k + key_head * size, size, record[layout.decay + head], record[layout.factor + head], op->delta,
             load_some(record + layout.d + column, lanes));
    } else {
      store_some(record + layout.d + column, token(node, before, after), lanes);
    }
  }
}

// The inputs of the convolution before `applied` pending and known tokens' end.
void keep_history(const Program *p, const Op *op, const Batch *b, const Recurrent *r, int run_, int applied, float *history) {
  const Run run(r, run_);
  const Half from(op, r->from[run_]);
  for (int i = 0; i < op->taps - 1; i++) {  // the oldest first
    const int index = applied - (op->taps - 1) + i;  // among pending and known tokens
    float *to = history + (int64_t)i * op->channels;
    if (index >= run.pending) {
      const float *row = at(p, b, op->conv_in, run.token(index - run.pending));
      for (int c = 0; c < op->channels; c++) to[c] = input_of(op, row, c);
    } else {
      memcpy(to, index >= 0 ? from.row(index) : from.before(-index), sizeof(float) * op->channels);
    }
  }
}

// States of all heads, and what the convolution of the next pass begins with.
void recur(const Program *p, const Op *op, const Batch *b, int item, int items) {
  const Recurrent *r = b->recurrent;
  const int blocks = (op->value_size + W - 1) / W, each = op->value_heads * blocks + 1;
  Share s = share(r->runs * each, item, items);
  for (int unit = s.from; unit < s.to; unit++) {
    const int run_ = unit / each, part = unit % each;
    if (part < each - 1) {
      sweep(p, op, b, r, run_, part / blocks, part % blocks);
      continue;
    }
    const Run run(r, run_);
    if (r->from[run_] != r->to[run_]) keep_history(p, op, b, r, run_, run.pending + run.known, Half(op, r->to[run_]).history);
    for (int mark = r->marks_at[run_]; mark < r->marks_at[run_ + 1]; mark++)
      keep_history(p, op, b, r, run_, r->marks[mark], r->mark_to[mark] + r->history_at + op->history_at);
  }
}

// The output of a recurrent layer: y = o + skip x, gated and normalised in groups.
void gate_output(const Program *p, const Op *op, const Batch *b, int item, int items) {
  Share s = share(b->tokens, item, items);
  const int n = op->value_heads * op->value_size, group = op->count;
  for (int t = s.from; t < s.to; t++) {
    float *y = at(p, b, op->out, t);
    const float *gate = at(p, b, op->gate, t) + op->in_column, *x = at(p, b, op->in, t) + op->value_at;
    float opened[n];
    for (int i = 0; i < n; i++) opened[i] = op->scale != 0 ? gate[i] * op->scale : gate[i];
    activate_row(opened, op->activation, n);
    for (int i = 0; op->skip && i < n; i++) y[i] += op->skip[i / op->value_size] * x[i];
    if (op->gate_first)
      for (int i = 0; i < n; i++) y[i] *= opened[i];
    if (op->norm.kind != NO_NORM)
      for (int i = 0; i < n; i += group) {
        Norm own = op->norm;
        own.weight += op->tiled_norm ? 0 : i;
        normalise(y + i, own, group, y + i);
      }
    if (!op->gate_first)
      for (int i = 0; i < n; i++) y[i] *= opened[i];
  }
}

}  // namespace
