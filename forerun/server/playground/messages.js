// What the page says about itself: a polite line of status, an error, and the question for the API key.

import { ApiError, saveKey } from "./api.js";
import { byId } from "./dom.js";

/** One polite line; the tokens themselves are no live region, nobody wants thousands of words read twice. */
export function status(text) {
  byId("status").textContent = text;
}

export function showError(error) {
  const ours = !(error instanceof ApiError);
  if (ours) console.error(error); // for whoever can mend it
  byId("error").textContent = ours ? `This page made a mistake: ${error.message}` : explain(error);
  byId("error").hidden = false;
  status("");
}

/** What the server said, where, and what can be done where it did not say. */
function explain({ message, param, code }) {
  const full = code === "context_length_exceeded" ? ", or begin a new conversation" : "";
  return `${message}${param ? ` (${param})` : ""}${full}`;
}

/** Asks for the API key for as long as the server wants one and the reader gives one. */
export async function withKey(action) {
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
