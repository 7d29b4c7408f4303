// Step through the rounds of a run: what was drafted, what the target said to it, what came out, and why so deep.

import { expectedTokens, measured } from "./calculator.js";
import { byId, el, num, percent, plural } from "./dom.js";
import { acceptedPath, levels } from "./run.js";
import { chip } from "./tokens.js";

/** What became of drafted node i: its words start with accepted, rejected, or "not reached" below a rejected one. */
export function fate(round, i) {
  const node = round.draft[i];
  const parent = round.draft[node.parent - 1];
  if (node.accepted) {
    const emitted = acceptedPath(round).indexOf(i) < round.tokens.length;
    return emitted ? "accepted" : "accepted, but the request ended before it";
  }
  return !parent || parent.accepted ? "rejected" : "not reached";
}

/** One sentence or two: why this depth. `asked` is what the request said: {draft, depth}, or false. */
export function why(round, first, asked, costs) {
  const { depth, rate, draft } = round;
  if (!asked) return "Plain decoding: one token a pass, nothing drafted.";
  if (first && !draft.length) return "The first pass reads the prompt; there is nothing to draft for yet.";
  const reached = Math.max(0, ...levels(draft));
  const found = (reached < depth ? ` The drafter proposed ${reached}.` : "") + whence(draft, asked.draft);
  const drafted = reached === depth ? draft.length : depth; // more than the depth where it is a tree
  return because(depth, drafted, rate, asked.depth, measured(costs, asked.draft, draft[0]?.source)) + found;
}

/** Who said what, where several took part: levels of a cascade, one tree of several, what was drafted ahead. */
export function whence(draft, asked = "") {
  if (!draft.length) return "";
  const sources = draft.map((node) => node.source.split("&"));
  const ahead = sources.filter((source) => source.includes("ahead")).length;
  const names = sources.map((source) => source.filter((name) => name !== "ahead"));
  const together = names.filter((source) => source.length > 1).length;
  const said = [];
  if (ahead) said.push(` ${ahead} of ${draft.length} were drafted while the target checked the round before, which was foreseen.`);
  else if (asked.includes("ahead(")) said.push(" What the round before came to was not foreseen, so this was drafted after it.");
  if (together) said.push(` ${together} of ${draft.length} were proposed by several drafters.`);
  return said.join("");
}

function because(depth, drafted, rate, asked, costs) {
  const known = Number.isFinite(rate);
  const hope = known ? `At ${percent(rate)} expected acceptance` : "Not knowing what will be accepted";
  const fixed = asked === "auto" ? "" : `Depth ${asked} was asked for. `;
  if (fixed && depth === 0) return `${fixed}There was no room for a draft, or nothing to draft.`;
  const one = costs.pass(1);
  const tried = Math.max(depth, 1);
  const draft = costs.draft(tried);
  const measuredAll = one !== null && draft !== null;
  if (!known || !measuredAll) return `${fixed}${hope}, and without measured costs yet: depth ${depth}.`;
  const tokens = expectedTokens(rate, tried);
  const ms = costs.pass(1 + Math.max(drafted, 1)) + draft;
  const times = (tokens / ms) * one;
  const instead = `where no draft gives 1 for ${num(one)} ms: ${num(times)} times the speed`;
  const gives = `${num(tokens)} tokens for ${num(ms)} ms, ${instead}`;
  if (fixed) return `${fixed}${hope} it gives ${gives}.`;
  if (depth === 0 && times < 1) return `${hope}, even one drafted token would give ${gives}; so none.`;
  if (depth === 0) return `${hope}, one drafted token would give ${gives}; it rests between probes or found nothing.`;
  if (times < 1) return `${hope}, depth ${depth} gives ${gives}; a probe, or chosen before that was known.`;
  return `${hope}, depth ${depth} gives ${gives}.`;
}

export class RoundsView {
  #rounds = [];
  #at = -1;
  #asked = false;
  #costs = null;
  #settled = false; // the reader chose a round, or the first that drafted was found

