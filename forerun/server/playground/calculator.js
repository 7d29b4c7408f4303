// Does speculation pay? The arithmetic, as pure functions, and the sliders that show it.
//
// a: chance that a drafted token is accepted, given that those before it were. k: depth. c: cost of drafting one token,
// v: cost of a pass over k + 1 tokens, both relative to a pass over one.

import { byId, num, svg } from "./dom.js";

export const DEEPEST = 16;

/** Tokens a pass emits on average: the accepted ones and the target's own. */
export function expectedTokens(a, k) {
  return a === 1 ? k + 1 : (1 - a ** (k + 1)) / (1 - a);
}

/** How many times as fast as plain decoding. */
export function speedup(a, k, c, v) {
  return expectedTokens(a, k) / (k * c + v);
}

/** The depth in 0..DEEPEST with the largest speed-up, where `costOf(k)` gives {c, v}; the smaller one of equals. */
export function bestDepth(a, costOf) {
  const speeds = speedCurve(a, costOf);
  return speeds.indexOf(Math.max(...speeds));
}

/** The speed-up at every depth from 0. */
export function speedCurve(a, costOf) {
  return Array.from({ length: DEEPEST + 1 }, (_, k) => {
    const { c, v } = costOf(k);
    return speedup(a, k, c, v);
  });
}

/**
 * The cost at size x of a table {size: cost}: linear between entries, beyond the last one `slope` of it per step, or `share`
 * of growth in proportion where that is less, and never more than so many times the smallest, nor than a larger one. This
 * is how the depth policy reads what it measured (costs.py).
 */
export function interpolate(table, x, slope, share = 1) {
  const sizes = Object.keys(table).map(Number).sort((p, q) => p - q);
  if (!sizes.length) return null;
  const larger = sizes.filter((size) => size > x).map((size) => table[size]);
  return Math.min(between(table, sizes, x, slope, share), table[sizes[0]] * Math.max(x / sizes[0], 1), ...larger);
}

function between(table, sizes, x, slope, share) {
  const at = sizes.findIndex((size) => size >= x);
  const last = sizes.at(-1);
  if (at === -1) return table[last] * (1 + Math.min(slope, share / last) * (x - last));
  if (at === 0 || sizes[at] === x) return table[sizes[at]];
  const [low, high] = [sizes[at - 1], sizes[at]];
  return table[low] + ((x - low) / (high - low)) * (table[high] - table[low]);
}

/**
 * What the server measured, in milliseconds: `pass(tokens)` and `draft(depth)`, null where it knows nothing yet. The
 * drafter may go by several names (as asked for, as its tokens are marked): the first that has costs counts.
 */
export function measured(costs, ...drafters) {
  const passes = costs?.pass_ms ?? {};
  const drafts = costs?.draft_ms ?? {};
  const names = drafters.filter(Boolean).flatMap((name) => [name, name.split(":")[0]]); // model:NAME may be "model"
  const table = drafts[names.find((name) => name in drafts)] ?? {};
  return {
    pass: (tokens) => interpolate(passes, tokens, 0.02, 0.25),
    draft: (depth) => (depth === 0 ? 0 : interpolate(table, depth, 0.5)),
  };
}

const ASSUMED = { a: 0.7, c: 0.05, growth: 0.02 };

export class Calculator {
  #k = 4;
  #a = ASSUMED.a;
  #c = null; // set by hand; null follows the measurement
  #growth = null; // of v per further row, set by hand
  #costs = measured();
  #fromRun = false;
  #byHand = false; // the depth: else it is that of the last run

