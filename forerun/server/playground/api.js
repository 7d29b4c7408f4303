// Talks to the server: JSON, and completions streamed as server-sent events. `EventSource` cannot POST, so the stream
// is read from `fetch`. The API key lives in sessionStorage: it is gone with the tab and never in a URL.

const KEY = "forerun.key";

/** What the server refused, or what went wrong on the way. `status` is 0 where there was no answer at all. */
export class ApiError extends Error {
  constructor(status, { message, type, param, code } = {}) {
    super(message || `the server answered with status ${status}`);
    Object.assign(this, { status, type, param, code });
  }
}

export const saveKey = (key) => sessionStorage.setItem(KEY, key);

/** Reads events from pieces of text cut anywhere, and calls `onData` with the data of each. */
export function sseParser(onData) {
  let rest = "";
  let data = [];
  return (text) => {
    rest += text;
    for (;;) {
      const end = /\r\n|\n|\r(?!$)/.exec(rest); // a carriage return at the very end may be half of one line end
      if (!end) return;
      const line = rest.slice(0, end.index);
      rest = rest.slice(end.index + end[0].length);
      if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
      if (line === "" && data.length) {
        const whole = data.join("\n");
        data = [];
        onData(whole);
      }
    }
  };
}

/** What the server runs: model, drafters, rules, measured costs. */
export async function serverInfo() {
  return (await call("server_info")).json();
}

/** Streams one answer; `onChunk(chunk)` for every event. Resolves at [DONE], throws ApiError, or AbortError. */
export async function complete(path, body, signal, onChunk) {
  const response = await call(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  let done = false;
  const feed = sseParser((data) => {
    if (data === "[DONE]") {
      done = true;
      return;
    }
    const chunk = parse(data);
    if (chunk.error) throw new ApiError(response.status, chunk.error);
    onChunk(chunk);
  });
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  try {
    for (;;) {
      const { value, done: ended } = await reader.read().catch(lost);
      if (ended) break;
      feed(decoder.decode(value, { stream: true }));
    }
  } finally {
    reader.cancel().catch(() => {}); // after an error the server need not go on for nobody
  }
  if (!done) throw new ApiError(0, { message: "the stream ended before it was complete" });
}

async function call(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers }).catch(lost);
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({}));
  throw new ApiError(response.status, answer.error);
}

/** Browsers say little more than "network error". */
function lost(error) {
  if (error.name === "AbortError") throw error;
  throw new ApiError(0, { message: "the connection to the server failed; is it still running?" });
}

function parse(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new ApiError(0, { message: "the server sent something that is no JSON" });
  }
}