  /** `onShow(index, byHand)` is called when another round is shown. */
  constructor(onShow) {
    this.onShow = onShow;
    this.panel = byId("rounds");
    this.slider = byId("round-slider");
    this.buttons = ["first", "previous", "next", "last"].map((name) => byId(`round-${name}`));
    const moves = [() => 0, () => this.#at - 1, () => this.#at + 1, () => this.#rounds.length - 1];
    this.buttons.forEach((button, i) => button.addEventListener("click", () => this.show(moves[i](), true)));
    this.slider.addEventListener("input", () => this.show(this.slider.valueAsNumber - 1, true));
    const keys = { Home: moves[0], ArrowLeft: moves[1], ArrowRight: moves[2], End: moves[3] };
    this.panel.addEventListener("keydown", (event) => {
      const plain = !event.ctrlKey && !event.altKey && !event.metaKey; // Alt+Left goes back in history
      if (!keys[event.key] || !plain || event.target === this.slider) return; // a slider has these keys already
      event.preventDefault();
      this.show(keys[event.key](), true);
    });
  }

  /** Watches a run, which grows while it lasts. Its reasons are told by the costs known when it began, ever after. */
  watch({ rounds, costs }, asked) {
    [this.#rounds, this.#asked, this.#costs, this.#at, this.#settled] = [rounds, asked, costs, -1, false];
    byId("round-body").hidden = true;
    this.refresh();
  }

  /** Rounds have come: shows the first that drafted, then stays where the reader is. */
  refresh() {
    this.slider.max = Math.max(this.#rounds.length, 1);
    this.#label();
    if (this.#settled) return;
    const drafted = this.#rounds.findIndex((round) => round.draft.length);
    this.#settled = drafted >= 0;
    if (drafted >= 0 || this.#at < 0) this.show(Math.max(drafted, 0), false);
  }

  show(index, byHand) {
    if (!this.#rounds.length) return;
    this.#at = Math.min(Math.max(index, 0), this.#rounds.length - 1);
    this.#settled ||= byHand;
    const round = this.#rounds[this.#at];
    byId("round-body").hidden = false;
    byId("round-why").textContent = why(round, this.#at === 0, this.#asked, this.#costs);
    byId("round-depth").textContent = round.depth;
    byId("round-draft-ms").textContent = `${num(round.t_draft_ms, 3)} ms`;
    byId("round-verify-ms").textContent = `${num(round.t_verify_ms, 3)} ms`;
    byId("round-nodes").replaceChildren(...rows(round));
    byId("round-emitted").replaceChildren(...round.tokens.map((token) => chip(token.text, token.source)));
    byId("round-count").textContent = `${plural(round.tokens.length, "token")} for one pass of the target`;
    this.#label();
    this.onShow(this.#at, byHand);
  }

  #label() {
    const count = this.#rounds.length;
    byId("round-label").textContent = count ? `Round ${this.#at + 1} of ${count}` : "No rounds yet";
    this.slider.value = this.#at + 1;
    this.slider.disabled = count < 2;
    // not `disabled`: that would throw the focus of the reader who pressed the button away
    const ends = [this.#at <= 0, this.#at <= 0, this.#at >= count - 1, this.#at >= count - 1];
    this.buttons.forEach((button, i) => button.setAttribute("aria-disabled", ends[i] || !count));
  }
}

const SIGNS = { accepted: "✓", rejected: "✕", "not reached": "·" };

/** The drafted nodes in tree order, then the token the target drew itself. */
function rows(round) {
  const level = levels(round.draft);
  const branches = round.draft.some((node, i) => round.draft.findIndex((other) => other.parent === node.parent) < i);
  const order = [];
  const walk = (parent) =>
    round.draft.forEach((node, i) => {
      if (node.parent === parent) order.push(i), walk(i + 1);
    });
  walk(0);
  const drafted = order.map((i) => {
    const verdict = fate(round, i);
    const token = el("td", {}, chip(round.draft[i].text, round.draft[i].source));
    token.firstChild.style.setProperty("--level", branches ? level[i] - 1 : 0); // a chain needs no stairs
    return row(token, round.draft[i], round.draft[i].source, verdict);
  });
  return [...drafted, ownRow(round)];
}

function ownRow(round) {
  const rejected = round.draft.some((_, i) => fate(round, i) === "rejected");
  const emitted = round.tokens.length > acceptedPath(round).length;
  const drawn = rejected ? "drawn instead" : round.draft.length ? "bonus" : "drawn";
  const verdict = emitted ? drawn : "not emitted: the request ended";
  const line = row(el("td", {}, chip(round.bonus.text, "")), round.bonus, "target", verdict);
  line.classList.add("own");
  return line;
}

function row(token, { p, q, noise }, source, verdict) {
  const kind = verdict.split(",")[0];
  const sign = el("span", { class: "sign", "aria-hidden": "true" }, SIGNS[kind] ?? "+");
  const chance = el("td", { class: "number chance" }, num(p));
  chance.style.setProperty("--p", p);
  return el(
    "tr",
    { class: kind.replace(" ", "-") },
    token,
    el("td", { class: "source" }, source),
    chance,
    el("td", { class: "number" }, num(q)),
    el("td", { class: "number" }, num(noise)),
    el("td", { class: "verdict" }, sign, ` ${verdict}`),
  );
}
