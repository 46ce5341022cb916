/**
 * What happened in a run: its changes folded into generations, nodes and faults. Pure; the twin of
 * `raftkv.training.history`, whose words `raftkvctl run timeline` prints.
 *
 *     const fold = new Fold("job");
 *     for (const change of changes) fold.apply(change);       // in the order of revisions
 *     generationRows(fold.history())
 *
 * A duration between the clocks of two writers says that it is approximate.
 */

import {faultText, firstRanks, ranksText} from "./runs.js";
import {clock, duration, sorted} from "./words.js";

const MEMBERS_SHOWN = 8;
const NEVER = 9;
const STOPPED = ["SIGTERM", "SIGINT", "SIGHUP"];
const STOPPED_CODES = [128 + 15, 128 + 2, 128 + 1];
const LOST = ["heartbeat lost", "disconnected", "partition"];
const PEER_WORDS = [
  "connection closed by peer", "connection reset by peer", "connection refused", "broken pipe", "socket closed",
  "ncclremoteerror", "ncclsystemerror", "nccl communicator was aborted", "watchdog caught collective",
  "gloo", "distbackenderror", "distnetworkerror", "timed out waiting",
];

/** Seconds between two stamps, never negative. */
export function between(start, end) {
  const seconds = end.time - start.time;
  return {seconds: Math.max(seconds, 0), approximate: start.writer !== end.writer || seconds < 0};
}

// ---- whose fault it was

function speaksOfPeer(fault) {
  const isWeak = fault.cause === "exit" || fault.signal === "SIGABRT";
  return isWeak && PEER_WORDS.some((word) => fault.message.toLowerCase().includes(word));
}

/** How weak a hint a fault is: see `root_cause` in `raftkv.training.scheduling.denylist`. */
function weakness(fault) {
  if (fault.cause === "out of memory") return 0;
  if (fault.cause === "signal" && !STOPPED.includes(fault.signal)) {
    return fault.signal === "SIGABRT" ? 3 + speaksOfPeer(fault) : 1;
  }
  if (LOST.includes(fault.cause)) return 2;
  if (fault.cause === "exit" && !STOPPED_CODES.includes(fault.exit_code)) return 3 + speaksOfPeer(fault);
  return NEVER;
}

/** The fault that ended a generation: the one that the others follow from; null: none was reported. */
export function rootFault(generation) {
  let found = null;
  for (const fault of generation.faults) {
    const own = weakness(fault);
    if (own < NEVER && (found === null || own < weakness(found))) found = fault;
  }
  const isNamed = (fault) => fault.node === generation.node && ["", fault.cause].includes(generation.cause);
  return found ?? generation.faults.find(isNamed) ?? generation.faults[0] ?? null;
}

// ---- change by change

/** A run, change by change. */
export class Fold {
  #told = new WeakMap(); // the faults of each generation, as texts

  /** @param {string} run its id. */
  constructor(run) {
    this.run = run;
    this.state = this.round = null;
    this.arbiter = "";
    this.generations = [];
    this.nodes = new Map();
    this.present = new Map();
    this.boots = new Map();
    this.denied = new Map();
    this.revision = 0;
  }

  /** Take one change, as `readChange` gives it. */
  apply(change) {
    const {kind, content} = change;
    this.revision = Math.max(this.revision, change.revision);
    if (kind === "arbiter") this.arbiter = content ?? "";
    else if (kind === "node") this.#applyNode(change);
    else if (kind === "boot" || kind === "deny") this.#setText(kind === "boot" ? this.boots : this.denied, change);
    else if (content === null) this.#forget(kind);
    else if (kind === "round") this.#begin(content, change.revision);
    else if (kind === "state") this.#setState(content, change.revision);
    else this.#addFault(content);
  }

  /** The run that the changes so far have led to. */
  history({sinceRevision = 0, complete = true} = {}) {
    return {
      run_id: this.run,
      revision: this.revision,
      since_revision: sinceRevision,
      complete,
      generations: this.generations,
      nodes: [...this.nodes.values()].sort((one, other) => one.joined.revision - other.joined.revision),
      state: this.state,
      round: this.round,
      present: [...this.present.values()],
      arbiter: this.arbiter,
      boot: this.boots.get(String(this.round?.generation ?? 0)) ?? "",
      denied: sorted(this.denied.keys()),
    };
  }

