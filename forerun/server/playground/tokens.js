// The text, token by token, each marked by where it came from. Only appends: a long text is never drawn again.
// Rejected drafted tokens are always in the page and hidden by the style sheet, so that showing them costs nothing.

import { byId, el, moving, num, visible } from "./dom.js";
import { acceptedPath } from "./run.js";

// Every source has a colour and an underline of its own (style.css), in the order in which they turn up.
const STYLES = 5;
const GREY = 120; // milliseconds for which drafted tokens are grey before their verdict shows
const GONE = 300; // and after which the rejected ones have vanished
const slots = new Map();

/** The style class of a source, the same for as long as the page is open. */
export function sourceClass(source) {
  if (!slots.has(source)) slots.set(source, slots.size % STYLES);
  return `drafted src-${slots.get(source)}`;
}

/** A token standing alone (in a table, in a legend), white space visible. */
export function chip(text, source) {
  return el("span", { class: `chip ${source ? sourceClass(source) : ""}` }, visible(text));
}

/** Rejected nodes by the number of tokens emitted before them: each stands where it wanted to be. */
export function ghostsByPlace(round) {
  const place = new Map([[0, 0]]); // node (0 is the root) -> tokens of this round before its children
  acceptedPath(round).forEach((i, j) => place.set(i + 1, j + 1));
  const ghosts = new Map();
  const walk = (node, at) => {
    round.draft.forEach((child, i) => {
      if (child.parent !== node || child.accepted) return;
      if (!ghosts.has(at)) ghosts.set(at, []);
      ghosts.get(at).push(i);
      walk(i + 1, at);
    });
  };
  for (const [node, at] of place) walk(node, at);
  return ghosts;
}

export class TokenView {
  #tokens = []; // the element of every emitted token
  #firsts = []; // of every round: index of its first token
  #rounds = [];
  #pieces = []; // of every round: its tokens and rejected ones, in the order of the page
  #revealed = 0; // rounds that can be seen
  #fresh = []; // rejected tokens of the newest round, not yet vanished
  #current = null; // the one that the Tab key reaches; arrows move it
  #shown = null;

