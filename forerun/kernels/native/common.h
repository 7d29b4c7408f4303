// What the instruction-set variants share: the packed formats, the operations of a program and their arguments.
// A program is a decoder recorded once as a list of operations over preallocated buffers; `Batch` is what changes from
// pass to pass. Everything here is plain data so that Python can fill it through ctypes.
#pragma once
#include <cstdint>

constexpr int BLOCK = 32;        // outputs packed side by side
constexpr int GROUP8 = 64;       // activations that share a scale
constexpr int GROUP4 = 32;       // 4-bit weights that share a scale

// From F16 on they are GGUF's: the numbers of a file as they are, see formats.h. INT4 is Q4_0.
enum Format : int32_t { F32, BF16, INT8, INT4, F16, Q8_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, MXFP4, FORMATS };
enum FileType : int32_t {  // GGUF's numbers of the types that are repacked
  GGML_Q4_0 = 2, GGML_Q4_1 = 3, GGML_Q5_0 = 6, GGML_Q5_1 = 7, GGML_Q8_0 = 8, GGML_Q3_K = 11, GGML_Q4_K = 12, GGML_Q5_K = 13,
  GGML_Q6_K = 14, GGML_IQ4_NL = 20, GGML_MXFP4 = 39,
};
// READ measures memory. SAVE copies rows, normed by `norm` and `after`, then activated. ROUTE chooses experts, MIX adds up
// what they give. CONVOLVE, RECUR and GATE are the parts of a recurrent layer, see recurrent.h. CUTOFF gates the ups that stand
// behind gates in a row, with what of each gate exceeds the mean of all plus `scale` standard deviations. BLEND and RESCALE work
// on residual streams, which stand side by side in a row: BLEND adds every stream of `in`, times a factor in `gate`, to each
// of `out`; RESCALE gives all streams of `out` the root mean square of the first.
enum Kind : int32_t {
  EMBED = 0, LINEAR = 1, ROTATE = 2, ATTEND = 3, READ = 4, SAVE = 5, ROUTE = 6, MIX = 7, CONVOLVE = 8, RECUR = 9, GATE = 10,
  CUTOFF = 11, BLEND = 12, RESCALE = 13
};
enum NormKind : int32_t { NO_NORM = 0, RMS = 1, LAYER = 2, FACTORS = 3 };  // FACTORS: only the weights
enum Combine : int32_t { REPLACE = 0, ADD = 1, TIMES = 2, GATED = 3 };  // GATED: the values already in `out` are the gates
enum Activation : int32_t {  // CLAMPED_SWIGLU: only gated. XIELU: only LINEAR
  NONE = 0, SILU = 1, GELU_TANH = 2, GELU = 3, RELU2 = 4, CLAMPED_SWIGLU = 5, SIGMOID = 6, XIELU = 7, TANH = 8
};
enum QkNorm : int32_t { BY_HEAD = 0, BY_ROW = 1, AFTER_ROPE = 2 };
enum Scores : int32_t {  // the last two choose by logits, and weigh by a softmax over the chosen ones or by sigmoids
  SOFTMAX = 0, SIGMOIDS = 1, LOGITS = 2, LOGIT_SIGMOIDS = 3
};

// A linear layer. `weight` is packed in blocks of 32 outputs; inputs are padded to a multiple of 64, outputs of 32.
struct Matrix {
  const void *weight;
  const void *scale;        // INT8: float [outputs]; formats in groups: bytes, see formats.h
  const float *bias;        // float [outputs] or null
  int32_t format, inputs, outputs, padded;
};

struct Norm {
  const float *weight, *bias;
  float eps;
  int32_t kind;
};

// Buffers are float [rows][width] and named by index; `in` and `out` are buffer indices.
struct Op {
  int32_t kind, in, out, in_column;  // in_column: where in a row of `in` LINEAR and MIX begin
  Norm norm, key_norm, after;    // LINEAR: norm before the product. ROTATE: query and key norms. MIX and SAVE: after
  Matrix matrix;
  int32_t activation, gated;     // LINEAR and SAVE: activation of the result, CUTOFF: of gates; gated: gate and up interleaved by 16
  int32_t combine, wanted;       // LINEAR: what is done with what stands in `out`; take only the wanted rows
  const float *cosine, *sine;    // ROTATE: [context][rotary / 2] or null
  int32_t rotary, window;
  float scale, softcap;          // ATTEND; LINEAR on its result, or on its gates, unless 0 (softcap: logits); MIX and EMBED: scale;
                                 // GATE: scale of the gates, unless 0
  const void *table;             // EMBED: [vocab][hidden] in `format`, or null: rows of `matrix`, which is packed
  const float *positions;        // EMBED: learned positions or null
  int32_t column, sinks;         // LINEAR and EMBED: where in a row of `out` the result begins. ATTEND: 64, if the first keys are seen
                                 // whatever the window, or 0