  #setText(texts, {name, content}) {
    if (content === null) texts.delete(name);
    else texts.set(name, content);
  }

  /** The run was deleted: what comes now is another one of that id. */
  #forget(kind) {
    if (kind === "fault") return;
    this.state = this.round = null;
    this.generations = [];
  }

  #applyNode({name, content, revision}) {
    if (content !== null) {
      this.present.set(name, content);
      const {id, host, address, slots, time} = content;
      const first = {id, host, address, slots, joined: {time, writer: id, revision}};
      // One that registers anew, after its lease was lost, is the same node.
      this.nodes.set(name, {...(this.nodes.get(name) ?? first), left_revision: 0, cause: ""});
    } else if (this.present.delete(name)) {
      const cause = this.state?.node === name ? this.state.cause : "";
      this.nodes.set(name, {...this.nodes.get(name), left_revision: revision, cause});
    }
  }

  #begin(content, revision) {
    // The run has ended, and its record has no members.
    if (!content.members.length && this.round?.generation === content.generation) return;
    const began = {time: content.time, writer: this.arbiter, revision};
    const last = this.generations.at(-1);
    if (last) {
      last.ended ??= began;
      last.recovery = last.closed ? null : between(last.ended, began);
    }
    this.round = content;
    this.generations.push({
      generation: content.generation, members: content.members, began, ended: null, reason: "", cause: "", node: "",
      closed: false, faults: [], recovery: null, commits: [], lost: null,
    });
  }

  #setState(content, revision) {
    this.state = content;
    const gone = this.nodes.get(content.node);
    if (gone?.left_revision && !gone.cause) gone.cause = content.cause;
    const isOver = content.phase === "broken" || content.phase === "closed";
    const last = this.generations.at(-1);
    if (!last || !isOver || content.generation !== last.generation) return;
    const closed = content.phase === "closed";
    if (last.ended !== null) {
      last.closed ||= closed;
      return;
    }
    // Any node may close a run, and the state names it. All else is written by the arbiter.
    const {reason, cause, node, time} = content;
    const ended = {time, writer: closed ? node : this.arbiter, revision};
    Object.assign(last, {ended, reason, cause, node, closed});
  }

  #addFault(fault) {
    const same = JSON.stringify(fault);
    for (const generation of this.generations) {
      if (generation.generation !== fault.generation) continue;
      const told = this.#told.get(generation) ?? new Set();
      if (!told.has(same)) generation.faults.push(fault);
      this.#told.set(generation, told.add(same));
    }
  }
}

// ---- in words

/** From the beginning of a generation to its end; null: it goes on. */
export function lasted(generation) {
  return generation.ended && between(generation.began, generation.ended);
}

/** `a (rank 0), b (ranks 1-2)`; of many only the first. */
export function membersText(members) {
  const firsts = firstRanks(members);
  const shown = members
    .slice(0, MEMBERS_SHOWN)
    .map((one, place) => `${one.host} (rank${one.slots > 1 ? "s" : ""} ${ranksText(firsts[place], one.slots)})`);
  const more = members.length - MEMBERS_SHOWN;
  return shown.join(", ") + (more > 0 ? ` and ${more} more` : "");
}

/** Why a generation ended: its root cause if that is known. */
export function endText(generation) {
  if (generation.closed) return generation.reason ? `closed: ${generation.reason}` : "closed";
  const root = rootFault(generation);
  return root ? faultText(root) : generation.reason || generation.cause;
}

/** `3: steps 100 to 300`; empty: it has committed nothing. */
export function commitsText(generation) {
  const steps = [...new Set(generation.commits.map((commit) => commit.step))].sort((one, other) => one - other);
  if (steps.length < 2) return steps.length ? `1: step ${steps[0]}` : "";
  return `${generation.commits.length}: steps ${steps[0]} to ${steps.at(-1)}`;
}

/** What the end of a generation cost in work. */
export function lostText(lost) {
  if (!lost) return "";
  const from = lost.kept_step === null ? "the beginning" : `step ${lost.kept_step}`;
  const told = [`${duration(lost.since)} since ${from}`];
  if (lost.steps_estimated !== null) told.push(`up to ~${lost.steps_estimated} steps`);
  if (lost.steps_at_least) told.push(`at least ${lost.steps_at_least}`);
  return told.join(", ");
}

/** The generations of a run as a table: `{header, rows}`. */
export function generationTable(history) {
  const hasProgress = history.generations.some((one) => one.commits.length > 0 || one.lost);
  const rows = history.generations.map((one) => [
    String(one.generation),
    clock(one.began.time),
    one.ended ? duration(lasted(one)) : "runs",
    membersText(one.members),
    ...(hasProgress ? [commitsText(one), lostText(one.lost)] : []),
    endText(one),
    one.recovery ? duration(one.recovery) : "",
  ]);
  const progress = hasProgress ? ["commits", "lost"] : [];
  return {header: ["generation", "began", "lasted", "members", ...progress, "ended because", "re-formed in"], rows};
}

/** The nodes of a run as a table: `{header, rows}`. */
export function nodeTable(history) {
  const rows = history.nodes.map((node) => {
    const end = node.left_revision ? `gone${node.cause ? `: ${node.cause}` : ""}` : "is there";
    return [node.id, node.host, node.address, String(node.slots), clock(node.joined.time), end];
  });
  return {header: ["node", "host", "address", "slots", "joined", "now"], rows};
}
