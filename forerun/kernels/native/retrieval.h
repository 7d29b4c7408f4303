// Texts behind a suffix array: sorting, and finding what followed the longest suffix of another text (REST, 2311.08252).
#pragma once
#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

// Token ids one after the other, `BREAK` between texts; `suffixes` are the places where a token stands, in the order of
// what follows there, as far as `SORTED` tokens; those that begin with token t are starts[t] .. starts[t + 1].
struct Texts {
  const uint32_t *tokens, *suffixes;
  const int64_t *starts;  // [vocab + 1]
  int64_t count, vocab;   // count: of tokens, breaks included
};

namespace {

constexpr uint32_t BREAK = 0xffffffffu;
constexpr int SORTED = 16;   // tokens of a suffix that its order depends on, and so the longest match
constexpr int VOTERS = 64;   // occurrences, at most, that vote on what follows

struct Suffix {
  uint64_t next;  // its second and third token
  uint32_t at;
};

inline uint32_t token_at(const uint32_t *tokens, int64_t count, int64_t at) { return at < count ? tokens[at] : BREAK; }

// Whether the suffix at `a` comes before that at `b`, from the fourth token on; equal ones in their order.
bool comes_before(const uint32_t *tokens, int64_t count, const Suffix &a, const Suffix &b) {
  if (a.next != b.next) return a.next < b.next;
  for (int i = 3; i < SORTED && (uint32_t)a.next != BREAK; i++) {
    uint32_t x = token_at(tokens, count, (int64_t)a.at + i), y = token_at(tokens, count, (int64_t)b.at + i);
    if (x != y) return x < y;
    if (x == BREAK) break;
  }
  return a.at < b.at;
}

// Sort the suffixes of `count` tokens below 2^32; those of breaks are left out. Bucket by bucket of the first token.
void sort_suffixes(const uint32_t *tokens, int64_t count, int64_t vocab, int threads, uint32_t *suffixes, int64_t *starts) {
  std::fill(starts, starts + vocab + 1, 0);
  for (int64_t i = 0; i < count; i++)
    if (tokens[i] != BREAK) starts[tokens[i] + 1]++;
  for (int64_t t = 0; t < vocab; t++) starts[t + 1] += starts[t];
  std::vector<int64_t> next(starts, starts + vocab);
  for (int64_t i = 0; i < count; i++)
    if (tokens[i] != BREAK) suffixes[next[tokens[i]]++] = (uint32_t)i;
  auto sort_some = [&](int64_t first, int64_t last) {
    std::vector<Suffix> some;
    for (int64_t t = first; t < last; t++) {
      some.clear();
      for (int64_t i = starts[t]; i < starts[t + 1]; i++) {
        uint32_t at = suffixes[i], second = token_at(tokens, count, (int64_t)at + 1);
        uint32_t third = second == BREAK ? BREAK : token_at(tokens, count, (int64_t)at + 2);
        some.push_back({(uint64_t)second << 32 | third, at});
      }
      std::sort(some.begin(), some.end(), [&](const Suffix &a, const Suffix &b) { return comes_before(tokens, count, a, b); });
      for (size_t i = 0; i < some.size(); i++) suffixes[starts[t] + (int64_t)i] = some[i].at;
    }
  };
  std::vector<std::thread> workers;
  int64_t all = starts[vocab], first = 0;
  for (int w = 0; w < threads; w++) {  // each about as many suffixes
    int64_t last = w + 1 == threads ? vocab : std::lower_bound(starts, starts + vocab, all * (w + 1) / threads) - starts;
    workers.emplace_back(sort_some, first, std::max(first, last));
    first = std::max(first, last);
  }
  for (auto &worker : workers) worker.join();
}

// The token at a position of texts that may be damaged.
inline uint32_t known_at(const Texts &t, int64_t at) {
  return at < t.count && t.tokens[at] < (uint64_t)t.vocab ? t.tokens[at] : BREAK;
}

// -1, 0 or 1: how the text at a suffix compares with the first `length` tokens of a pattern.
int compare(const Texts &t, int64_t at, const uint32_t *pattern, int length) {
  for (int i = 0; i < length; i++) {
    uint32_t own = token_at(t.tokens, t.count, at + i);
    if (own != pattern[i]) return own < pattern[i] ? -1 : 1;
  }
  return 0;
}

// The suffixes that begin with a pattern.
void occurrences(const Texts &t, const uint32_t *pattern, int length, int64_t *first, int64_t *last) {
  *first = *last = 0;
  if (pattern[0] >= (uint64_t)t.vocab) return;
  int64_t low = t.starts[pattern[0]], high = t.starts[pattern[0] + 1], end = high;
  while (low < high) {
    int64_t middle = (low + high) / 2;
    if (compare(t, t.suffixes[middle], pattern, length) < 0) low = middle + 1;
    else high = middle;
  }
  *first = low;
  high = end;
  int64_t step = 1;  // most patterns have few occurrences
  while (low + step < end && compare(t, t.suffixes[low + step], pattern, length) == 0) low += step, step *= 2;
  high = std::min(end, low + step);
  while (low < high) {
    int64_t middle = (low + high) / 2;
    if (compare(t, t.suffixes[middle], pattern, length) == 0) low = middle + 1;
    else high = middle;
  }
  *last = low;
}

// The tokens with which most of the occurrences [first, last) continue behind `length` tokens, at most `most`; their number.
int continuation(const Texts &t, int64_t first, int64_t last, int length, int most, int32_t *to) {
  std::vector<int64_t> positions;
  int64_t voters = std::min<int64_t>(last - first, VOTERS);
  for (int64_t i = 0; i < voters; i++) positions.push_back((int64_t)t.suffixes[first + (last - first) * i / voters] + length);
  for (int n = 0; n < most; n++) {
    uint32_t best = BREAK;
    int votes = 0;
    for (size_t i = 0; i < positions.size(); i++) {
      uint32_t own = known_at(t, positions[i] + n);
      int same = 0;
      for (size_t j = i; j < positions.size(); j++) same += known_at(t, positions[j] + n) == own;
      if (own != BREAK && same > votes) best = own, votes = same;
    }
    if (best == BREAK) return n;
    to[n] = (int32_t)best;
    positions.erase(std::remove_if(positions.begin(), positions.end(),
                                [&](int64_t p) { return known_at(t, p + n) != best; }), positions.end());
  }
  return most;
}

// Whichever of the texts has the longest suffix of `text`, of `shortest` to SORTED tokens, the first among equals: what
// follows there. Returns the length of that match, 0 where there is none, and sets `found`.
int retrieve(const Texts *texts, int count, const uint32_t *text, int length, int shortest, int most, int32_t *to, int *found) {
  int best = 0;
  *found = 0;
  for (int i = 0; i < count; i++) {
    int64_t first = 0, last = 0, a, b;
    int reach = 0;
    for (int low = std::max(best + 1, shortest), high = std::min(length, SORTED), n = low; low <= high;) {
      occurrences(texts[i], text + length - n, n, &a, &b);
      if (a < b) reach = n, first = a, last = b, low = n + 1;
      else high = n - 1;
      n = reach ? (low + high + 1) / 2 : low;  // many texts have no match at all
    }
    if (!reach) continue;
    int n = continuation(texts[i], first, last, reach, most, to);
    if (n) best = reach, *found = n;
  }
  return best;
}

}  // namespace
