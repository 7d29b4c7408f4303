// The suffix automaton of a growing text (Blumer et al. 1985): the smallest automaton of all its substrings. A state is a set
// of substrings that end at the same positions. Twin: `draft.automaton.TwinAutomaton`.
#pragma once
#include <algorithm>
#include <vector>

#include "common.h"
#include "noise.h"

class Automaton {
 public:
  struct Cursor { int32_t state, length; };  // the longest suffix of another text that occurs here

  int32_t match_length = 0, match_end = -1;  // of the text's longest suffix that occurred before

  Automaton() : table(64, -1) { add_state(0, -1); }

  void append(int32_t token) {
    const int32_t created = add_state(states[last].length + 1, tokens);
    int32_t state = last;
    for (; state >= 0 && find(state, token) < 0; state = states[state].link) add_edge(state, token, created);
    states[created].link = state < 0 ? 0 : split(state, token);
    last = created;
    int32_t suffix = states[created].link;
    match_length = states[suffix].length, match_end = states[suffix].end;
    // Recent text predicts best: let the suffixes of the text end here.
    for (int i = 0; i < REFRESHED && suffix > 0; i++, suffix = states[suffix].link) states[suffix].end = tokens;
    tokens++;
  }

  void follow(Cursor &at, int32_t token) const {
    int32_t edge = find(at.state, token);
    for (; at.state > 0 && edge < 0; edge = find(at.state, token)) {
      at.state = states[at.state].link;
      at.length = std::min(at.length, states[at.state].length);
    }
    if (edge >= 0) at.state = edges[edge].to, at.length++;
  }

  int32_t end(int32_t state) const { return states[state].end; }  // the last token of an occurrence

 private:
  static constexpr int REFRESHED = 16;  // suffix links along which the latest occurrence is noted
  struct State { int32_t link, length, end, first; };  // of its longest substring; its first transition
  struct Edge { int32_t state, token, to, next; };     // the next transition of the same state
  std::vector<State> states;
  std::vector<Edge> edges;
  std::vector<int32_t> table;  // edges by state and token; a power of two, -1 where there is none
  int32_t last = 0, tokens = 0;

  int32_t add_state(int32_t length, int32_t end) {
    states.push_back({states.empty() ? -1 : 0, length, end, -1});
    return (int32_t)states.size() - 1;
  }
  size_t slot_of(int32_t state, int32_t token) const {  // the edge's slot in the table, or the free one where it would be
    size_t at = mix((uint64_t)(uint32_t)state << 32 | (uint32_t)token);
    while (true) {
      at &= table.size() - 1;
      const int32_t edge = table[at];
      if (edge < 0 || (edges[edge].state == state && edges[edge].token == token)) return at;
      at++;
    }
  }
  int32_t find(int32_t state, int32_t token) const { return table[slot_of(state, token)]; }
  void add_edge(int32_t state, int32_t token, int32_t to) {
    if (2 * (edges.size() + 1) > table.size()) {
      table.assign(4 * table.size(), -1);
      for (size_t i = 0; i < edges.size(); i++) table[slot_of(edges[i].state, edges[i].token)] = (int32_t)i;
    }
    table[slot_of(state, token)] = (int32_t)edges.size();
    edges.push_back({state, token, to, states[state].first});
    states[state].first = (int32_t)edges.size() - 1;
  }
  // The state of (longest substring of `state`) + token, split off if need be.
  int32_t split(int32_t state, int32_t token) {
    const int32_t old = edges[find(state, token)].to;
    if (states[old].length == states[state].length + 1) return old;
    const int32_t clone = add_state(states[state].length + 1, states[old].end);
    for (int32_t edge = states[old].first; edge >= 0; edge = edges[edge].next) add_edge(clone, edges[edge].token, edges[edge].to);
    states[clone].link = states[old].link;
    states[old].link = clone;
    for (; state >= 0; state = states[state].link) {
      const int32_t edge = find(state, token);
      if (edge < 0 || edges[edge].to != old) break;
      edges[edge].to = clone;
    }
    return clone;
  }
};
