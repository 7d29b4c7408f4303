// The figures of the run that is going on, and the comparison with plain decoding.

import { byId, el, num, percent, plural, speed, visible } from "./dom.js";
import { firstDifference } from "./run.js";

/** Accepted length, speed, where the time went, accepted tokens per round. */
export function drawLive(run) {
  byId("live-length").textContent = num(run.acceptedLength);
  byId("live-speed").textContent = speed(run.speed);
  byId("live-draft").textContent = percent(run.draftShare);
  byId("live-verify").textContent = percent(1 - run.draftShare);
  byId("live-share").style.setProperty("--share", run.draftShare || 0);
  drawHistogram(run.histogram);
}

function drawHistogram(counts) {
  const list = byId("histogram");
  const most = Math.max(1, ...counts);
  while (list.children.length > counts.length) list.lastChild.remove();
  while (list.children.length < counts.length) {
    const bar = el("span", { class: "bar", "aria-hidden": "true" });
    const label = el("span", { class: "bin", "aria-hidden": "true" }, `${list.children.length}`);
    list.append(el("li", {}, bar, label, el("span", { class: "quiet-text" })));
  }
  counts.forEach((count, kept) => {
    const item = list.children[kept];
    item.title = `${plural(count, "round")} with ${kept} accepted`;
    item.lastChild.textContent = item.title;
    item.firstChild.style.setProperty("--height", count / most);
  });
}

/** The badge: are the tokens the same, and if not, is that a promise broken? Returns {kind, text, at}. */
export function exactness(spec, plain, rule, temperature, ended) {
  const [a, b] = [spec.tokens.map((t) => t.id), plain.tokens.map((t) => t.id)];
  let at = firstDifference(a, b);
  if (!ended && at === b.length) at = -1; // plain decoding was stopped on its way
  if (at === -1) {
    const count = Math.min(a.length, b.length);
    return { kind: "same", at, text: `Identical: ${ended ? "all" : "the first"} ${plural(count, "token id")} equal` };
  }
  const name = (token) => (token ? `“${visible(token.text)}”` : "the end");
  const where = `from token ${at} on: ${name(spec.tokens[at])}, plain ${name(plain.tokens[at])}`;
  if (rule === "typical") return { kind: "other", at, text: `Different ${where}. The rule “typical” is lossy.` };
  if (rule !== "match" && temperature > 0) {
    const promise = `The rule “${rule}” promises the same distribution, not the same tokens.`;
    return { kind: "other", at, text: `Different ${where}. ${promise}` };
  }
  return { kind: "different", at, text: `Different ${where}` };
}

/** What a lane says of itself: how much came in which time and, when it is over, how fast. */
export function pace(run, count, milliseconds) {
  const tokens = run.steps.slice(0, count).reduce((sum, { round }) => sum + (round?.tokens.length ?? 0), 0);
  const over = run.ended && count === run.steps.length;
  const fast = over && run.speed > 0 ? ` · ${speed(run.speed)} tokens/s` : "";
  return `${plural(tokens, "token")} · ${num(milliseconds / 1000)} s${fast}`;
}

/** The outcome of a race in a few words, for the turns of a conversation. */
export function outcome(spec, plain) {
  const ratio = spec.speed / plain.speed;
  const beside = Number.isFinite(ratio) ? `, ${num(ratio)} × plain decoding` : "";
  return spec.speed > 0 ? `${speed(spec.speed)} tokens/s${beside}` : "";
}

/** The two runs beside each other: time for the same text as bars, speeds, ratio. */
export function drawComparison(spec, plain) {
  byId("compare").hidden = false;
  const slowest = Math.min(spec.speed, plain.speed);
  for (const [name, run] of [["spec", spec], ["plain", plain]]) {
    byId(`compare-${name}`).textContent = speed(run.speed);
    byId(`bar-${name}`).style.setProperty("--width", slowest / run.speed || 0); // time: the slower one is the longer
  }
  byId("bar-spec").style.setProperty("--share", spec.draftShare || 0);
  byId("compare-ratio").textContent = `${num(spec.speed / plain.speed)} ×`;
  byId("compare-note").textContent = sentence(spec, plain);
  const ratio = spec.speed / plain.speed;
  if (!Number.isFinite(ratio)) return;
  byId("calc-measured").textContent =
    `Measured in the last race: ${num(ratio)} times the speed. What follows is an estimate, from that run's figures.`;
}

/** Why it is faster, or slower. */
function sentence(spec, plain) {
  const cost = spec.roundMs / plain.roundMs;
  if (!Number.isFinite(cost)) return "";
  const gave = `A round cost ${num(cost)} plain passes and gave ${num(spec.acceptedLength)} tokens.`;
  return `${gave} Speeds count drafting and verifying, after the prompt was read.`;
}
