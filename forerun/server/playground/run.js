// What is known of one run, kept up to date chunk by chunk: its rounds, its tokens, its sums. No view in here.

/** Nodes of a round's draft that were accepted, in order: token j of the round was node `path[j]`, the rest its own. */
export const acceptedPath = (round) => round.draft.flatMap((node, i) => (node.accepted ? [i] : []));

/** Levels of each drafted node below the root (1 for its children). */
export function levels(draft) {
  const level = [0];
  draft.forEach((node, i) => level.push(level[node.parent] + 1));
  return level.slice(1);
}

/** The first index at which two lists differ; -1 where one begins with the other and both are as long. */
export function firstDifference(a, b) {
  const length = Math.min(a.length, b.length);
  for (let i = 0; i < length; i++) if (a[i] !== b[i]) return i;
  return a.length === b.length ? -1 : length;
}

export class Run {
  steps = []; // {at, round, text} of every chunk that said something; `at` is milliseconds since the request was sent
  ended = false; // nothing more will come
  text = "";
  finish = null; // why the server ended it
  rounds = [];
  tokens = []; // {id, text, source} of every token emitted
  histogram = []; // rounds by how many drafted tokens they kept
  metrics = null;
  why = ""; // how often it drafted, and why not more often
  // The sums leave out the first round: its pass reads the prompt, and says nothing of how fast text comes.
  draftMs = 0;
  verifyMs = 0;
  #decoded = 0;
  #accepted = 0;
  #rejections = 0;

  /** `costs` are those known when it began: what is said of its rounds later must not use newer ones. */
  constructor(costs = null) {
    this.costs = costs;
  }

  /** Takes in one chunk of either endpoint, which arrived `at`. Returns its round, or null where it carries none. */
  add(chunk, at = 0) {
    this.metrics = chunk.metrics?.speculative_decoding ?? this.metrics;
    this.why = chunk.metrics?.forerun?.why ?? this.why;
    const choice = chunk.choices[0];
    const text = choice?.text ?? choice?.delta?.content ?? "";
    const round = chunk.x_spec ?? null;
    this.text += text;
    this.finish = choice?.finish_reason ?? this.finish;
    if (round || text) this.steps.push({ at, round, text });
    if (!round) return null;
    this.rounds.push(round);
    this.tokens.push(...round.tokens);
    if (this.rounds.length > 1) {
      this.draftMs += round.t_draft_ms;
      this.verifyMs += round.t_verify_ms;
      this.#decoded += round.tokens.length;
    }
    this.#count(round);
    return round;
  }

  /** A draft accepted to its end tells nothing of what would have come next, so it counts no rejection. */
  #count(round) {
    const kept = acceptedPath(round).length;
    while (this.histogram.length <= kept) this.histogram.push(0);
    this.histogram[kept] += 1;
    this.#accepted += kept;
    if (kept < Math.max(0, ...levels(round.draft))) this.#rejections += 1;
  }

  /** Tokens per pass of the target. */
  get acceptedLength() {
    return this.tokens.length / this.rounds.length;
  }

  /** Tokens drafted a round, in levels: the depth that the rounds really had, on average. */
  get depth() {
    const depths = this.rounds.slice(1).map((round) => Math.max(0, ...levels(round.draft)));
    return depths.reduce((sum, depth) => sum + depth, 0) / depths.length;
  }

  /** The chance that the next drafted token is accepted, as seen in this run; NaN without a draft. */
  get acceptance() {
    return this.#accepted / (this.#accepted + this.#rejections);
  }

  /** Share of the time that went into drafting. */
  get draftShare() {
    return this.draftMs / (this.draftMs + this.verifyMs);
  }

  /** Milliseconds of a round, on average. */
  get roundMs() {
    return (this.draftMs + this.verifyMs) / (this.rounds.length - 1);
  }

  /** Tokens a second by the engine's clock: this page's would mostly measure how fast it draws. */
  get speed() {
    return (1000 * this.#decoded) / (this.draftMs + this.verifyMs);
  }
}
