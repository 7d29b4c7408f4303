// The form: what the server offers goes in, a request comes out.

import { DEEPEST } from "./calculator.js";
import { byId, el } from "./dom.js";
import { status } from "./messages.js";
import { readyPrompts } from "./prompts.js";

const SAMPLING = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"]; // what can be set

export class Form {
  #form = byId("form");
  #info = null;
  #lent = false; // the temperature came with a ready prompt

  /** `onRun()` is called when a request is wanted, `onReady()` when a ready prompt was chosen. */
  constructor(onRun, onReady) {
    this.onReady = onReady;
    byId("depth").append(...Array.from({ length: DEEPEST }, (_, i) => el("option", { value: i + 1 }, `${i + 1}`)));
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!byId("run").disabled) onRun();
    });
    // a field in a closed <details> cannot be complained about: the browser would refuse without a word
    this.#form.addEventListener("invalid", (e) => (byId("settings").open ||= byId("settings").contains(e.target)), true);
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.#form.requestSubmit();
    });
    byId("prompt").addEventListener("input", () => {
      this.#mark(null);
      if (this.#lent) this.#lend("");
    });
    this.#form.elements.temperature.addEventListener("input", () => (this.#lent = false));
  }

  /** What the server offers. */
  offer(info) {
    this.#info = info;
    options(byId("draft"), info.drafts, info.draft);
    options(byId("rule"), info.rules, info.rule, (rule) => (rule === "typical" ? "typical (lossy)" : rule));
    byId("max-tokens").max = info.context;
    for (const name of SAMPLING) {
      this.#form.elements[name].placeholder = info.sampling?.[name] ?? info.default_sampling[name];
    }
    byId("sampling-origin").textContent = origin(Object.keys(info.sampling ?? {}));
    byId("prompt-label").textContent = info.chat ? "Message" : "Text to continue";
    for (const id of ["renew", "system-field"]) byId(id).hidden = !info.chat;
    byId("ready").replaceChildren(...readyPrompts(info.chat).map((ready) => this.#button(ready)));
    this.wait(false);
  }

  /** Whether nothing may be asked now. */
  wait(on) {
    byId("run").disabled = on;
    for (const button of byId("ready").children) button.disabled = on;
  }

  /** What a run of this prompt came to: a ready prompt says that from now on. */
  measured(prompt, said) {
    for (const button of byId("ready").children) {
      if (button.asks === prompt) button.querySelector("small").textContent = said;
    }
  }

  #button(ready) {
    const button = el("button", { type: "button", "aria-pressed": "false" }, ready.name, el("small", {}, ready.about));
    button.asks = ready.text;
    button.addEventListener("click", () => {
      this.prompt = ready.text;
      this.#mark(button);
      this.onReady();
      const advised = Object.keys(this.#info.sampling ?? {}).length;
      this.#lend(ready.exact && !advised ? "0" : "");
      if (this.#lent) status("Temperature is 0 for this prompt: the model's authors recommend none.");
      byId("run").focus();
    });
    return button;
  }

  /** A temperature for a ready prompt only: what the reader types is sampled as the authors would. */
  #lend(temperature) {
    this.#form.elements.temperature.value = temperature;
    this.#lent = temperature !== "";
  }

  #mark(chosen) {
    for (const button of byId("ready").children) button.setAttribute("aria-pressed", button === chosen);
  }

  get prompt() {
    return this.#field("prompt");
  }

  set prompt(text) {
    byId("prompt").value = text;
  }

  get system() {
    return this.#field("system");
  }

  #field(name) {
    return this.#form.elements[name].value;
  }

  /** The temperature that a request will have, said or not. */
  get temperature() {
    return Number(this.#field("temperature") || this.#form.elements.temperature.placeholder);
  }

  /** What both runs have in common, how the first one drafts (false: not at all), and whether there is a second. */
  read() {
    const field = (name) => this.#field(name);
    const set = SAMPLING.filter((name) => field(name) !== "");
    const off = field("draft") === "off";
    return {
      request: {
        model: this.#info.model,
        max_tokens: Number(field("max_tokens")),
        ...Object.fromEntries(set.map((name) => [name, Number(field(name))])),
        // one seed for both runs, or they could not agree
        seed: field("seed") === "" ? Math.floor(Math.random() * 2 ** 31) : Number(field("seed")),
        stream: true,
        stream_options: { include_usage: true },
        trace: true,
      },
      speculative: !off && {
        draft: field("draft"),
        depth: field("depth") === "auto" ? "auto" : Number(field("depth")),
        rule: field("rule"),
      },
      beside: this.#form.elements.beside.checked && !off,
    };
  }
}

/** Who set the values that hold where a field is left empty; `advised` are the names of those that the authors set. */
function origin(advised) {
  const set = SAMPLING.filter((name) => advised.includes(name)).map((name) => name.replaceAll("_", " "));
  if (!set.length) return "forerun's default, since the model's authors set nothing";
  if (set.length === SAMPLING.length) return "what the model's authors set";
  return `what the model's authors set (${set.join(", ")}) and else forerun's default`;
}

function options(select, values, chosen, label = (value) => value) {
  select.replaceChildren(...values.map((value) => el("option", { value }, label(value))));
  select.value = chosen;
}
