// The member's live figures: one server-sent stream for the whole page, `/ui/live`, a record a second.
//
//     const stop = live((record) => {...});     // the last record at once, if there is one
//     history("me.puts_per_s")                   // up to two minutes of one figure, the newest last; null: unknown
//
// The stream is open while a view listens and the page is seen. One that is silent is given up: a member that is frozen,
// or behind a network that drops all, ends nothing, and the page would go on showing figures of then.

import { CallError, LostError, lines, reached, request } from "./call.js";
import { signedIn } from "./session.js";

export const RECORDS_MAX = 120;
const PAUSES_MS = [300, 1000, 2000, 4000];
const HIDDEN_MS = 15_000;
const SILENT_MS = 6000;

const listeners = new Set();
const records = [];
let controller = null; // of the stream; null: there is none, and the next listener opens one
let attempt = 0;
let opening = null;
let closing = null;
let refusal = null;

/** Hear of each record; `onError(error)` if the member refuses. Returns what stops it. */
export function live(onRecord, onError = () => {}) {
  const listener = { onRecord, onError };
  listeners.add(listener);
  const last = lastRecord();
  if (last) onRecord(last);
  if (refusal) onError(refusal);
  clearTimeout(closing);
  if (!controller) open();
  return () => {
    listeners.delete(listener);
    if (!listeners.size) closeIn(3000); // the next view listens in a moment
  };
}

/** The last record, or null. */
export const lastRecord = () => records.findLast((record) => record !== null) ?? null;

/** The course of one figure, by its path in the record; `find` may be a function of a record instead. */
export function history(find) {
  const get = typeof find === "function" ? find : (record) => at(record, find);
  return records.map((record) => (record ? (get(record) ?? null) : null));
}

const at = (record, path) => path.split(".").reduce((value, name) => value?.[name], record);

function closeIn(ms) {
  clearTimeout(closing);
  closing = setTimeout(() => {
    if (!listeners.size || document.hidden) abandon();
  }, ms);
}

function abandon() {
  clearTimeout(opening);
  controller?.abort();
  controller = null;
}

async function open() {
  abandon();
  const mine = (controller = new AbortController());
  let silence = null;
  const heard = () => {
    clearTimeout(silence);
    silence = setTimeout(() => mine.abort(), SILENT_MS);
  };
  heard();
  try {
    const response = await request("/ui/live", { signal: mine.signal });
    refusal = null;
    for await (const line of lines(response)) {
      if (mine.signal.aborted) break;
      heard();
      if (line.startsWith("data:")) take(JSON.parse(line.slice(5)));
    }
    throw new LostError();
  } catch (error) {
    if (controller !== mine) return; // it was given up by this page
    controller = null;
    if (error instanceof CallError && !(error instanceof LostError) && error.code !== 14) {
      refusal = error;
      for (const { onError } of [...listeners]) onError(error);
      return;
    }
    reached(false);
  } finally {
    clearTimeout(silence);
  }
  records.push(null); // a gap in the curves
  if (listeners.size) opening = setTimeout(open, PAUSES_MS[Math.min(attempt++, PAUSES_MS.length - 1)]);
}

function take(record) {
  attempt = 0;
  reached(true);
  records.push(record);
  if (records.length > RECORDS_MAX) records.splice(0, records.length - RECORDS_MAX);
  for (const { onRecord } of [...listeners]) onRecord(record);
}

document.addEventListener("visibilitychange", () => {
  clearTimeout(closing);
  if (document.hidden) closeIn(HIDDEN_MS);
  else if (listeners.size && !controller) open();
});
signedIn.on(() => {
  if (listeners.size) open();
});