  // ROTATE and ATTEND
  int32_t heads, kv_heads, head_dim;  // kv_heads is 0 where ROTATE has only queries
  int32_t qk_norm, value_norm;   // where `norm` and `key_norm` apply; normalise values, without weights
  int32_t kv_width;              // sum of kv_heads * head_dim of the cached layers before this one
  const float *sink_logits;      // ATTEND: [heads] scores that take part in the softmax and have no value, or null
  const float *query_scale;      // ROTATE: [context] factor on the queries of a position, or null

  // Experts. `choice` is a buffer that holds, from `choice_column` on, the numbers of a row's experts and then their weights.
  // LINEAR: `matrix` holds `experts` matrices one behind the other; each row goes through `slots` of them, or through all in
  // order where `choice` is -1 (matrices of heads). ROUTE: `slots`
  // experts of `experts`. MIX: sum of `slots` parts, each `count` numbers, weighted unless `choice` is -1.
  int32_t experts, slots, choice, choice_column;
  int32_t spread, count;         // LINEAR: rows of `in` have a part for each slot, as those of `out` always have
                                 // count, also: BLEND and RESCALE: numbers of a stream. CUTOFF: gates. EMBED: rows of the table where
                                 // there are fewer than tokens; other tokens take the first; 0: all have one
  int32_t in_stride, out_stride; // LINEAR: floats from part to part, 0: they stand side by side
  int32_t scores, normalised, groups, used_groups, best;  // ROUTE; best: how many scores of a group are summed to rate it
  float epsilon, route_scale;    // ROUTE: weights / (sum + epsilon), if normalised, times route_scale. RESCALE: the least mean square
  const float *choice_bias, *expert_scale;  // ROUTE: [experts] added to scores for the choice only; factors on weights; or null
  int32_t gate;                  // MIX: buffer whose first number gates a row, through a sigmoid; -1: none. CONVOLVE: buffer of decays
                                 // and betas, -1: none. GATE: that of gates, from in_column on. BLEND: that of factors, those of a stream of `out` side
                                 // by side

  // Recurrent layers. A row of what CONVOLVE writes: `channels` numbers, then decays and factors of all value heads.
  int32_t channels, taps;        // of the convolution; taps inputs each
  int32_t key_heads, key_size, value_heads, value_size;
  int32_t query_at, key_at, value_at;  // among the channels
  int32_t delta, tiled;          // delta rule; value head h uses key head h mod key_heads instead of h div (value_heads / key_heads)
  int32_t gate_first, tiled_norm;      // GATE: before the norm; one weight of the norm for all groups
  int32_t conv_in;               // RECUR: the buffer that CONVOLVE reads
  int32_t weighted;              // LINEAR with experts: products are multiplied by the weights of the experts, before bias and activation
  int64_t state_at, half_at, history_at;  // floats of a slot's memory before this layer's: states, a half, histories
  const float *conv_weight, *conv_bias;   // [channels][taps], [channels] or null
  const float *decay_bias, *decay_rate;   // [value_heads]: decay = exp(rate * softplus(x + bias)), exp(rate) where gate is -1
  const float *skip;             // GATE: [value_heads] or null

  const float *xielu;            // LINEAR: [4] parameters of XIELU, see vector.h
  int32_t chunk, pad;            // ATTEND: keys before the last position that is a multiple of `chunk` are not seen; 0: no such limit
};

struct Program {
  const Op *ops;
  int32_t count, buffers;
  const int32_t *widths;         // of each buffer
};

// Runs of a pass, the tokens of one slot each; null pointers where no layer is recurrent. See recurrent.h.
struct Recurrent {
  int32_t runs, history_at;                 // history_at: where histories begin in the memory of a mark, behind the states
  const int32_t *first, *count, *known, *offset, *pending;  // [runs]
  const int32_t *parents_at, *parents;      // [runs] where a run's begin; of all its nodes, -1 is the committed prefix
  float *const *state, *const *from, *const *to;  // [runs] states, and the halves with pending records and for new ones
  const int32_t *marks_at, *marks;          // [runs + 1]; after so many pending and known tokens the state is copied
  float *const *mark_to;
};

