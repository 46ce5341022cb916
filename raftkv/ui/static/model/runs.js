/**
 * Training runs: which there are, what their keys hold, and one run as it is now. Pure.
 *
 * The keys are those of `raftkv.training.records`; the words are those of `raftkvctl run list` and `run show`.
 *
 *     listRuns(items)                one row a run
 *     readChange(run, item, false)   a change of one key, for the fold of `timeline.js`
 *     describe(history, ...)         who is in, which rank, who waits and why
 */

import {listOf, parseJson, readRecord, shownText, textOf} from "./records.js";
import {clock, count, sorted} from "./words.js";

export const ROOT = "/raftkv/train/";
const RUN_KEY = /^(.+?)\/(?:state|round|node\/[^/]+)$/s;
const INNER = /^\/(?:boot|deny|fault|node|store|strike|sync)\//;
const PHASES = ["gathering", "running", "broken", "closed"];
const RUN_ID_MAX = 200;
const FAULTS_SHOWN = 5;
const UTF8 = new TextEncoder();

const GENERATION = ["int", undefined, "epoch"];
const MEMBER = {
  id: ["text"], host: ["text"], address: ["text", ""], slots: ["int", 1], topology: ["text", ""],
};
const LAYOUTS = {
  node: {
    ...MEMBER, want: ["int", 1], running: ["int", 0], min_nodes: ["int", 1], max_nodes: ["int", 1],
    data: ["texts", {}], time: ["float", 0],
  },
  round: {generation: GENERATION, members: [listOf(MEMBER), []], time: ["float", 0]},
  state: {
    generation: GENERATION, phase: [(value) => (PHASES.includes(value) ? value : undefined)], reason: ["text", ""],
    cause: ["text", ""], node: ["text", ""], joined: ["int", 0], min_nodes: ["int", 1], max_nodes: ["int", 1],
    time: ["float", 0], waits_for: ["text", ""], left_out: ["texts", {}],
  },
  fault: {
    generation: GENERATION, node: ["text"], host: ["text", ""], rank: ["int", -1], cause: ["text", "exit"],
    exit_code: ["int", 0], signal: ["text", ""], message: ["text", ""], time: ["float", 0],
  },
};
export const NO_STATE = {
  generation: 0, phase: "gathering", reason: "", cause: "", node: "", joined: 0, min_nodes: 1, max_nodes: 1, time: 0,
  waits_for: "", left_out: {},
};

/** The interval that the history of a run is made of: from `arbiter` to `state`. */
export function intervalOf(run) {
  return [`${ROOT}${run}/arbiter`, `${ROOT}${run}/state\0`];
}

/**
 * A change of one key of a run; null: history is not made of that key, or it holds something else.
 *
 * @param {string} run its id.
 * @param {object} item as `itemOf` gives it.
 * @param {boolean} deleted whether the change is its deletion.
 */
export function readChange(run, item, deleted) {
  const [kind, ...rest] = item.key.slice(ROOT.length + run.length + 1).split("/");
  const isHead = kind === "round" && rest.length > 0; // for nodes alone: `round` has all of it
  if (isHead || (!(kind in LAYOUTS) && !["arbiter", "boot", "deny"].includes(kind))) return null;
  const change = {revision: item.mod, kind, name: rest.join("/"), content: null};
  if (deleted) return change;
  change.content = kind in LAYOUTS ? readRecord(LAYOUTS[kind], parseJson(item.value)) : textOf(item.value);
  return change.content === null ? null : change;
}

// ---- which there are

/**
 * Nodes by run, from the names of keys below `ROOT`. The keys inside a run are its users' own: no runs are in it.
 * No run has a longer id, and each part of a name is looked up.
 */
export function countNodes(names) {
  const isId = (run) => run !== undefined && UTF8.encode(run).length <= RUN_ID_MAX;
  const found = names.map((name) => [RUN_KEY.exec(name)?.[1], name]).filter(([run]) => isId(run));
  const runs = new Set(found.map(([run]) => run));
  const isInside = (run) => {
    const parts = run.split("/");
    return parts.some((_, size) => {
      const outer = parts.slice(0, size).join("/");
      return size > 0 && runs.has(outer) && INNER.test(run.slice(outer.length));
    });
  };
  const nodes = new Map(sorted([...runs].filter((run) => !isInside(run))).map((run) => [run, 0]));
  for (const [run, name] of found) {
    if (nodes.has(run) && name.startsWith(`${run}/node/`)) nodes.set(run, nodes.get(run) + 1);
  }
  return nodes;
}

/** Whether a key below `ROOT` says something of the list of runs: its run's state, or one of its nodes. */
export function isListed(key) {
  return RUN_KEY.test(key.slice(ROOT.length));
}

/**
 * Every run in one row, by id.
 *
 * @param {Iterable<object>} items keys below `ROOT` that `isListed` admits.
 */
export function listRuns(items) {
  const byKey = new Map([...items].map((item) => [item.key, item]));
  return [...countNodes([...byKey.keys()].map((key) => key.slice(ROOT.length)))].map(([run, nodes]) => {
    const stored = byKey.get(`${ROOT}${run}/state`);
    const state = (stored && readRecord(LAYOUTS.state, parseJson(stored.value))) || NO_STATE;
    return {run, nodes, state, isDead: state.phase !== "closed" && nodes === 0};
  });
}