  constructor() {
    this.sliders = Object.fromEntries(["a", "k", "c", "v"].map((id) => [id, byId(`calc-${id}`)]));
    this.sliders.a.addEventListener("input", (e) => this.#set({ a: e.target.valueAsNumber }));
    this.sliders.k.addEventListener("input", (e) => {
      this.#byHand = true;
      this.#set({ k: e.target.valueAsNumber });
    });
    this.sliders.c.addEventListener("input", (e) => this.#set({ c: e.target.valueAsNumber }));
    this.sliders.v.addEventListener("input", (e) => this.#set({ growth: (e.target.valueAsNumber - 1) / this.#k }));
    byId("calc-reset").addEventListener("click", () => this.#set({ c: null, growth: null }));
    this.#draw();
  }

  /** New costs from the server, and acceptance and depth of a run where there was one (NaN or undefined: keep). */
  prefill(costs, drafters, run) {
    this.#costs = measured(costs, ...drafters);
    if (run?.acceptance >= 0) [this.#a, this.#fromRun] = [run.acceptance, true];
    if (run?.depth >= 0 && !this.#byHand) this.#k = Math.min(Math.round(run.depth), DEEPEST);
    this.#draw();
  }

  #set({ a, k, c, growth }) {
    if (a !== undefined) [this.#a, this.#fromRun] = [a, false];
    if (k !== undefined) this.#k = k;
    if (c !== undefined) this.#c = c;
    if (growth !== undefined) this.#growth = growth;
    this.#draw();
  }

  /** Costs at depth k relative to a pass over one token: by hand first, then measured, then assumed. */
  #costOf(k) {
    const one = this.#costs.pass(1);
    const draft = this.#costs.draft(Math.max(k, 1));
    const pass = this.#costs.pass(k + 1);
    const c = this.#c ?? (one && draft !== null ? draft / Math.max(k, 1) / one : ASSUMED.c);
    const v = this.#growth === null && one ? pass / one : 1 + k * (this.#growth ?? ASSUMED.growth);
    return { c, v: k === 0 ? 1 : v };
  }

  #draw() {
    const [a, k] = [this.#a, this.#k];
    const { c, v } = this.#costOf(k);
    const curve = speedCurve(a, (depth) => this.#costOf(depth));
    const best = bestDepth(a, (depth) => this.#costOf(depth));
    this.#drawSliders({ a, k, c, v });
    byId("calc-expected").textContent = num(expectedTokens(a, k), 3);
    byId("calc-speedup").textContent = `${num(speedup(a, k, c, v), 3)} ×`;
    byId("calc-best").textContent = best === 0 ? "0: do not draft" : `${best} (${num(curve[best], 2)} ×)`;
    byId("calc-chart").replaceChildren(...chart(curve, k, best));
  }

  #drawSliders(values) {
    this.sliders.c.max = Math.max(1, Math.ceil(values.c));
    this.sliders.v.max = Math.max(4, Math.ceil(values.v));
    this.sliders.v.disabled = values.k === 0; // one row against one row
    for (const [id, slider] of Object.entries(this.sliders)) {
      slider.value = values[id];
      byId(`calc-${id}-value`).textContent = id === "k" ? values.k : num(values[id], 3);
    }
    const known = this.#costs.pass(1) !== null;
    const knownDraft = known && this.#costs.draft(1) !== null;
    byId("calc-a-from").textContent = this.#fromRun ? "from the last run" : "";
    byId("calc-c-from").textContent = origin(this.#c, knownDraft);
    byId("calc-v-from").textContent = values.k === 0 ? "one row" : origin(this.#growth, known);
    byId("calc-reset").disabled = this.#c === null && this.#growth === null;
  }
}

const origin = (byHand, known) => (byHand !== null ? "set by hand" : known ? "measured" : "assumed");

/** The speed-up over depth: a line, plain decoding as a dashed one, a dot where we are and a ring where it is best. */
function chart(curve, k, best) {
  const [left, right, top, bottom] = [34, 354, 12, 150];
  const high = Math.max(1.25, ...curve) * 1.06;
  const x = (depth) => left + ((right - left) * depth) / DEEPEST;
  const y = (value) => bottom - ((bottom - top) * value) / high;
  const line = curve.map((value, depth) => `${x(depth).toFixed(1)} ${y(value).toFixed(1)}`).join("L");
  const label = (text, at) => svg("text", { class: "chart-label", ...at }, text);
  const under = (depth) => label(`${depth}`, { x: x(depth), y: bottom + 16, "text-anchor": "middle" });
  const beside = (value, digits) =>
    label(`${num(value, digits)} ×`, { x: left - 6, y: y(value) + 4, "text-anchor": "end" });
  return [
    svg("title", {}, `Speed-up by depth: ${num(curve[k])} times at depth ${k}, at most ${num(curve[best])} at ${best}`),
    svg("line", { class: "chart-axis", x1: left, x2: right, y1: bottom, y2: bottom }),
    svg("line", { class: "chart-plain", x1: left, x2: right, y1: y(1), y2: y(1) }),
    beside(1, 0),
    ...(curve[best] > 1.5 ? [beside(curve[best], 1)] : []), // closer, the two would overlap
    ...[0, 4, 8, 12, 16].map(under),
    svg("path", { class: "chart-line", d: `M${line}` }),
    svg("circle", { class: "chart-best", cx: x(best), cy: y(curve[best]), r: 7 }),
    svg("circle", { class: "chart-here", cx: x(k), cy: y(curve[k]), r: 4 }),
  ];
}