// T tokens, M wanted rows. Token t sees rows[t][0 .. direct[t]) of its slot and then extra[extra_at[t] .. extra_at[t+1]).
struct Batch {
  int32_t tokens, wanted;
  const int64_t *ids, *positions, *store;   // [T]; store: row of the cache that takes this token's key and value
  const int64_t *const *rows;               // [T] page-table line of the token's slot
  const int32_t *direct, *extra_at;         // [T], [T + 1]
  const int64_t *extra;                     // rows of the cache
  const int64_t *want;                      // [M]
  float *const *buffers;                    // [buffers]
  void *scratch;                            // quantised activations, see scratch_bytes
  void *keys, *values;                      // of all layers, in kv_format; attention.h has the layout of one head
  int64_t cache_rows;                       // rows of the cache
  int32_t kv_format, pad;
  const Recurrent *recurrent;               // or null
};

// How a token is drawn from a row of logits: temperature 0 takes the likeliest.
struct Sampling {
  float temperature;
  int32_t top_k;                            // 0 keeps all
  double top_p;                             // 1 keeps all
  float least;                              // the least score, (logit - largest) / temperature, that min-p leaves
  int32_t pad;
};

// Chains of drafted tokens, one for each row: passes one behind the other, each over the tokens that were sampled after the
// one before. Level l has the first active[l] rows, and its own positions, store and direct in the batch, `rows` further on
// than the level before. With `first`, a pass of `begin` over the unread tokens of each row comes before: the tokens of the
// first level are sampled from its logits, and its hidden states go with them. Both programs have the same buffers. A chain
// ends behind the token with which the estimated probability that all of its tokens are accepted falls below its floor; that is
// the product of each token's acceptance by its confidence bin. Of a block all levels come from one pass: there nothing is
// sampled from the logits of `first`.
struct Chain {
  int32_t levels, rows, logits, vocab;      // logits: their buffer; vocab: tokens below it can be sampled
  const int32_t *active;                    // [levels], never rising
  const Sampling *sampling;                 // [rows]
  const uint64_t *keys;                     // [levels][rows] streams of noise
  int64_t *tokens;                          // [levels + 1][rows]: the first row is an input, or sampled after `first`
  const int64_t *ids;                       // [num_ids] tokens that the logits score, or null: all in order
  int32_t num_ids, state;                   // state: the buffer of the hidden states that accompany the next tokens
  const Program *begin;
  const Batch *first;                       // whose logits are those of the rows, in order; or null
  const int32_t *last;                      // [rows] of the first pass's tokens the last of each row
  const uint64_t *first_keys;               // [rows]
  float *hidden;                            // [rows][width of the first buffer]: the outputs of the first pass for those tokens
  const float *acceptance;                  // [CONFIDENCE_BINS] estimated acceptance by bin, or null: chains do not end early
  const float *floors;                      // [rows]
  int8_t *bins;                             // [levels + 1][rows]: confidence bin of each sampled token
  int64_t *alternatives;                    // [levels + 1][rows][NUM_ALTERNATIVES]: the likeliest other tokens; -1 is none
  int8_t *alternative_bins;                 // [levels + 1][rows][NUM_ALTERNATIVES]: their confidence bins
  int32_t *counts;                          // [rows]: tokens behind the first row of `tokens` that count
};
// Bins of a drafter's probabilities; successors that are kept of a distribution; other tokens that are kept of each level.
enum { CONFIDENCE_BINS = 16, NUM_SUCCESSORS = 8, NUM_ALTERNATIVES = 3 };

// static: each instruction set needs its own copy, or the linker keeps one of them for all
struct Share { int from, to; };
static inline Share share(int n, int item, int items) {
  return {(int)((int64_t)n * item / items), (int)((int64_t)n * (item + 1) / items)};
}
static inline float *at(const Program *p, const Batch *b, int buffer, int64_t row) {
  return b->buffers[buffer] + row * p->widths[buffer];
}

struct Variant {
  const char *name;
  bool (*works)();  // false where instructions do not do what they should
  void (*op)(const Program *, const Op *, const Batch *, int item, int items, int phase);
  void (*pack)(int format, const float *source, int outputs, int inputs, void *weight, void *scale);
  bool (*repack)(int type, int format, const uint8_t *const *rows, int outputs, int inputs, void *weight, void *scale);
  void (*unpack)(const Matrix &a, int64_t output, float *to);
  int64_t (*draw)(const float *scores, int vocab, uint64_t key);
  int64_t (*sample)(const float *logits, int vocab, const Sampling &by, uint64_t key, const int64_t *ids);
  bool (*rank)(const float *logits, int vocab, int32_t *tokens, float *logs);
};

int64_t padded_inputs(int inputs);
extern const Variant *amx_variant, *avx512_variant, *avx512vnni_variant, *avxvnni_variant, *avx2_variant, *portable_variant;
