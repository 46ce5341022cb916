// Keys that stay as they are in the store: read once, then watched from the next revision on.
//
//     const stop = watchPrefix("/app/", {
//       onSnapshot(kvs, { revision, more, count }) {...},    // first, and again after a compaction that was missed
//       onEvents(events, revision) {...},                    // [{ type: "put" | "delete", kv }] in order
//       onError(error) {...},                                // refused; the watch has ended
//       onCompacted(revision) {...},                         // optional: instead of reading anew; the watch has ended
//     });
//
// All watches of the page share ONE /v3/watch stream (browsers allow six connections an origin over HTTP/1.1; the live
// figures take a second one, and calls need room): a request body has one create_request for each, under its own
// watch_id. When one comes or goes the stream is opened anew, each from its own next revision, so nothing is lost or
// seen twice; so it is after an error, and after the page was hidden (hidden pages hold no stream).

import { KeyValue, base64, prefixEnd, bytes } from "./bytes.js";
import { CallError, LostError, call, lines, lineOf, reached, request } from "./call.js";
import { perFrame } from "./dom.js";
import { keep, signedIn } from "./session.js";

const LIMIT = 5000;
const HIDDEN_MS = 15_000;
const PAUSES_MS = [100, 400, 1000, 2000, 4000];

class Watched {
  constructor(id, range, handlers, options) {
    this.id = id;
    this.range = range;
    this.handlers = handlers;
    this.limit = options.limit ?? LIMIT;
    this.keysOnly = options.keysOnly ?? false;
    this.next = options.from ?? 0;
    this.isHistory = options.isHistory ?? false;
    this.ended = false;
    this.controller = new AbortController();
  }

  /** Read the present; then `next` is where watching begins. */
  async list() {
    for (let attempt = 0; !this.ended; attempt++) {
      try {
        const answer = await call(
          "/v3/kv/range",
          { ...this.range, limit: String(this.limit), keys_only: this.keysOnly },
          { signal: this.controller.signal },
        );
        if (this.ended) return;
        const revision = Number(answer.header.revision);
        this.next = revision + 1;
        const kvs = (answer.kvs ?? []).map((one) => new KeyValue(one));
        this.handlers.onSnapshot?.(kvs, { revision, more: Boolean(answer.more), count: Number(answer.count ?? 0) });
        return;
      } catch (error) {
        if (this.ended) return;
        if (!passes(error)) {
          this.fail(error);
          return;
        }
        await pause(attempt);
      }
    }
  }

  fail(error) {
    if (this.ended) return;
    this.end();
    this.handlers.onError?.(error);
  }

  end() {
    this.ended = true;
    this.controller.abort();
    stream.remove(this);
  }
}

const passes = (error) => error instanceof LostError || error.code === 14 || error.code === 4;

const pause = (attempt) =>
  new Promise((resume) => setTimeout(resume, PAUSES_MS[Math.min(attempt, PAUSES_MS.length - 1)]));

/** The one stream of this page. */
const stream = {
  watched: new Map(),
  asked: [],
  controller: null,
  attempt: 0,
  timer: null,

  add(one) {
    this.watched.set(one.id, one);
    this.reopen(20);
  },

  remove(one) {
    if (this.watched.delete(one.id) && this.watched.size === 0) this.close();
    // A stream that still brings events of one that ended is harmless: they are dropped.
  },

  close() {
    clearTimeout(this.timer);
    this.timer = null;
    this.controller?.abort();
    this.controller = null;
  },

  reopen(delayMs) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.run(), delayMs);
  },

  async run() {
    this.close();
    if (!this.watched.size || hidden) return;
    const controller = (this.controller = new AbortController());
    try {
      await this.read(controller);
    } catch (error) {
      if (controller.signal.aborted) return;
      if (!passes(error) && error instanceof CallError) {
        for (const one of [...this.watched.values()]) one.fail(error);
        return;
      }
      reached(false);
    }
    if (this.controller === controller && !controller.signal.aborted) {
      this.reopen(PAUSES_MS[Math.min(this.attempt++, PAUSES_MS.length - 1)]);
    }
  },

  async read(controller) {
    // The member confirms watches in the order in which they were asked for; those that it refuses have no id there.
    this.asked = [...this.watched.keys()];
    const creates = [...this.watched.values()].map((one) =>
      JSON.stringify({ create_request: { ...one.range, watch_id: String(one.id), start_revision: String(one.next) } }),
    );
    const response = await request("/v3/watch", {
      method: "POST",
      body: creates.join("\n"),
      signal: controller.signal,
    });
    for await (const line of lines(response)) {
      if (controller.signal.aborted) return;
      if (line.trim()) this.take(JSON.parse(line));
    }
    if (!controller.signal.aborted) throw new LostError("the watch ended");
  },

  take(message) {
    if (message.error) {
      const error = message.error;
      throw new CallError(error.message, error.grpc_code ?? error.code ?? 2, error.http_code ?? 0);
    }
    const result = message.result;
    const one = this.watched.get(result.created ? this.asked.shift() : Number(result.watch_id ?? 0));
    if (!one) return;
    if (result.canceled) {
      this.canceled(one, result);
      return;
    }
    this.attempt = 0;
    const events = (result.events ?? []).map((event) => ({
      type: event.type === "DELETE" ? "delete" : "put",
      kv: new KeyValue(event.kv),
    }));
    // What a stream that was opened anew brings twice was seen before.
    const fresh = events.filter((event) => event.kv.mod >= one.next);
    if (!fresh.length) return;
    one.next = fresh.at(-1).kv.mod + 1;
    one.handlers.onEvents?.(fresh, Number(result.header.revision));
  },

  canceled(one, result) {
    const compacted = Number(result.compact_revision ?? 0);
    if (compacted > 0 && one.isHistory) {
      // The compacted revision itself is there yet, in a member that keeps it.
      one.next = one.next < compacted ? compacted : compacted + 1;
      this.reopen(0);
      return;
    }
    if (compacted > 0) {
      this.watched.delete(one.id);
      if (one.handlers.onCompacted) {
        one.end();
        one.handlers.onCompacted(Number(result.compact_revision));
        return;
      }
      one.next = 0;
      start(one);
      return;
    }
    const reason = result.cancel_reason || "the member ended this watch";
    one.fail(new CallError(reason, /permission denied/.test(reason) ? 7 : 2, 0));
    // A token that ended, as with a member that was started again: the next who looks signs in again.
    if (/invalid auth token/.test(reason)) keep(null);
  },
};