/** The cells of `raftkvctl run list`. */
export function runRow({run, nodes, state, isDead}) {
  const limits = `${state.min_nodes}:${state.max_nodes}`;
  const phase = isDead ? `${state.phase}, no nodes` : state.phase;
  return [run, phase, String(state.generation), String(nodes), limits, clock(state.time), state.reason];
}

// ---- ranks and faults in words

/** The lowest rank of each member. */
export function firstRanks(members) {
  let total = 0;
  return members.map((member) => {
    total += member.slots;
    return total - member.slots;
  });
}

/** `3`, or `4-7`. */
export function ranksText(first, slots) {
  return slots === 1 ? String(first) : `${first}-${first + slots - 1}`;
}

/** What went wrong, in one line. */
export function faultText(fault) {
  const host = fault.host || fault.node;
  const what = fault.rank >= 0 ? `rank ${fault.rank} on ${host}` : `node ${host}`;
  const how = {exit: `exited with ${fault.exit_code}`, signal: `was killed by ${fault.signal || "a signal"}`};
  const line = `${what} ${Object.hasOwn(how, fault.cause) ? how[fault.cause] : fault.cause}`;
  return fault.message ? `${line}: ${fault.message}` : line;
}

// ---- one run as it is

/**
 * Who is in a run, who waits and why, and what else there is to say.
 *
 * @param {object} history of `Fold.history`.
 * @param {{denied?: object[], queue?: object|null}} beside hosts that are left out as `{host, reason, seconds_left}`,
 *   and the run's place in the cluster whose slots it shares as `{cluster, waits, reason}`.
 */
export function describe(history, {denied = [], queue = null} = {}) {
  const state = history.state ?? NO_STATE;
  const current = state.phase === "running" ? history.round : null;
  const firsts = firstRanks(current?.members ?? []);
  const ids = new Set(current?.members.map((member) => member.id));
  const reasons = new Map(denied.map((one) => [one.host, one]));
  return {
    run: history.run_id,
    state,
    members: firsts.map((rank, place) => ({rank, ...current.members[place]})),
    waiting: history.present
      .filter((node) => !ids.has(node.id))
      .map((node) => ({...node, why: whyWaits(history, state, node, reasons.get(node.host), queue)})),
    faults: history.generations.flatMap((generation) => generation.faults).slice(-FAULTS_SHOWN),
    denied,
    queue,
    headline: headline(history, state),
  };
}

function headline(history, state) {
  let text = `run ${history.run_id}: ${state.phase}`;
  if (state.phase === "running" && history.round) {
    const {members} = history.round;
    const ranks = members.reduce((sum, member) => sum + member.slots, 0);
    text += `, generation ${state.generation}: ${count(members.length, "node")}, ${count(ranks, "rank")}`;
  } else if (state.generation) {
    text += ` after generation ${state.generation}`;
  }
  const present = history.present.length;
  if (!present) return state.phase === "closed" ? text : `${text}; no node is left`;
  return `${text}; ${count(present, "node")} present, ${wantedText(state)}`;
}

/** How many nodes a run takes: `2 wanted`, or `3 to 4 wanted`. */
export function wantedText({min_nodes, max_nodes}) {
  return min_nodes === max_nodes ? `${min_nodes} wanted` : `${min_nodes} to ${max_nodes} wanted`;
}

function whyWaits(history, state, node, denied, queue) {
  if (state.phase === "closed") return "the run is closed";
  const theirs = `${node.min_nodes}:${node.max_nodes}`;
  const ours = `${state.min_nodes}:${state.max_nodes}`;
  if (theirs !== ours) return `was started with ${theirs} nodes, the run has ${ours}`;
  if (denied) return `denied for ${denied.seconds_left} s more: ${denied.reason}`;
  const last = history.round;
  if (state.phase === "broken" && last && node.want <= last.generation) {
    if (last.members.some((member) => member.id === node.id)) {
      return `stopping its workers of generation ${last.generation}`;
    }
  }
  if (state.phase === "running") {
    const isFull = last !== null && last.members.length >= state.max_nodes;
    return isFull ? `standby: all ${state.max_nodes} places are taken` : "about to join";
  }
  if (history.present.length < state.min_nodes) {
    return `waiting for the minimum: ${history.present.length} of ${state.min_nodes} nodes are present`;
  }
  if (queue?.waits) return `waiting for admission to cluster ${queue.cluster}: ${queue.reason}`;
  return state.phase === "broken"
    ? "waiting for the other members to come back"
    : "waiting for more nodes to come";
}

/** Why a host is left out: the record of its denial, or the text of an operator. */
export function denialReason(host, value) {
  const record = readRecord(
    {host: ["text"], run: ["text", ""], reason: ["text", ""], cooldown_s: ["int", 0], time: ["float", 0]},
    parseJson(value),
  );
  if (record) return record.reason;
  const text = shownText(value);
  return `host ${host} is left out${text ? ": " : ""}${text}`;
}
