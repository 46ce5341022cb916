/**
 * Checkpoints: the keys of the registry, their records, and what a page shows of them. Pure.
 *
 * The keys are those of `raftkv.checkpoint.keys`; the words are those of `raftkvctl checkpoint list` and `runs`.
 *
 *     runSummaries(items)                    one row a run and kind, out of the keys below LATEST
 *     checkpointRow(checkpoint, newest, held)
 *     attemptsUnderWay(keys, items, fence)   what is being saved, by whom, how far
 */

import {parseJson, readRecord} from "./records.js";
import {clock, general, size, sorted, span} from "./words.js";

export const ROOT = "/raftkv/checkpoint/";
export const LATEST = `${ROOT}latest/`;
const RANDOM_DIGITS = 100_000;
const STEP = /^[0-9]{12}$/;
const WORDS = {pin: "pinned by", tag: "tag", child: "parent of"};

const REFERENCE = {run_id: ["text"], kind: ["text"], step: ["int"]};
const reference = (value) => (value === null ? null : (readRecord(REFERENCE, value) ?? undefined));
const ATTEMPT_ID = {step: ["int"], generation: ["int"], number: ["int"], kind: ["text"]};
const CHECKPOINT = {
  run_id: ["text"], ...ATTEMPT_ID, world_size: ["int"], uri: ["text"], manifest: ["text"], root: ["text"],
  file_count: ["int"], size_bytes: ["int"], parent: [reference, null], metrics: ["numbers", {}],
  metadata: ["texts", {}], holder: ["text", ""], time: ["float", 0], duration_s: ["float", 0],
};
const ATTEMPT = {
  ...ATTEMPT_ID, world_size: ["int"], uri: ["text"], parent: [reference, null], metadata: ["texts", {}],
  holder: ["text", ""], time: ["float", 0],
};
const EXTREMES = {min_value: ["float"], min_step: ["int"], max_value: ["float"], max_step: ["int"]};
const LATEST_RECORD = {
  step: ["int"], generation: ["int"], count: ["int", 0], size_bytes: ["int", 0],
  best: [(value) => extremes(value), {}], time: ["float", 0],
};
const FENCE = {generation: ["int"], source: ["text"], holder: ["text", ""], time: ["float", 0]};
const HOLD = {holder: ["text", ""], time: ["float", 0]};
const DELETING = {
  uri: ["text"], reason: ["text", ""], time: ["float", 0], manifest: ["text", ""], collector: ["text", ""],
};

function extremes(value) {
  if (typeof value !== "object" || value === null || Array.isArray(value)) return undefined;
  const entries = Object.entries(value).map(([metric, one]) => [metric, readRecord(EXTREMES, one)]);
  return entries.some(([, one]) => one === null) ? undefined : Object.fromEntries(entries);
}

// ---- keys

