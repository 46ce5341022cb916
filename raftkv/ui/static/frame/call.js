// Calls of the /v3 gateway: `const answer = await call("/v3/kv/range", { key })`. Errors are one line, with what to do.

import { keep, signedIn } from "./session.js";

/** Where the member is: the folder above /ui/, so that a proxy may put it below a path of its own. */
export const BASE = new URL("..", new URL(".", document.baseURI));

/** The address of a path of the member. */
export const url = (path) => new URL(path.replace(/^\//, ""), BASE);

const ADVICE = {
  3: "check what was entered",
  4: "try again; is there a leader?",
  7: "ask an administrator for permission, or sign in as another user",
  8: "look at the alarms and sizes in Cluster",
  9: "the cluster refuses this in its present state: see the page Cluster",
  14: "the member has no leader or is stopping; retrying",
  16: "sign in",
};

/** A refused call. `code` is gRPC's, `status` HTTP's; `line` is for people: what is wrong and what to do. */
export class CallError extends Error {
  constructor(message, code, status) {
    super(message);
    this.code = code;
    this.status = status;
  }
  get line() {
    const advice = needsSignIn(this) ? "sign in" : ADVICE[this.code];
    return advice ? `${this.message} – ${advice}` : this.message;
  }
}

/** The member did not answer at all. */
export class LostError extends CallError {
  constructor(message = "the member does not answer") {
    super(message, 14, 0);
  }
}

/** Whether an error means that a user is asked for. */
export const needsSignIn = (error) =>
  error.code === 16 || /user name is empty|invalid auth token|auth token is not provided/i.test(error.message);

/** The line of any error. */
export const lineOf = (error) => error.line ?? error.message ?? String(error);

const listeners = new Set();

/** Hear of every call: `listener(true)` the member answered, `listener(false)` it did not. Returns what stops it. */
export function onReach(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** Tell that the member answered, or did not. */
export function reached(ok) {
  for (const listener of [...listeners]) listener(ok);
}

/** Headers of a request in the name of who is signed in. */
export function headers(more = {}) {
  const session = signedIn.get();
  return session ? { ...more, authorization: session.token } : more;
}

/** Ask, and get the response with its headers; bodies that are refusals raise CallError. */
export async function request(path, { method = "GET", body, signal } = {}) {
  const had = signedIn.get();
  let response;
  try {
    response = await fetch(url(path), {
      method,
      headers: headers(body === undefined ? {} : { "content-type": "application/json" }),
      body,
      signal,
      cache: "no-store",
      redirect: "error",
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    reached(false);
    throw new LostError();
  }
  reached(true);
  if (!response.ok) throw refused(await refusal(response), had);
  return response;
}

function refused(error, had) {
  // A token that ended: the next who looks signs in again.
  if (had && signedIn.get() === had && /invalid auth token/i.test(error.message)) keep(null);
  return error;
}

async function refusal(response) {
  const text = await response.text().catch(() => "");
  try {
    const json = JSON.parse(text);
    const error = json.error && typeof json.error === "object" ? json.error : json;
    return new CallError(error.message ?? error.error ?? text, error.code ?? error.grpc_code ?? 2, response.status);
  } catch {
    const line = text.trim().split("\n")[0].slice(0, 300);
    return new CallError(line || `HTTP ${response.status}`, response.status === 401 ? 16 : 2, response.status);
  }
}

/** Call a unary method of the gateway. `timeoutS` ends it from this side. */
export async function call(path, body = {}, { signal, timeoutS = 15 } = {}) {
  const limit = AbortSignal.timeout(timeoutS * 1000);
  const both = signal ? anyOf(signal, limit) : limit;
  try {
    const response = await request(path, { method: "POST", body: JSON.stringify(body), signal: both });
    return await response.json();
  } catch (error) {
    if (limit.aborted && !signal?.aborted) {
      reached(false); // a frozen member refuses nothing: whether it is lost is asked in another way
      throw new CallError(`no answer in ${timeoutS} s`, 4, 0);
    }
    throw error;
  }
}

function anyOf(...signals) {
  const controller = new AbortController();
  for (const signal of signals) {
    if (signal.aborted) controller.abort(signal.reason);
    else signal.addEventListener("abort", () => controller.abort(signal.reason), { once: true });
  }
  return controller.signal;
}

function get(path, { signal, timeoutS = 10 } = {}) {
  const limit = AbortSignal.timeout(timeoutS * 1000);
  return request(path, { signal: signal ? anyOf(signal, limit) : limit });
}

/** Read a plain JSON page of the member, such as "/ui/about". */
export const getJson = async (path, options) => (await get(path, options)).json();

/** Read a plain text page of the member, such as "/debug/identities". */
export const getText = async (path, options) => (await get(path, options)).text();

/** The lines of a streamed response, as they come. */
export async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const parts = (rest + value).split("\n");
      rest = parts.pop();
      yield* parts;
    }
    if (rest) yield rest;
  } finally {
    reader.cancel().catch(() => {});
  }
}
