// Several rounds in one call: draft a chain for a request, run the target over it, keep what the target draws; or decode
// several requests without drafts. Python decides what holds for all rounds beforehand, and learns from each of them
// afterwards. Its interpreter does not run between two passes, whose weights would have pushed its code out of the caches.
#pragma once
#include <algorithm>
#include <cstring>
#include <ctime>
#include <vector>

#include "common.h"
#include "noise.h"

constexpr int MOST_NODES = 32;  // of a draft, without its root

// The sequences of n tokens that occur in a text, as a hash set. A sequence that is found there by accident costs nothing but
// a return to Python.
struct Grams {
  uint64_t *slots;  // 0 is empty
  int64_t size;     // a power of two, at least twice the sequences
  int32_t n, pad;
};

// A head that drafts from the target's hidden states. Its first pass reads the tokens whose states it has not read yet, each
// with the token behind it, and gives the first token.
struct Head {
  const Program *begin, *step;
  const Batch *batch;             // buffers, scratch and cache
  const int64_t *line;            // rows of its cache
  const int64_t *ids;             // as in Chain
  const float *acceptance;        // rates by bins of a token's probability, those of siblings behind
  const double *costs;            // seconds of the target's pass, by drafted nodes
  int32_t length;                 // rows in its cache
  int32_t levels, siblings;       // most tokens of a chain, and most alternatives to them
  int32_t num_ids, vocab, state;
  int32_t input, inputs;          // buffers of the first pass that take the states: one a layer, or one for all, side by side
  float floor;                    // as in Chain
};

struct Round {                    // what one did
  int32_t nodes, verified;        // drafted, and how many of them were verified: the first ones
  int32_t accepted, appended;     // nodes that were accepted; tokens that were added to the text
  int32_t tokens[MOST_NODES], parents[MOST_NODES];  // of the nodes; 0 is the root
  int32_t path[MOST_NODES];       // the accepted ones
  int32_t drawn[MOST_NODES + 1];  // the target's tokens behind the root and them
  int8_t bins[MOST_NODES];        // of the drafter's probabilities, those of siblings behind
  double path_probs[MOST_NODES];  // that all tokens up to a node are accepted
  double draft_seconds, verify_seconds, wall_seconds;  // two of this thread's time, all by the clock
};

struct Rounds {
  const Program *target;
  const Batch *batch;             // buffers, scratch and cache
  const int64_t *line;            // rows of the cache
  int64_t *text;                  // the last token is the root of the first draft
  const int64_t *ends;            // tokens that end the text
  const int32_t *layouts;         // of the cache: heads of all layers with as many channels, and how many; to the end, 0
  float *const *states;           // [layers] hidden states of committed tokens, in order
  const Grams *const *grams;      // of texts that a draft might be copied from: this one, and others
  const Head *head;               // or null: nothing is drafted
  Round *rounds;
  uint64_t noise;                 // the stream of the target's draws, without a position
  Sampling sampling;
  int32_t count, limit;           // tokens in the text, and when it ends
  int32_t num_ends, layers;       // layers: of hidden states, whose buffers begin behind the logits
  int32_t unread;                 // how many of the states are there already, which the head has not read
  int32_t most, logits;           // rounds; buffer of logits
  int32_t num_grams;              // 0: nothing is copied
  double seconds;                 // after which no further round begins
};

