// A conversation: its turns, and the salt that gives its requests a memory of their own on the server, so that a prompt
// that was run before is new again in a new conversation.

import { byId, el } from "./dom.js";

/** 32 hexadecimal digits. Not crypto.randomUUID: a page served over plain HTTP to another machine has none. */
function randomSalt() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export class Conversation {
  #turns = []; // {asked, answer, note}
  #shown = 0;
  salt = randomSalt();

  /** Begins anew. */
  renew() {
    [this.#turns, this.#shown, this.salt] = [[], 0, randomSalt()];
    byId("turns").replaceChildren();
    byId("turns").hidden = true;
  }

  get empty() {
    return this.#turns.length === 0;
  }

  /** Whether this is what the conversation began with: asked again it is a new one. */
  beganWith(prompt) {
    return this.#turns[0]?.asked === prompt;
  }

  /** What was asked, answered (in part, where it was stopped) and measured. */
  add(asked, answer) {
    this.#turns.push({ asked, answer, note: "" });
  }

  /** One line on how the last answer came. */
  set note(text) {
    if (!this.empty) this.#turns.at(-1).note = text;
  }

  /** The messages of a request that goes on with `prompt`. */
  messages(system, prompt) {
    const said = this.#turns.flatMap(({ asked, answer }) => [
      { role: "user", content: asked },
      { role: "assistant", content: answer },
    ]);
    const before = system ? [{ role: "system", content: system }] : [];
    return [...before, ...said, { role: "user", content: prompt }];
  }

  /** Shows every turn so far as text: the place of the last one is wanted for the next. */
  show() {
    for (const { asked, answer, note } of this.#turns.slice(this.#shown)) {
      const parts = [el("p", { class: "asked" }, asked), el("p", { class: "answer" }, answer)];
      byId("turns").append(el("li", {}, ...parts, el("small", {}, note)));
    }
    this.#shown = this.#turns.length;
    byId("turns").hidden = this.empty;
  }
}
