// Wires the page: sends the request twice, one after the other, and hands what comes to the views.

import { complete, serverInfo } from "./api.js";
import { Calculator } from "./calculator.js";
import { Conversation } from "./conversation.js";
import { byId, everyFrame, moving, num, plural } from "./dom.js";
import { Form } from "./form.js";
import { drawComparison, drawLive, exactness, outcome, pace } from "./live.js";
import { showError, status, withKey } from "./messages.js";
import { duration, play } from "./player.js";
import { RoundsView } from "./rounds.js";
import { Run } from "./run.js";
import { TokenView } from "./tokens.js";

const ALONE = "Two answers at once on one processor would slow each other down, so the speculative one ran first, alone";
const AGAIN = `${ALONE}; it is played again at the pace it had, beside the plain one, live and alone too.`;
const STILL = `${ALONE}, and the plain one after it, alone too.`;

const form = new Form(start, begin);
const rounds = new RoundsView((index, byHand) => tokens.highlight(index, byHand));
const tokens = new TokenView((index) => rounds.show(index, false));
const calculator = new Calculator();
const conversation = new Conversation();
const seen = new Set(); // what was asked in this visit
let info = null;
let abort = null;
let last = null; // the last speculative run
let raced = []; // the last two runs that were compared: what can be played again

// ---- what the server offers

async function load() {
  try {
    info = await withKey(serverInfo);
  } catch (error) {
    byId("server").textContent = "not connected: load this page again when the server answers";
    return showError(error);
  }
  byId("server").textContent = [
    info.model,
    `context ${info.context.toLocaleString("en")}`,
    info.kernels,
    plural(info.threads, "thread"),
    `v${info.version}`,
  ].join(" · ");
  form.offer(info);
  prefill();
}

function prefill() {
  const drafted = last?.rounds.find((round) => round.draft.length);
  calculator.prefill(info?.costs, [byId("draft").value, drafted?.draft[0].source], last);
}

/** Costs are learned while requests run, so they are fetched again after each. Failing at that disturbs nobody. */
async function learnCosts() {
  info = await serverInfo().catch(() => info);
  prefill();
}

// ---- one press of Run

/** A new conversation, where the model has conversations. */
function begin() {
  if (!info.chat || conversation.empty) return;
  conversation.renew();
  byId("stage").hidden = true;
  status("A new conversation.");
}

/** What makes a speed-up look better or worse than it is. */
function caution(said) {
  const name = JSON.stringify(said);
  const again = seen.has(name);
  seen.add(name);
  if (again && !info.isolation) {
    return "This prompt ran before: a drafter that remembers finished requests may know its text by now.";
  }
  const cold = !Object.keys(info.costs?.pass_ms ?? {}).length;
  return cold ? "This run had yet to measure what passes and drafts cost: the next, with another seed, says more." : "";
}

/** What is asked, where, and how it is to be run. The salt changes with every conversation: each begins cold. */
function planned() {
  const { prompt, system, temperature } = form;
  if (!info.chat || conversation.beganWith(prompt)) conversation.renew();
  const said = info.chat ? { messages: conversation.messages(system, prompt) } : { prompt };
  const path = info.chat ? "v1/chat/completions" : "v1/completions";
  const { request, ...rest } = form.read();
  return { ...rest, path, prompt, temperature, said, request: { ...request, ...said, cache_salt: conversation.salt } };
}

async function start() {
  const plan = planned();
  const warning = caution(plan.said);
  const [spec, plain] = [new Run(info.costs), new Run(info.costs)];
  last = spec;
  busy(true);
  prepare(plan);
  try {
    // Speculation goes first: a drafter that remembers finished requests would know the text from the plain run.
    await speculate(plan, spec);
    if (plan.beside) await race(plan, spec, plain);
    status(done(spec, plan.request.max_tokens));
    if (plan.speculative && spec.rounds.length) form.measured(plan.prompt, measured(spec));
    byId("caution").textContent = warning;
    byId("caution").hidden = !warning;
  } catch (error) {
    if (error.name === "AbortError") status(`Stopped after ${plural(spec.tokens.length, "token")}.`);
    else showError(error);
    if (plain.rounds.length) compare(plan, spec, plain);
  } finally {
    busy(false);
    modes();
  }
  if (info.chat) remember(plan, spec, plain);
  await learnCosts();
}

function done({ finish, tokens: said, rounds: passes, why }, most) {
  const full = said.length < most ? "The context is full: begin anew or shorten the prompt." : "It stopped at max tokens.";
  const cut = finish === "length" ? ` ${full}` : "";
  const drafts = why ? ` It ${why}.` : "";
  return `Done: ${plural(said.length, "token")} in ${plural(passes.length, "pass", "passes")}.${cut}${drafts}`;
}

/** What a ready prompt was measured to give with the drafter that was chosen. */
function measured(run) {
  const drafted = run.rounds.filter((round) => round.draft.length).length;
  const share = `${drafted} of ${plural(run.rounds.length, "pass", "passes")} drafted`;
  return `last run: ${num(run.acceptedLength, 2)} tokens a pass, ${share}`;
}

/** The stage as it is before anything has come. In a chat the prompt leaves the form and the last answer joins the turns. */
function prepare({ prompt, speculative }) {
  conversation.show();
  byId("stage").hidden = false;
  byId("asked").hidden = !info.chat;
  byId("asked").textContent = prompt;
  byId("text-title").textContent = speculative ? "Speculative" : "Plain";
  modes("live");
  for (const id of ["error", "compare", "caution", "plain", "explain"]) byId(id).hidden = true;
  byId("pace-spec").textContent = "";
  if (info.chat) form.prompt = "";
  tokens.clear(info.chat ? "" : prompt);
  byId("lanes").scrollIntoView({ block: "nearest" });
}