/** A name as one part of a key, quoted as Python's `urllib.parse.quote` does. */
export function quoted(name) {
  const escape = (sign) => `%${sign.charCodeAt(0).toString(16).toUpperCase()}`;
  return encodeURIComponent(name).replace(/[!'()*]/g, escape);
}

/** The name in a part of a key; what cannot be read is shown as it is. */
export function unquoted(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** A step as part of a key: they sort as numbers do. */
export function stepText(step) {
  return String(step).padStart(12, "0");
}

/** The prefixes and keys of the checkpoints of a run. */
export function registryKeys(run) {
  const base = `${ROOT}run/${quoted(run)}/`;
  return {
    base,
    latest: `${LATEST}${quoted(run)}/`,
    fence: `${base}fence`,
    attempts: `${base}attempt/`,
    records: `${base}record/`,
    recordsOf: (kind) => `${base}record/${kind}/`,
    record: (kind, step) => `${base}record/${kind}/${stepText(step)}`,
    holds: `${base}hold/`,
    holdsOf: (kind, step) => `${base}hold/${kind}/${stepText(step)}/`,
    tags: `${base}tag/`,
    deletings: `${base}deleting/`,
  };
}

/** `<step>.<generation>.<number>` as `{step, generation, number}`; null: it is no attempt. */
export function parseAttempt(text) {
  const [step, generation, number, ...rest] = text.split(".");
  if (rest.length || !STEP.test(step) || !/^[0-9]+$/.test(generation) || !/^[0-9]+$/.test(number)) return null;
  return {step: Number(step), generation: Number(generation), number: Number(number)};
}

/** The revision of the store when an attempt began. */
export function beganRevision(number) {
  return Math.floor(number / RANDOM_DIGITS);
}

/** A committed checkpoint; null: the value is something else. */
export function readCheckpoint(value) {
  return readRecord(CHECKPOINT, parseJson(value));
}

/** Who may write, `{generation, source, holder, time}`; null: it is not claimed yet. */
export function readFence(value) {
  return readRecord(FENCE, parseJson(value));
}

// ---- which runs have some

/** One row a run and kind, in the order of keys; those that cannot be read are left out. */
export function runSummaries(items) {
  const found = [];
  for (const item of items) {
    const [run, kind] = item.key.slice(LATEST.length).split("/");
    const latest = readRecord(LATEST_RECORD, parseJson(item.value));
    if (latest) found.push({run: unquoted(run), kind, latest});
  }
  return found;
}

/** The cells of `raftkvctl checkpoint runs`. */
export function summaryRow({run, kind, latest}) {
  const best = sorted(Object.keys(latest.best)).map((name) => {
    const one = latest.best[name];
    return `${name} ${general(one.min_value)} ${general(one.max_value)}`;
  });
  const {step, time, count, size_bytes} = latest;
  return [run, kind, String(step), clock(time), String(count), size(size_bytes), best.join(", ")];
}

// ---- the checkpoints of a run

/** `accuracy 0.5, loss 0.25`. */
export function metricsText(metrics) {
  return sorted(Object.keys(metrics)).map((name) => `${name} ${general(metrics[name])}`).join(", ");
}

/**
 * Why checkpoints must stay: kind and step, as `dcp 100`, to what holds it as `{why, name, lease, holder, time, text}`.
 *
 * @param {object} keys of the run.
 * @param {Iterable<object>} items the keys below `keys.holds`.
 */
export function holdsByCheckpoint(keys, items) {
  const held = new Map();
  for (const item of items) {
    const [kind = "", step = "", why = "", ...rest] = item.key.slice(keys.holds.length).split("/");
    const name = unquoted(rest.join("/"));
    const shown = why === "pin" && name.includes("@") ? name.slice(0, name.lastIndexOf("@")) : name;
    const {holder, time} = readRecord(HOLD, parseJson(item.value)) ?? {holder: "unknown", time: 0};
    const text = `${Object.hasOwn(WORDS, why) ? WORDS[why] : why} ${shown}`;
    const place = `${kind} ${Number(step)}`;
    held.set(place, [...(held.get(place) ?? []), {why, name: shown, lease: item.lease, holder, time, text}]);
  }
  return held;
}

/**
 * The cells of `raftkvctl checkpoint list`.
 *
 * @param {object} one the checkpoint.
 * @param {boolean} isLatest whether it is the newest of its kind.
 * @param {object[]} held as `holdsByCheckpoint` gives it.
 */
export function checkpointRow(one, isLatest, held = []) {
  return [
    String(one.step), one.kind, String(one.generation), String(one.world_size), String(one.file_count),
    size(one.size_bytes), clock(one.time), span(one.duration_s), metricsText(one.metrics),
    [...(isLatest ? ["latest"] : []), ...held.map((hold) => hold.text)].join(", "),
  ];
}

/** The tags of a run: `{name, on: {run_id, kind, step}}`, by name. */
export function tagsOf(keys, items) {
  return [...items]
    .map((item) => ({name: unquoted(item.key.slice(keys.tags.length)), on: reference(parseJson(item.value) ?? null)}))
    .filter((tag) => tag.on);
}

/**
 * What is being saved: `{step, kind, generation, prepared, worldSize, holder, time, isStale}`, the newest first.
 *
 * @param {object} keys of the run.
 * @param {Iterable<object>} items the keys below `keys.attempts`; of those of ranks the values are not needed.
 * @param {object|null} fence who may write: an attempt of an earlier claim waits for a takeover.
 */
export function attemptsUnderWay(keys, items, fence) {
  const heads = [];
  const prepared = new Map();
  for (const item of items) {
    const [kind, attempt, ...rest] = item.key.slice(keys.attempts.length).split("/");
    const place = `${kind}/${attempt}`;
    if (rest[0] === "rank") prepared.set(place, (prepared.get(place) ?? 0) + 1);
    const head = rest.join("/") === "head" ? readRecord(ATTEMPT, parseJson(item.value)) : null;
    if (head) heads.push({place, head});
  }
  return heads
    .map(({place, head}) => ({
      step: head.step, kind: head.kind, generation: head.generation, prepared: prepared.get(place) ?? 0,
      worldSize: head.world_size, holder: head.holder, time: head.time,
      isStale: fence !== null && head.generation < fence.generation,
    }))
    .sort((one, other) => other.step - one.step || other.generation - one.generation);
}

/** What is about to be deleted: `{step, kind, uri, reason, time}`. */
export function deletionsUnderWay(keys, items) {
  return [...items].flatMap((item) => {
    const [kind, attempt] = item.key.slice(keys.deletings.length).split("/");
    const id = parseAttempt(attempt ?? "");
    const record = readRecord(DELETING, parseJson(item.value));
    return id && record ? [{step: id.step, kind, uri: record.uri, reason: record.reason, time: record.time}] : [];
  });
}

/** The cells of `raftkvctl checkpoint show`: a name and a value each. */
export function details(one, held = []) {
  const ranks = `${one.world_size} rank${one.world_size === 1 ? "" : "s"}`;
  const lines = [
    ["uri", one.uri],
    ["kind", one.kind],
    ["attempt", `generation ${one.generation}, number ${one.number}`],
    ["saved by", `${ranks}, ${one.holder}`],
    ["files", `${one.file_count}, ${size(one.size_bytes)} (${one.size_bytes} bytes)`],
    ["committed", `${clock(one.time)}, ${span(one.duration_s)} after its start`],
    ["manifest", one.manifest],
    ["root", one.root],
  ];
  if (one.parent) lines.push(["descends from", `${one.parent.run_id}@${one.parent.step} (${one.parent.kind})`]);
  for (const name of sorted(Object.keys(one.metrics))) lines.push(["metric", `${name} ${general(one.metrics[name])}`]);
  for (const name of sorted(Object.keys(one.metadata))) lines.push(["metadata", `${name}=${one.metadata[name]}`]);
  return [...lines, ...held.map((hold) => ["kept as", hold.text])];
}

// ---- what descends from what

/** The cells of `raftkvctl checkpoint lineage`. */
export function lineageRow(one) {
  return [one.run_id, String(one.step), one.kind, clock(one.time), size(one.size_bytes), metricsText(one.metrics)];
}

/** The checkpoints of other runs that descend from one, out of its holds: `{run_id, kind, step}`. */
export function childrenOf(held = []) {
  return held.flatMap((hold) => {
    const [step, kind, ...run] = hold.name.split("@").reverse();
    const isChild = hold.why === "child" && run.length > 0 && /^[0-9]+$/.test(step);
    return isChild ? [{run_id: run.reverse().join("@"), kind, step: Number(step)}] : [];
  });
}