namespace {

inline double clock_of(clockid_t which) {
  timespec t;
  clock_gettime(which, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// The slot of the last n tokens of a text, which holds their key or is empty; null for a shorter text.
inline uint64_t *slot_of(const Grams &grams, const int64_t *text, int count, uint64_t &key) {
  if (count < grams.n) return nullptr;
  key = 0;
  for (int i = count - grams.n; i < count; i++) key = mix(key + (uint64_t)text[i] * GOLDEN + 1);
  key += !key;
  uint64_t at = key;
  while (true) {
    uint64_t *slot = grams.slots + (at++ & (uint64_t)(grams.size - 1));
    if (!*slot || *slot == key) return slot;
  }
}
inline bool occurs(const Grams &grams, const int64_t *text, int count) {
  uint64_t key;
  const uint64_t *slot = slot_of(grams, text, count, key);
  return slot && *slot;
}
inline void add(const Grams &grams, const int64_t *text, int count) {
  uint64_t key;
  if (uint64_t *slot = slot_of(grams, text, count, key)) *slot = key;
}

// The nodes of a draft, the likeliest first and a parent before its children: a chain, and the likeliest siblings of its
// tokens; and how many of them to verify. As `Tree.add_drafted` and `DepthPolicy.num_worth_verifying` in Python.
inline void order_nodes(const Head &head, const int64_t *tokens, const int8_t *bins, const int64_t *alternatives,
                        const int8_t *alternative_bins, int count, Round &round) {
  struct Node { double path_prob; int level, token, bin; };
  std::vector<Node> nodes, siblings;
  double above = 1;
  for (int level = 0; level < count; level++) {
    for (int i = level * NUM_ALTERNATIVES; i < (level + 1) * NUM_ALTERNATIVES; i++)
      if (alternatives[i] >= 0) {
        const int bin = alternative_bins[i] + CONFIDENCE_BINS;
        siblings.push_back({above * (double)head.acceptance[bin], level, (int)alternatives[i], bin});
      }
    above *= std::min((double)head.acceptance[bins[level]], 1.0);
    nodes.push_back({above, level, (int)tokens[level], bins[level]});
  }
  std::stable_sort(siblings.begin(), siblings.end(), [](const Node &a, const Node &b) { return a.path_prob > b.path_prob; });
  siblings.resize(std::min({(int)siblings.size(), head.siblings, MOST_NODES - count}));
  nodes.insert(nodes.end(), siblings.begin(), siblings.end());
  std::stable_sort(nodes.begin(), nodes.end(), [](const Node &a, const Node &b) {
    return a.path_prob > b.path_prob || (a.path_prob == b.path_prob && a.level < b.level);
  });
  std::vector<int> chain{0};  // nodes of the chain, by level
  round.nodes = (int)nodes.size();
  for (int i = 0; i < round.nodes; i++) {
    const Node &node = nodes[i];
    round.tokens[i] = node.token, round.parents[i] = chain[node.level];
    round.bins[i] = (int8_t)node.bin, round.path_probs[i] = node.path_prob;
    if (node.bin < CONFIDENCE_BINS) chain.push_back(i + 1);
  }
  double expected = 1, best = 1 / head.costs[0];  // tokens; tokens a second
  round.verified = 0;
  for (int i = 0; i < round.nodes; i++) {
    expected += round.path_probs[i];
    const double speed = expected / head.costs[i + 1];
    if (speed > best) best = speed, round.verified = i + 1;
  }
}

// Arrays of a pass over consecutive rows of one slot.
struct SlotPass {
  Batch b;
  std::vector<int64_t> ids, positions, store, extra, want;
  std::vector<const int64_t *> rows;
  std::vector<int32_t> direct, extra_at;

  SlotPass(const Batch &of, const int64_t *line, int count) : b(of), ids(count), positions(count), store(count), want(count),
    rows(count, line), direct(count), extra_at(count + 1) {}
  void token(int i, int64_t id, int64_t position, int64_t row, int seen) {
    ids[i] = id, positions[i] = position, store[i] = row, direct[i] = seen, want[i] = i;
    extra_at[i + 1] = (int32_t)extra.size();
  }
  const Batch *batch(int first, int wanted) {  // logits are wanted of so many tokens, from `first` on
    b.tokens = (int32_t)ids.size(), b.wanted = wanted;
    b.ids = ids.data(), b.positions = positions.data(), b.store = store.data(), b.rows = rows.data();
    b.direct = direct.data(), b.extra_at = extra_at.data(), b.extra = extra.data();
    b.want = want.data() + first;
    return &b;
  }
};

// Copy the keys and values of row `from` to row `to`, in all layers; see attention.h for where they lie.
template <typename T> void move_row(const Batch &b, const int32_t *layouts, int64_t from, int64_t to) {
  T *keys = (T *)b.keys, *values = (T *)b.values;
  for (; layouts[0]; layouts += 2)
    for (int head = 0; head < layouts[0]; head++) {
      const int64_t channels = layouts[1];
      for (int64_t d = 0; d < channels; d++)
        keys[(to / 16 * channels + d) * 16 + to % 16] = keys[(from / 16 * channels + d) * 16 + from % 16];
      memcpy(values + to * channels, values + from * channels, (size_t)channels * sizeof(T));
      keys += b.cache_rows * channels, values += b.cache_rows * channels;
    }
}

// The pass over the root and the first nodes of a draft, behind `length` committed rows.
inline SlotPass tree_pass(const Rounds &r, const Round &round, int count, int length) {
  SlotPass pass(*r.batch, r.line, 1 + round.verified);
  struct Seen { int straight; std::vector<int64_t> others; };  // tokens that a node sees: the first ones, and further ones
  std::vector<Seen> seen(1 + (size_t)round.verified);
  for (int i = 0; i <= round.verified; i++) {
    Seen &own = seen[i];
    const int64_t row = r.line[length + i];
    if (i == 0) own = {1, {}};
    else {
      own = seen[round.parents[i - 1]];
      if (own.others.empty() && own.straight == i) own.straight++;
      else own.others.push_back(row);
    }
    pass.extra.insert(pass.extra.end(), own.others.begin(), own.others.end());
    const int depth = own.straight + (int)own.others.size() - 1;
    pass.token(i, i ? round.tokens[i - 1] : r.text[count - 1], length + depth, row, length + own.straight);
  }
  return pass;
}

}  // namespace
