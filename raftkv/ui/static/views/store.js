// Questions to the store that views share: pages of keys, many keys at once, and the past of an interval.
//
//     const { items, revision, more } = await range({ prefix: "/a/", limit: 50, descending: true }, scope);
//     const [one, other] = await getAll(["/a/b", "/a/c"], scope);
//     const stop = replay(["/a/", "/a0"], since, { onEvents, onStart, onError }, scope);
//
// `items` are KeyValue objects, as the model's modules take them. Every call ends with the scope of its view.

import { KeyValue, after, base64, prefixEnd } from "../frame/bytes.js";
import { call } from "../frame/call.js";
import { watchRange } from "../frame/watch.js";

const OPERATIONS_MAX = 100;
const OUT_OF_RANGE = 11;

const ALL = "\0";

/** The interval of a range, as the gateway takes it: of a prefix (empty: all keys), from `key` to `end`, or of one key. */
export function interval({ prefix, key, end }) {
  if (prefix === "") return { key: base64(ALL), range_end: base64(ALL) };
  if (prefix !== undefined) return { key: base64(prefix), range_end: base64(prefixEnd(prefix)) };
  return end === undefined ? { key: base64(key) } : { key: base64(key), range_end: base64(end) };
}

/** Read keys: `{ items, revision, more, count }`. `revision`: as of which; 0: the present. */
export async function range(wanted, scope) {
  const { limit = 0, keysOnly = false, revision = 0, descending = false } = wanted;
  const body = { ...interval(wanted), limit: String(limit), keys_only: keysOnly, revision: String(revision) };
  if (descending) Object.assign(body, { sort_order: "DESCEND", sort_target: "KEY" });
  const answer = await call("/v3/kv/range", body, { signal: scope.signal });
  return {
    items: (answer.kvs ?? []).map((one) => new KeyValue(one)),
    revision: Number(answer.header.revision),
    more: Boolean(answer.more),
    count: Number(answer.count ?? 0),
  };
}

/** Read keys (texts, or KeyValue) one by one, a hundred in a call: KeyValue or null, in the order of `keys`. */
export async function getAll(keys, scope) {
  const found = [];
  for (let first = 0; first < keys.length; first += OPERATIONS_MAX) {
    const some = keys.slice(first, first + OPERATIONS_MAX);
    const success = some.map((key) => ({ request_range: { key: key.id ?? base64(key) } }));
    const answer = await call("/v3/kv/txn", { success }, { signal: scope.signal });
    for (const one of answer.responses ?? []) {
      const kv = one.response_range?.kvs?.[0];
      found.push(kv ? new KeyValue(kv) : null);
    }
  }
  return found;
}

/**
 * Read the names of all keys below a prefix, a page at a time, all as of one revision.
 *
 * `onPage(items)` takes a page; `skip(key)` may name the key to go on with instead of the one behind the last.
 * Resolves to `{ revision, isWhole }`: whether `max` keys were enough.
 */
export async function scan(prefix, { onPage, skip = () => null, max, page = 1000 }, scope) {
  const end = prefix ? prefixEnd(prefix) : ALL;
  let key = prefix || ALL;
  let revision = 0;
  for (let seen = 0; seen < max; ) {
    const answer = await range({ key, end, limit: page, keysOnly: true, revision }, scope);
    revision ||= answer.revision;
    onPage(answer.items);
    seen += answer.items.length;
    if (!answer.more) return { revision, isWhole: true };
    const last = answer.items.at(-1);
    key = skip(last.key) ?? after(last.keyBytes);
  }
  return { revision, isWhole: false };
}

/**
 * Every change of an interval from a revision on, for ever, after the keys as they were before it. If some of that was
 * compacted, it begins right behind the compaction: `onStart(since, isComplete)` is called before the first change, and
 * again then.
 */
export function replay([key, end], since, handlers, scope) {
  let stop = () => {};
  const begin = async (from, isComplete) => {
    try {
      const before = await range({ key, end, revision: from - 1 }, scope);
      begun(from, isComplete, before.items);
    } catch (error) {
      if (scope.signal.aborted) return;
      // How far the compaction went is what a watch says.
      if (error.code === OUT_OF_RANGE && isComplete) begun(from, isComplete, []);
      else handlers.onError(error);
    }
  };
  const begun = (from, isComplete, items) => {
    handlers.onStart(from, isComplete);
    handlers.onEvents(items.sort((one, other) => one.mod - other.mod).map((kv) => ({ type: "put", kv })));
    const onCompacted = (revision) => begin(revision + 1, false);
    stop = watchRange(interval({ key, end }), { ...handlers, onCompacted }, { from });
  };
  begin(Math.max(2, since), true);
  scope.on(() => stop());
}

/**
 * Call `onFlood()` once events come faster than a page should take them: `many` a second over some seconds.
 *
 * Returns what to tell the number of events to.
 */
export function floodGate(many, onFlood) {
  const seconds = 3;
  let began = performance.now();
  let sum = 0;
  return (events) => {
    sum += events;
    const passed = (performance.now() - began) / 1000;
    if (sum > many * Math.max(passed, seconds)) onFlood();
    if (passed > seconds) {
      began = performance.now();
      sum = 0;
    }
  };
}
