// Sampling: the likeliest token of a row of logits, or one of softmax(logits / temperature) behind top-k, top-p and min-p, by
// Gumbel-max.
#pragma once
#include <algorithm>
#include <vector>

#include "noise.h"
#include "vector.h"

namespace {

// The token whose score is at index i: i itself, or that of a list.
inline int64_t token_at(const int64_t *ids, int i) { return ids ? ids[i] : i; }

// The first 31 bits of the uniforms of the tokens at 16 indices of `count`: those the last step of the finaliser leaves as
// they are.
inline vi beginnings(uint64_t key, int first, int count, const int64_t *ids) {
  typedef uint64_t words __attribute__((vector_size(REGISTER)));
  constexpr int N = sizeof(words) / 8;
  words step;
  for (int j = 0; j < N; j++) step[j] = (uint64_t)(j + 1) * GOLDEN;
  alignas(64) uint64_t bits[W], listed[W] = {};
  if (ids) memcpy(listed, ids + first, sizeof(uint64_t) * (count - first < W ? count - first : W));
  for (int i = 0; i < W; i += N) {
    words x = step + (key + (uint64_t)(first + i) * GOLDEN), y;
    if (ids) {
      memcpy(&y, listed + i, sizeof y);
      x = (y + 1) * GOLDEN + key;
    }
    x = (x ^ (x >> 30)) * FIRST;
    x = (x ^ (x >> 27)) * SECOND;
    x = x >> 33;
    memcpy(bits + i, &x, sizeof x);
  }
  vi found;
  for (int i = 0; i < W; i++) found[i] = (int32_t)bits[i];
  return found;
}

inline vf scores_at(const float *x, int i, int vocab) {  // 16 of them, -inf behind the last
  if (i + W <= vocab) return load(x + i);
  vf v = set1(-INFINITY);
  memcpy(&v, x + i, sizeof(float) * (vocab - i));
  return v;
}

// The lowest token of the largest score, and that score; -1 where one is NaN or the largest is infinite.
int likeliest(const float *x, int vocab, float *most) {
  vf high = set1(-INFINITY);
  vi bad{};
  for (int i = 0; i < vocab; i += W) {
    vf v = scores_at(x, i, vocab);
    high = largest(high, v);
    bad = bad | ~(v <= v);
  }
  *most = top(high);
  if (any(bad) || !(fabsf(*most) < INFINITY)) return -1;
  for (int i = 0;; i += W)
    if (any(set1(*most) <= scores_at(x, i, vocab)))
      for (int j = i;; j++)
        if (x[j] == *most) return j;
}

// exp(x) for x up to 0, within 4 % and right on average: the bits of a float are nearly its logarithm (Schraudolph 1999).
inline vf roughly_exp(vf x) {
  vf bounded = pick(x < -87.0f, set1(-87.0f), x);
  return as_float(nearest((bounded * 1.44269504f + (127.0f - 0.0579f)) * (float)(1 << 23)));
}

// The argmax of (x - shift) / temperature plus Gumbel noise, ties to the lowest index; `winner` has the largest x. With u a
// token's uniform and `behind` how far its score lies behind the best sum so far, it can win only if -log u <= exp(behind),
// and 1 - u <= -log u: the first bits of u rule out most tokens without a logarithm, and without an exact exponential.
int draw_scores(
    const float *x, int vocab, float shift, float temperature, uint64_t key, int winner, const int64_t *ids = nullptr
) {
  float score = (x[winner] - shift) / temperature;  // of the best so far; its noise apart, since large scores round it away
  double noise = gumbel(key, token_at(ids, winner));
  for (int i = 0; i < vocab; i += W) {
    vf s = (scores_at(x, i, vocab) - shift) / temperature, behind = (s - score) - (float)noise;
    if (!any(set1(-40.0f) <= behind)) continue;  // its exp is less than the smallest 1 - u there is
    vf left = to_float(~beginnings(key, i, vocab, ids) & 0x7fffffff) * 0x1p-31f;
    vi open = left <= roughly_exp(pick(behind < 0.0f, behind, set1(0.0f))) * 1.06f;
    if (!any(open)) continue;
    for (int j = 0; j < W; j++) {
      if (!open[j] || i + j == winner || s[j] == -INFINITY) continue;
      double own = gumbel(key, token_at(ids, i + j)), sum = s[j] + own, best = score + noise;
      if (sum > best || (sum == best && i + j < winner)) score = s[j], noise = own, winner = i + j;
    }
  }
  return winner;
}

// A token of softmax(scores), for scores of which one is finite.
int64_t draw(const float *scores, int vocab, uint64_t key) {
  float most;
  int winner = likeliest(scores, vocab, &most);
  return winner < 0 ? 0 : draw_scores(scores, vocab, 0.0f, 1.0f, key, winner);
}

// A token that the filters keep: its score, (logit - largest) / temperature, which is at most 0, and its index in the row.
struct Candidate {
  float score;
  int32_t index;
  bool operator<(const Candidate &other) const {  // the likeliest first, ties by index
    return score > other.score || (score == other.score && index < other.index);
  }
};
using Candidates = std::vector<Candidate>;

// Call `take(score, index)` for each score that is at least `bar` and not -inf, in the order of indices; `take` returns the
// bar for later ones.
template <class Take>
void scan_scores(const float *x, int vocab, float shift, float temperature, float bar, const Take &take) {
  for (int i = 0; i < vocab; i += W) {
    vf s = (scores_at(x, i, vocab) - shift) / temperature;
    if (!any(set1(bar) <= s)) continue;
    for (int j = 0; j < W && i + j < vocab; j++)
      if (s[j] >= bar && s[j] > -INFINITY) bar = take(s[j], i + j);
  }
}

// Only the scores that are at least the k-th largest: ties at the border stay.
void cut_to(Candidates &kept, int k) {
  std::nth_element(kept.begin(), kept.begin() + (k - 1), kept.end());
  const float least = kept[k - 1].score;
  kept.erase(std::remove_if(kept.begin() + k, kept.end(), [=](const Candidate &c) { return c.score < least; }), kept.end());
}

void keep_top_k(const float *x, int vocab, float shift, float temperature, int k, Candidates &kept) {
  size_t room = std::max(2 * k, 256);
  float bar = -INFINITY;
  scan_scores(x, vocab, shift, temperature, -INFINITY, [&](float score, int index) {
    kept.push_back({score, index});
    if (kept.size() < room) return bar;
    cut_to(kept, k);
    room = std::max(room, 2 * kept.size());
    return bar = kept[k - 1].score;
  });
  if (kept.size() > (size_t)k) cut_to(kept, k);
}

// The first scores of a sorted list whose probability reaches `top_p` of `total`, a sum of exponentials.
void cut_to_nucleus(Candidates &kept, double top_p, double total) {
  double sum = 0;
  for (size_t i = 0; i < kept.size(); i++) {
    if (i && sum >= top_p * total) return kept.resize(i);
    sum += exp((double)kept[i].score);
  }
}

// Tokens in the order of their probability until they reach `top_p`, without sorting the vocabulary: those above a bar that
// falls until they are enough.
void keep_top_p(const float *x, int vocab, float shift, float temperature, double top_p, Candidates &kept) {
  double total = 0, found = -1;
  scan_scores(x, vocab, shift, temperature, -40.0f, [&](float score, int) {  // less adds nothing to a sum of 1 or more
    total += exp((double)score);
    return -40.0f;
  });
  for (float bar = -8.0f; found < top_p * total; bar = bar < -32.0f ? -INFINITY : bar - 8.0f) {
    kept.clear(), found = 0;
    scan_scores(x, vocab, shift, temperature, bar, [&](float score, int index) {
      kept.push_back({score, index}), found += exp((double)score);
      return bar;
    });
    if (bar == -INFINITY) break;
  }
  std::sort(kept.begin(), kept.end());
  cut_to_nucleus(kept, top_p, total);
}

// As draw_scores, of the tokens that the filters leave: top-k, of these the nucleus, and of that what min-p leaves.
int draw_filtered(const float *x, int vocab, float most, const Sampling &by, uint64_t key, const int64_t *ids) {
  static thread_local Candidates kept;
  kept.clear();
  if (by.top_k > 0 && by.top_k < vocab) {
    keep_top_k(x, vocab, most, by.temperature, by.top_k, kept);
    if (by.top_p < 1) {
      std::sort(kept.begin(), kept.end());
      double total = 0;
      for (const Candidate &c : kept) total += exp((double)c.score);
      cut_to_nucleus(kept, by.top_p, total);
    }
  } else if (by.top_p < 1) {
    keep_top_p(x, vocab, most, by.temperature, by.top_p, kept);
  } else {
    scan_scores(x, vocab, most, by.temperature, by.least, [&](float score, int index) {
      kept.push_back({score, index});
      return by.least;
    });
  }
  int winner = -1;
  double best = -INFINITY;
  for (const Candidate &c : kept) {
    if (c.score < by.least) continue;
    double sum = c.score + gumbel(key, token_at(ids, c.index));
    if (sum > best || (sum == best && c.index < winner)) best = sum, winner = c.index;
  }
  return winner;
}

// The likeliest token at temperature 0, else one drawn by `by`; -1 where logits are not finite. Logits are of the tokens
// `ids`, which ascend, or of all in order where that is null.
int64_t sample(const float *logits, int vocab, const Sampling &by, uint64_t key, const int64_t *ids) {
  float most;
  int winner = likeliest(logits, vocab, &most);
  if (winner < 0) return winner;
  if (by.temperature > 0) {
    const bool filters = (by.top_k > 0 && by.top_k < vocab) || by.top_p < 1 || by.least > -INFINITY;
    winner = filters ? draw_filtered(logits, vocab, most, by, key, ids)
                     : draw_scores(logits, vocab, most, by.temperature, key, winner, ids);
  }
  return token_at(ids, winner);
}

// The likeliest `NUM_SUCCESSORS` tokens of softmax(logits), the lowest first among equals, and the natural logarithms of their
// probabilities, within 0.04; -1 and -inf where there are fewer. False where logits are not finite.
bool rank(const float *x, int vocab, int32_t *tokens, float *logs) {
  for (int i = 0; i < NUM_SUCCESSORS; i++) tokens[i] = -1, logs[i] = -INFINITY;
  float most;
  if (likeliest(x, vocab, &most) < 0) return false;
  vf total = set1(0.0f);
  for (int i = 0; i < vocab; i += W) {
    vf v = scores_at(x, i, vocab);
    total = total + roughly_exp(v - most);
    vi better = ~(v <= set1(logs[NUM_SUCCESSORS - 1]));
    if (!any(better)) continue;
    for (int j = 0; j < W; j++) {
      float own = v[j];
      if (!(own > logs[NUM_SUCCESSORS - 1])) continue;
      int at = NUM_SUCCESSORS - 1;
      for (; at > 0 && own > logs[at - 1]; at--) logs[at] = logs[at - 1], tokens[at] = tokens[at - 1];
      logs[at] = own, tokens[at] = i + j;
    }
  }
  float all = logf(sum(total));
  for (int i = 0; i < NUM_SUCCESSORS; i++) logs[i] -= most + all;
  return true;
}

}  // namespace