async function start(one) {
  if (!one.next) await one.list();
  if (!one.ended && one.next) stream.add(one);
}

let ids = 0;

/** Watch a range: `{ key, range_end }` in base64, as in a RangeRequest. Returns what stops it.
 *
 *  `options`: `limit` of the first list, `keysOnly`; `from`, a revision: nothing is read first, and with `isHistory` what
 *  was compacted since is left out.
 */
export function watchRange(range, handlers, options = {}) {
  const one = new Watched(++ids, range, handlers, options);
  start(one);
  return () => one.end();
}

/** Watch all keys that begin with a prefix (text, or bytes). `options`: `limit` of the first list, `keysOnly`. */
export function watchPrefix(prefix, handlers, options = {}) {
  const key = typeof prefix === "string" ? bytes(prefix) : prefix;
  // An empty prefix is all keys: from the zero byte on.
  const range = key.length
    ? { key: base64(key), range_end: base64(prefixEnd(key)) }
    : { key: base64(Uint8Array.of(0)), range_end: base64(Uint8Array.of(0)) };
  return watchRange(range, handlers, options);
}

/** Watch one key. */
export const watchKey = (key, handlers, options = {}) =>
  watchRange({ key: base64(typeof key === "string" ? bytes(key) : key) }, handlers, options);

/** Keep a copy of all keys below a prefix: `onChange(map, { first, more, error, revision })` at most once a frame.
 *
 *  `map` is a Map of `kv.key` (text) to KeyValue, in order of keys at first, then of arrival. Returns what stops it.
 */
export function watchMap(prefix, onChange, options = {}) {
  const map = new Map();
  const state = { first: true, more: false, error: null, revision: 0 };
  const tell = perFrame(() => {
    if (ended) return;
    onChange(map, { ...state });
    state.first = false;
  });
  let ended = false;
  const stop = watchPrefix(
    prefix,
    {
      onSnapshot(kvs, { more, revision }) {
        map.clear();
        for (const kv of kvs) map.set(kv.key, kv);
        Object.assign(state, { more, revision });
        tell();
      },
      onEvents(events, revision) {
        for (const { type, kv } of events) {
          if (type === "put") map.set(kv.key, kv);
          else map.delete(kv.key);
        }
        state.revision = revision;
        tell();
      },
      onError(error) {
        state.error = error;
        state.line = lineOf(error);
        tell();
      },
    },
    options,
  );
  return () => {
    ended = true;
    stop();
  };
}

let hidden = false;
let hiding = null;

if (typeof document !== "undefined" && document.addEventListener) {
  document.addEventListener("visibilitychange", () => {
    clearTimeout(hiding);
    if (document.hidden) {
      hiding = setTimeout(() => {
        hidden = true;
        stream.close();
      }, HIDDEN_MS);
    } else if (hidden) {
      hidden = false;
      stream.reopen(0);
    }
  });
  // What another user may see is another thing: the stream is opened in the new name.
  signedIn.on(() => stream.reopen(0));
}
