// Wires the page: reads the form, runs the request twice, hands what comes to the views.

import { ApiError, complete, saveKey, serverInfo } from "./api.js";
import { Calculator, DEEPEST } from "./calculator.js";
import { byId, el, everyFrame, plural } from "./dom.js";
import { drawComparison, drawLive, exactness } from "./live.js";
import { RoundsView } from "./rounds.js";
import { Run } from "./run.js";
import { TokenView } from "./tokens.js";

const form = byId("form");
const rounds = new RoundsView((index, byHand) => tokens.highlight(index, byHand));
const tokens = new TokenView((index) => rounds.show(index, false));
const calculator = new Calculator();
const seen = new Set(); // requests of this visit, without how they were drafted
let info = null;
let abort = null;
let last = null; // the last speculative run

// ---- what the server offers

async function load() {
  try {
    info = await withKey(serverInfo);
  } catch (error) {
    return showError(error);
  }
  byId("server").textContent = [
    info.model,
    `context ${info.context.toLocaleString("en")}`,
    info.kernels,
    plural(info.threads, "thread"),
    `v${info.version}`,
  ].join(" · ");
  options(byId("draft"), info.drafts, info.draft);
  options(byId("rule"), info.rules, info.rule, (rule) => (rule === "typical" ? "typical (lossy)" : rule));
  byId("max-tokens").max = info.context;
  byId("run").disabled = false;
  prefill();
}

function options(select, values, chosen, label = (value) => value) {
  select.replaceChildren(...values.map((value) => el("option", { value }, label(value))));
  select.value = chosen;
}

function prefill() {
  const drafted = last?.rounds.find((round) => round.draft.length);
  calculator.prefill(info?.costs, [byId("draft").value, drafted?.draft[0].source], last?.acceptance);
}

/** Costs are learned while requests run, so they are fetched again after each. Failing at that disturbs nobody. */
async function learnCosts() {
  info = await serverInfo().catch(() => info);
  rounds.learn(info.costs);
  prefill();
}

// ---- one press of Run

function readForm() {
  const field = (name) => form.elements[name].value;
  const depth = field("depth");
  const random = Math.floor(Math.random() * 2 ** 31);
  return {
    request: {
      model: info.model,
      prompt: field("prompt"),
      max_tokens: Number(field("max_tokens")),
      temperature: Number(field("temperature")),
      seed: field("seed") === "" ? random : Number(field("seed")), // one seed for both runs, or they could not agree
      stream: true,
      stream_options: { include_usage: true },
      trace: true,
    },
    speculative: field("draft") !== "off" && {
      draft: field("draft"),
      depth: depth === "auto" ? depth : Number(depth),
      rule: field("rule"),
    },
    beside: form.elements.beside.checked && field("draft") !== "off",
  };
}

/** What makes a speed-up look better or worse than it is. */
function caution(request) {
  const name = JSON.stringify(request);
  const again = seen.has(name);
  seen.add(name);
  if (again) return "This very request ran before: a drafter that remembers finished requests knows its text by now.";
  const cold = !Object.keys(info.costs?.pass_ms ?? {}).length;
  return cold ? "This run had yet to measure what passes and drafts cost: the next, with another seed, says more." : "";
}

async function start() {
  const plan = readForm();
  const warning = caution(plan.request);
  busy(true);
  const spec = new Run();
  const plain = new Run();
  last = spec;
  try {
    // Speculation goes first: a drafter that remembers finished requests would know the text from the plain run.
    await speculate(plan, spec);
    if (plan.beside) await decodePlainly(plan, spec, plain);
    status(`Done: ${plural(spec.tokens.length, "token")} in ${plural(spec.rounds.length, "pass", "passes")}.`);
    byId("caution").textContent = warning;
    byId("caution").hidden = !warning;
  } catch (error) {
    if (error.name === "AbortError") status(`Stopped after ${plural(spec.tokens.length, "token")}.`);
    else showError(error);
    if (plain.rounds.length) compare(plan, spec, plain, false);
  } finally {
    busy(false);
  }
  await learnCosts();
}

/** The run that is shown. What came since the last frame is drawn in one go. */
async function speculate({ request, speculative }, run) {
  tokens.clear(request.prompt);
  rounds.watch(run.rounds, speculative, info.costs);
  byId("results").hidden = false;
  status(speculative ? "Running with speculation…" : "Running without speculation…");
  let drawn = 0;
  const flush = () => {
    if (drawn === run.rounds.length) return;
    tokens.append(run.rounds.slice(drawn));
    drawn = run.rounds.length;
    rounds.refresh();
    drawLive(run);
  };
  const soon = everyFrame(flush);
  try {
    await stream({ ...request, speculative }, (chunk) => {
      if (run.add(chunk)) soon();
      else if (chunk.choices[0]?.text) flush(), tokens.appendPlain(chunk.choices[0].text);
    });
  } finally {
    flush();
  }
}

async function decodePlainly(plan, spec, plain) {
  status("Running the same without speculation…");
  await stream({ ...plan.request, speculative: false }, (chunk) => plain.add(chunk));
  compare(plan, spec, plain, true);
}

function compare({ request, speculative }, spec, plain, ended) {
  const verdict = exactness(spec, plain, speculative.rule, request.temperature, ended);
  drawComparison(spec, plain);
  const badge = byId("badge");
  badge.className = `badge ${verdict.kind}`;
  badge.textContent = verdict.text;
  if (verdict.at >= 0) tokens.markDifference(verdict.at);
}

const stream = (body, onChunk) => withKey(() => complete(body, abort.signal, onChunk));

function busy(on) {
  const [run, stop] = [byId("run"), byId("stop")];
  const focused = document.activeElement === (on ? run : stop);
  if (on) {
    abort = new AbortController();
    for (const id of ["error", "compare", "caution"]) byId(id).hidden = true;
  }
  run.disabled = on;
  stop.disabled = !on;
  byId("tokens").setAttribute("aria-busy", on);
  if (focused) (on ? stop : run).focus(); // a button that goes out takes the focus with it
}

// ---- messages and the key

/** One polite line; the tokens themselves are no live region, nobody wants thousands of words read twice. */
function status(text) {
  byId("status").textContent = text;
}

function showError(error) {
  const ours = !(error instanceof ApiError);
  if (ours) console.error(error); // for whoever can mend it
  const param = error.param ? ` (${error.param})` : "";
  byId("error").textContent = ours ? `This page made a mistake: ${error.message}` : `${error.message}${param}`;
  byId("error").hidden = false;
  status("");
}

/** Asks for the API key for as long as the server wants one and the reader gives one. */
async function withKey(action) {
  for (;;) {
    try {
      return await action();
    } catch (error) {
      if (error.status !== 401) throw error;
      const key = await askKey(error.message);
      if (!key) throw error;
      saveKey(key);
    }
  }
}

function askKey(message) {
  const dialog = byId("key-dialog");
  byId("key-reason").textContent = message;
  byId("key").value = "";
  dialog.returnValue = "";
  dialog.showModal();
  const answer = () => dialog.returnValue === "use" && byId("key").value.trim();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(answer()), { once: true }));
}

// ---- events

byId("depth").append(...Array.from({ length: DEEPEST }, (_, i) => el("option", { value: i + 1 }, `${i + 1}`)));
form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (!byId("run").disabled) start();
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
byId("stop").addEventListener("click", () => abort.abort());
byId("draft").addEventListener("change", () => {
  last = null; // another drafter: what the last run accepted says nothing of it
  prefill();
});
byId("ghosts").addEventListener("change", (event) => {
  byId("tokens").classList.toggle("with-ghosts", event.target.checked);
});
load();
