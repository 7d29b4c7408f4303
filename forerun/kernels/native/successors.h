// Successor tables: for the last two tokens of a text, and for the last one, the likeliest next tokens of the distribution that
// the target had behind them (Token Recycling, arXiv 2408.08696), and trees of the likeliest nodes that grow from them.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "common.h"
#include "noise.h"

// Sets of `WAYS` entries, the one that was kept last first. A key of 0 is an empty entry.
struct Successors {
  uint64_t *keys;     // [entries]
  int32_t *tokens;    // [entries][NUM_SUCCESSORS], -1 behind the last
  float *logs;        // [entries][NUM_SUCCESSORS] natural logarithms of their probabilities
  int64_t entries;    // a power of two
};

// What a tree grows behind, and how far.
struct Growth {
  int32_t before, root;         // the last two tokens; -1 where there is only one
  int32_t levels, most, chain;  // nodes at most, root apart; a chain has one a level
  float temperature;            // at 0, or without keys, the probabilities are the kept ones
  const uint64_t *keys;         // [levels] streams of noise that the target draws with behind each level, or null
  const float *acceptance;      // [CONFIDENCE_BINS] acceptance by bin of the probability, or null: the probability itself
};

namespace {

constexpr int WAYS = 4;

inline uint64_t pair_of(int before, int token) { return (uint64_t)(before + 2) << 32 | (uint32_t)token; }

inline int64_t set_of(const Successors *table, uint64_t key) {
  return (int64_t)(mix(key) & (uint64_t)(table->entries - 1)) / WAYS * WAYS;
}

void keep(const Successors *table, uint64_t key, const int32_t *next, const float *logs) {
  int64_t first = set_of(table, key), at = first;
  while (at < first + WAYS - 1 && table->keys[at] != key) at++;  // where it is, or else the one that was kept first
  memmove(table->keys + first + 1, table->keys + first, (at - first) * sizeof(uint64_t));
  memmove(table->tokens + (first + 1) * NUM_SUCCESSORS, table->tokens + first * NUM_SUCCESSORS, (at - first) * NUM_SUCCESSORS * sizeof(int32_t));
  memmove(table->logs + (first + 1) * NUM_SUCCESSORS, table->logs + first * NUM_SUCCESSORS, (at - first) * NUM_SUCCESSORS * sizeof(float));
  table->keys[first] = key;
  memcpy(table->tokens + first * NUM_SUCCESSORS, next, NUM_SUCCESSORS * sizeof(int32_t));
  memcpy(table->logs + first * NUM_SUCCESSORS, logs, NUM_SUCCESSORS * sizeof(float));
}

// The entry of a pair, or else of its last token; the first table goes first. -1 where there is none.
int64_t find(const Successors *tables, int count, int before, int token, const Successors **found) {
  for (uint64_t key : {pair_of(before, token), pair_of(-1, token)})
    for (int t = 0; t < count; t++) {
      int64_t first = set_of(tables + t, key);
      for (int64_t at = first; at < first + WAYS; at++)
        if (tables[t].keys[at] == key) return *found = tables + t, at;
    }
  return -1;
}

// The probability of each successor: the kept one at temperature 0, else that of being drawn with this noise.
void chances(const int32_t *tokens, const float *logs, float temperature, const uint64_t *key, double *to) {
  double score[NUM_SUCCESSORS], most = -INFINITY, total = 0;
  for (int i = 0; i < NUM_SUCCESSORS; i++) {
    score[i] = tokens[i] < 0 ? -INFINITY : logs[i] / (key ? (double)temperature : 1.0) + (key ? gumbel(*key, tokens[i]) : 0.0);
    most = std::max(most, score[i]);
  }
  if (!key) most = 0;
  for (int i = 0; i < NUM_SUCCESSORS; i++) total += to[i] = exp(score[i] - most);
  for (int i = 0; i < NUM_SUCCESSORS && key; i++) to[i] /= total;
}

struct Candidate {
  double value;  // probability that it and all before it are accepted
  int order, parent, token, bin;
  bool operator<(const Candidate &o) const { return value < o.value || (value == o.value && order > o.order); }
};

// Nodes in the order of `value`, the probability that each is accepted.
int branch(const Successors *tables, int count, const Growth &g, int32_t *tokens, int32_t *parents, int8_t *bins, double *value) {
  std::vector<Candidate> open;
  std::vector<int> depth = {0};
  int order = 0;
  for (int node = 0;; node++) {  // node 0 is the root, node i is at i - 1
    int token = node ? tokens[node - 1] : g.root;
    int before = node == 0 ? g.before : parents[node - 1] ? tokens[parents[node - 1] - 1] : g.root;
    const Successors *table;
    int64_t at = depth[node] < g.levels ? find(tables, count, before, token, &table) : -1;
    if (g.chain) open.clear();
    if (at >= 0) {
      double chance[NUM_SUCCESSORS];
      bool noisy = g.keys && g.temperature > 0;
      chances(table->tokens + at * NUM_SUCCESSORS, table->logs + at * NUM_SUCCESSORS, g.temperature, noisy ? g.keys + depth[node] : nullptr, chance);
      for (int i = 0; i < NUM_SUCCESSORS; i++) {
        int next = table->tokens[at * NUM_SUCCESSORS + i], bin = std::min((int)(chance[i] * CONFIDENCE_BINS), CONFIDENCE_BINS - 1);
        if (next < 0 || !(chance[i] > 0)) continue;
        double worth = g.acceptance ? chance[i] * g.acceptance[bin] / ((bin + 0.5) / CONFIDENCE_BINS) : chance[i];
        open.push_back({(node ? value[node - 1] : 1.0) * std::min(worth, 1.0), order++, node, next, bin});
        std::push_heap(open.begin(), open.end());
      }
    }
    if (node == g.most || open.empty()) return node;
    std::pop_heap(open.begin(), open.end());
    Candidate c = open.back();
    open.pop_back();
    tokens[node] = c.token, parents[node] = c.parent, bins[node] = (int8_t)c.bin, value[node] = c.value;
    depth.push_back(depth[c.parent] + 1);
  }
}

}  // namespace