  /** `onPick(round index)` is called when a token is chosen. */
  constructor(onPick) {
    this.box = byId("output");
    this.text = byId("tokens");
    this.detail = byId("detail");
    this.hint = this.detail.textContent;
    this.legend = byId("legend");
    this.text.addEventListener("pointerover", (e) => this.#inspect(e.target));
    this.text.addEventListener("focusin", (e) => this.#inspect(e.target));
    this.text.addEventListener("click", (e) => this.#pick(e.target, onPick));
    this.text.addEventListener("keydown", (e) => this.#key(e, onPick));
  }

  clear(prompt) {
    [this.#tokens, this.#firsts, this.#rounds, this.#pieces, this.#fresh] = [[], [], [], [], []];
    [this.#current, this.#shown, this.#revealed] = [null, null, 0];
    this.text.replaceChildren(el("span", { class: "prompt" }, prompt));
    this.detail.textContent = this.hint;
    for (const item of this.legend.querySelectorAll("[data-source]")) item.remove();
  }

  /** Adds rounds that were not drawn yet, all in one go. */
  append(rounds) {
    const pieces = document.createDocumentFragment();
    for (const round of rounds) this.#draw(round, pieces);
    this.#following(() => {
      this.text.append(pieces);
      this.#show(this.#rounds.length);
    });
  }

  /** Shows the first `count` rounds only: the others are yet to come, in a replay. */
  reveal(count) {
    if (count === this.#revealed) return;
    this.#following(() => {
      for (const span of this.#pieces.slice(count, this.#revealed).flat()) span.classList.add("later");
      this.#show(count);
    });
  }

  /** What changes the text also follows it, unless the reader has scrolled away. */
  #following(change) {
    const stick = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 40;
    change();
    if (stick) this.box.scrollTop = this.box.scrollHeight;
  }

  #show(count) {
    const shown = this.#pieces.slice(this.#revealed, count);
    this.#revealed = count;
    for (const span of shown.flat()) span.classList.remove("later");
    if (shown.length && moving()) this.#flash(shown);
  }

  /** What was drafted is grey for a moment before its verdict shows. Only the newest round shows what it lost: in the
   * middle of a text it would push what follows to and fro. Nothing waits for this. */
  #flash(rounds) {
    for (const span of this.#fresh) span.classList.remove("fresh", "struck");
    const lost = rounds.at(-1).filter((span) => span.matches(".ghost"));
    const drafted = [...lost, ...rounds.flat().filter((span) => span.matches(".drafted"))];
    for (const span of drafted) span.classList.add("fresh");
    this.#fresh = lost;
    setTimeout(() => {
      for (const span of drafted) span.classList.replace("fresh", "struck");
    }, GREY);
    setTimeout(() => {
      for (const span of drafted) span.classList.remove("struck");
    }, GONE);
  }

  /** Text that came without a trace. */
  appendPlain(text) {
    this.text.append(text);
  }

  #draw(round, pieces) {
    const index = this.#rounds.push(round) - 1;
    this.#firsts.push(this.#tokens.length);
    const path = acceptedPath(round);
    const ghosts = ghostsByPlace(round);
    const mine = [];
    const drawGhosts = (place) => {
      for (const i of ghosts.get(place) ?? []) mine.push(ghost(round.draft[i], index, i));
    };
    round.tokens.forEach((token, j) => {
      drawGhosts(j);
      const span = el("span", { class: `t ${token.source ? sourceClass(token.source) : ""}` }, token.text);
      span.dataset.round = index;
      if (j < path.length) span.dataset.node = path[j];
      if (token.source) span.dataset.source = token.source;
      if (token.source) this.#explain(token.source);
      if (token.text.startsWith("\n")) span.classList.add("newline"); // or its mark would not be seen
      this.#tokens.push(span);
      mine.push(span);
    });
    drawGhosts(round.tokens.length); // where the request ended
    this.#pieces.push(mine);
    pieces.append(...mine);
    if (!this.#current && this.#tokens.length) this.#reach(this.#tokens[0]);
  }

  /** The legend names the sources that were seen. */
  #explain(source) {
    if ([...this.legend.children].some((item) => item.dataset.source === source)) return;
    const item = el("li", {}, el("span", { class: `chip ${sourceClass(source)}` }, source), " drafted and accepted");
    item.dataset.source = source;
    byId("legend-rejected").before(item);
  }

  /** Marks the tokens of a round, and scrolls the text (not the page) to them where asked to. */
  highlight(index, scroll) {
    for (const span of this.#ofRound(this.#shown)) span.classList.remove("now");
    this.#shown = index;
    const spans = this.#ofRound(index);
    for (const span of spans) span.classList.add("now");
    if (scroll && spans.length) this.box.scrollTop = spans[0].offsetTop - this.box.clientHeight / 2;
  }

  #ofRound(index) {
    if (this.#firsts[index] === undefined) return []; // none chosen, or not drawn yet
    return this.#tokens.slice(this.#firsts[index], this.#firsts[index + 1]);
  }

  /** Marks the first token that plain decoding did not say. */
  markDifference(index) {
    this.#tokens[index]?.classList.add("differs");
  }

  #reach(span) {
    if (this.#current) this.#current.tabIndex = -1;
    this.#current = span;
    span.tabIndex = 0;
    span.setAttribute("aria-describedby", "detail");
  }

  #pick(target, onPick) {
    if (target.dataset.round === undefined) return;
    this.#reach(target);
    target.focus({ preventScroll: true }); // a click came before it could be focused
    onPick(Number(target.dataset.round));
  }

  #key(event, onPick) {
    const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    if (event.key === "Enter") this.#pick(event.target, onPick);
    if (!step) return;
    event.preventDefault();
    let next = event.target[step];
    while (next && (next.dataset.round === undefined || next.offsetParent === null)) next = next[step];
    if (!next) return;
    this.#reach(next);
    next.focus();
  }

  #inspect(span) {
    if (span.dataset.round === undefined) return;
    const round = this.#rounds[span.dataset.round];
    const node = span.dataset.node;
    const token = node === undefined ? round.bonus : round.draft[node];
    const source = node === undefined ? "the target's own" : token.source;
    const fate = node === undefined ? "" : token.accepted ? ", accepted" : ", rejected";
    const q = node === undefined ? "" : ` · q ${num(token.q)}`;
    const rest = ` ${source}${fate} · step ${round.step} · p ${num(token.p)}${q} · noise ${num(token.noise)}`;
    this.detail.replaceChildren(chip(token.text, node === undefined ? "" : source), rest);
  }
}

function ghost(node, round, i) {
  // no line breaks: a line the target never began is no line
  const mark = el("del", { class: "ghost" }, node.text.replaceAll("\n", "↵"));
  mark.dataset.round = round;
  mark.dataset.node = i;
  mark.dataset.source = node.source;
  return mark;
}