/** What came stays, in part as well. A turn without any answer never was: its prompt goes back to the form. */
function remember({ prompt }, spec, plain) {
  if (spec.text) {
    conversation.add(prompt, spec.text);
    conversation.note = outcome(spec, plain);
    return;
  }
  if (!form.prompt) form.prompt = prompt;
  byId("stage").hidden = true;
}

/** The run that is shown. What came since the last frame is drawn in one go. */
async function speculate(plan, run) {
  rounds.watch(run, plan.speculative);
  status(plan.speculative ? "Running with speculation…" : "Running without speculation…");
  let drawn = 0;
  const flush = () => {
    byId("pace-spec").textContent = pace(run, run.steps.length, duration(run.steps));
    if (drawn === run.rounds.length) return;
    tokens.append(run.rounds.slice(drawn));
    drawn = run.rounds.length;
    rounds.refresh();
    drawLive(run);
  };
  const soon = everyFrame(flush);
  try {
    await stream(plan, plan.speculative, run, (step) => {
      if (step.round) soon();
      else flush(), tokens.appendPlain(step.text);
    });
  } finally {
    flush();
  }
}

/** The same without speculation, live, beside the recorded answer. Who wants no motion sees the plain one come only. */
async function race(plan, spec, plain) {
  status("Running the same without speculation…");
  byId("explain").textContent = moving() ? AGAIN : STILL;
  byId("plain").hidden = byId("explain").hidden = false;
  byId("plain-prompt").textContent = info.chat ? "" : plan.prompt;
  byId("plain-text").replaceChildren();
  byId("pace-plain").textContent = "";
  byId("lanes").scrollIntoView({ block: "nearest" });
  const tracks = moving() ? [replayed(spec), beside(plain)] : [beside(plain)];
  modes(moving() ? "recording" : "", "live");
  let playing = null;
  try {
    await stream(plan, false, plain, () => (playing ??= play(tracks, abort.signal)));
  } finally {
    await playing;
  }
  compare(plan, spec, plain);
}

/** A lane that shows a run again. */
function replayed(run) {
  const draw = (count, milliseconds) => {
    byId("pace-spec").textContent = pace(run, count, milliseconds);
    tokens.reveal(run.steps.slice(0, count).filter((step) => step.round).length);
  };
  return { run, draw };
}

/** The lane of plain decoding. */
function beside(run) {
  const [box, text] = [byId("plain-output"), byId("plain-text")];
  let shown = 0;
  const draw = (count, milliseconds) => {
    byId("pace-plain").textContent = pace(run, count, milliseconds);
    const stick = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    text.append(run.steps.slice(shown, count).map((step) => step.text).join("")); // nodes of their own: all else stays
    shown = count;
    if (stick) box.scrollTop = box.scrollHeight;
  };
  return { run, draw };
}

/** Both from their recordings. */
async function replay(slow) {
  busy(true);
  byId("lanes").scrollIntoView({ block: "nearest" });
  byId("plain-text").replaceChildren();
  modes("recording", "recording");
  status(slow === 1 ? "Playing both again at the speed they had…" : `Playing both again, ${slow} times slower…`);
  await play([replayed(raced[0]), beside(raced[1])], abort.signal, slow);
  busy(false);
  modes();
  status("Played again.");
}

/** Says of each lane whether it is seen as it comes. */
function modes(spec = "", plain = "") {
  byId("mode-spec").textContent = spec;
  byId("mode-plain").textContent = plain;
}

/** The outcome, of as much as there is. From now on both can be played again. */
function compare({ request, speculative, temperature }, spec, plain) {
  raced = [spec, plain];
  const verdict = exactness(spec, plain, speculative.rule, temperature, plain.finish !== null);
  drawComparison(spec, plain);
  byId("compare").scrollIntoView({ block: "nearest" });
  const badge = byId("badge");
  badge.className = `badge ${verdict.kind}`;
  badge.textContent = verdict.text;
  if (verdict.at >= 0) tokens.markDifference(verdict.at);
}

/** Streams one answer into `run`; `onStep(step)` for whatever said something. */
async function stream({ path, request }, speculative, run, onStep) {
  try {
    await withKey(() => {
      const began = performance.now();
      return complete(path, { ...request, speculative }, abort.signal, (chunk) => {
        const before = run.steps.length;
        run.add(chunk, performance.now() - began);
        if (run.steps.length > before) onStep(run.steps.at(-1));
      });
    });
  } finally {
    run.ended = true;
  }
}

function busy(on) {
  const [run, stop] = [byId("run"), byId("stop")];
  const focused = document.activeElement === (on ? run : stop);
  if (on) abort = new AbortController();
  form.wait(on);
  stop.disabled = !on;
  for (const id of ["renew", "replay", "replay-slowly"]) byId(id).setAttribute("aria-disabled", on);
  byId("tokens").setAttribute("aria-busy", on);
  if (focused) (on ? stop : run).focus({ preventScroll: true }); // a button that goes out takes the focus with it
}

// ---- events

const idle = (action) => () => byId("run").disabled || action(); // while a request runs the button does nothing
byId("stop").addEventListener("click", () => abort.abort());
byId("renew").addEventListener("click", idle(begin));
byId("replay").addEventListener("click", idle(() => replay(1)));
byId("replay-slowly").addEventListener("click", idle(() => replay(10)));
byId("draft").addEventListener("change", () => {
  last = null; // another drafter: what the last run accepted says nothing of it
  prefill();
});
byId("ghosts").addEventListener("change", (event) => {
  byId("tokens").classList.toggle("with-ghosts", event.target.checked);
});
byId("details").addEventListener("toggle", () => {
  byId("detail").hidden = !byId("details").open;
});
load();
