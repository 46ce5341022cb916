// One training run: who is in, which rank, who waits and why, its time line, its generations and nodes.
//
// All of it comes from the history that the store keeps of the run's keys: one watch that begins at the run's first
// revision and goes on for ever, and two that do the same for its checkpoints.

import { call } from "../frame/call.js";
import { h, perFrame, put } from "../frame/dom.js";
import { badge, empty, failure, figure, head, section, state } from "../frame/parts.js";
import { href } from "../frame/router.js";
import { watchMap } from "../frame/watch.js";
import { CLUSTER_ROOT, placeOf } from "../model/admission.js";
import { GENERATIONS_SHOWN } from "../model/drawings.js";
import { Progress, withCommits } from "../model/progress.js";
import { NO_STATE, ROOT, denialReason, describe, faultText, intervalOf, ranksText, readChange, wantedText } from "../model/runs.js";
import { Fold, commitsText, endText, lasted, lostText, membersText, nodeTable, rootFault } from "../model/timeline.js";
import { clock, count, duration, sorted } from "../model/words.js";
import { facts, pagedTable, pager } from "./pages.js";
import { timelineDrawing } from "./drawings.js";
import { range, replay } from "./store.js";

const KINDS = { running: "good", gathering: "warn", broken: "bad", closed: "" };
const REDRAW_MS = 1000;

const MEMBERS = [
  { title: "rank", value: (one) => ranksText(one.rank, one.slots), num: true },
  { title: "node", value: (one) => one.id, mono: true },
  { title: "host", value: (one) => one.host },
  { title: "address", value: (one) => one.address, mono: true },
  { title: "slots", value: (one) => one.slots, num: true },
  { title: "topology", value: (one) => one.topology },
];
const WAITING = [
  { title: "waiting", value: (one) => one.id, mono: true },
  { title: "host", value: (one) => one.host },
  { title: "slots", value: (one) => one.slots, num: true },
  { title: "why", value: (one) => one.why, wide: true },
];
const GENERATIONS = [
  { title: "generation", value: (one) => one.generation, num: true },
  { title: "began", value: (one) => clock(one.began.time) },
  { title: "lasted", value: (one) => (one.ended ? duration(lasted(one)) : "runs"), num: true },
  { title: "ended because", value: (one) => endText(one), wide: true },
  { title: "re-formed in", value: (one) => (one.recovery ? duration(one.recovery) : ""), num: true },
  { title: "commits", value: (one) => commitsText(one) },
  { title: "lost", value: (one) => lostText(one.lost) },
  { title: "members", value: (one) => membersText(one.members) },
];
const NODES = [
  { title: "node", value: (one) => one.id, mono: true },
  { title: "host", value: (one) => one.host },
  { title: "joined", value: (one) => clock(one.joined.time) },
  { title: "now", value: (one) => nodeTable({ nodes: [one] }).rows[0][5], render: (one) => nodeState(one) },
  { title: "slots", value: (one) => one.slots, num: true },
  { title: "address", value: (one) => one.address, mono: true },
];
const FAULTS = [
  { title: "at", value: (one) => clock(one.fault.time) },
  { title: "generation", value: (one) => one.generation, num: true },
  { title: "fault", value: (one) => faultText(one.fault), wide: true },
  { title: "role", value: (one) => (one.isRoot ? "root cause" : ""), render: (one) => one.isRoot && badge("root cause", "bad") },
];

const nodeState = (one) => state(nodeTable({ nodes: [one] }).rows[0][5], one.left_revision ? (one.cause ? "bad" : "") : "good");

/** Show a run below an element of the page. */
export function mountRun(root, run, scope) {
  const page = new RunPage(run, scope);
  root.append(page.element);
  page.read();
}

class RunPage {
  constructor(run, scope) {
    this.run = run;
    this.scope = scope;
    this.fold = null;
    this.progress = new Progress(run);
    this.denials = new Map();
    this.ends = new Map();
    this.shared = [];
    this.last = null;
    this.draw = perFrame(() => this.redraw());
    this.build();
  }

  build() {
    this.note = h("div", { role: "status" });
    this.text = h("p", { class: "muted", "aria-live": "polite" });
    this.figures = ["Phase", "Generation", "Nodes", "Ranks", "Faults", "Last recovery"].map((name) => figure(name));
    this.facts = facts();
    this.drawing = h("div", { class: "scroll drawing", tabindex: "0", role: "region", "aria-label": "Timeline, drawing" });
    this.pages = pager("Parts of the timeline");
    const paged = (columns, key, label, none) => pagedTable({ columns, key, label, none });
    this.members = paged(MEMBERS, (one) => one.id, "Members", "No generation runs now.");
    this.waiting = paged(WAITING, (one) => one.id, "Waiting nodes", "No node waits.");
    this.generations = paged(GENERATIONS, (one) => `${one.generation} ${one.began.revision}`, "Generations", "No generation has begun yet.");
    this.faults = paged(FAULTS, (one) => one.id, "Faults", "No fault was reported.");
    this.nodes = paged(NODES, (one) => one.id, "Nodes", "No node has joined yet.");
    this.present = section("Nodes of this generation", this.members.element);
    this.waits = section("Waiting nodes", this.waiting.element);
    const links = [h("a", { href: href("checkpoints", [this.run]), class: "button" }, "Checkpoints"), h("a", { href: href("runs"), class: "button" }, "All runs")];
    const heading = head(this.run, { actions: links });
    heading.firstChild.append(this.text);
    this.body = h(
      "div", { class: "stack" },
      h("div", { class: "figures six" }, this.figures.map((one) => one.element)), this.facts.element,
      section("Timeline", this.drawing, this.pages.element),
      this.present, this.waits,
      section("Faults", this.faults.element), section("Generations", this.generations.element), section("Nodes", this.nodes.element),
    );
    this.element = h("div", { class: "stack" }, heading, this.note, this.body);
  }

  async read() {
    const [key, end] = intervalOf(this.run);
    put(this.note, h("p", { class: "muted" }, "Reading the history of the run…"));
    try {
      const { items, revision } = await range({ key, end }, this.scope);
      const base = `${ROOT}${this.run}/`;
      const records = items.filter((one) => [`${base}round`, `${base}state`].includes(one.key));
      const known = records.length ? records : items;
      const since = Math.min(revision + 1, ...known.map((one) => one.create));
      this.upTo = Math.max(0, ...items.map((one) => one.mod));
      this.body.hidden = !items.length; // one empty state, and not one for each section
      if (!items.length) put(this.note, empty(`No run is named ${this.run}.`, "It appears here when its first node joins."));
      this.follow([key, end], since);
    } catch (error) {
      if (!this.scope.signal.aborted) put(this.note, failure(error));
    }
  }

  follow(interval, since) {
    const onError = (error) => put(this.note, failure(error));
    const onStart = (from, isComplete) => {
      this.fold = new Fold(this.run);
      this.known = { sinceRevision: from, complete: isComplete };
    };
    const onEvents = (events) => {
      for (const { type, kv } of events) this.take(kv, type === "delete");
      this.draw();
    };
    replay(interval, since, { onStart, onEvents, onError }, this.scope);
    const { keys } = this.progress;
    const all = (prefix) => [prefix, `${prefix.slice(0, -1)}0`];
    const past = (prefix, take) =>
      replay(all(prefix), since, { onStart() {}, onEvents: (events) => (events.forEach(take), this.draw()), onError() {} }, this.scope);
    past(keys.records, ({ type, kv }) => type === "put" && this.progress.record(kv));
    past(keys.deletings, ({ kv }) => this.progress.deleting(kv));
    const onShared = (map, { error }) => {
      this.shared = error ? [] : [...map.values()];
      this.draw();
    };
    this.scope.on(watchMap(CLUSTER_ROOT, onShared, { limit: 20_000 }));
    this.scope.every(REDRAW_MS, this.draw);
  }

  take(kv, isDeleted) {
    const change = readChange(this.run, kv, isDeleted);
    if (this.body.hidden) {
      this.body.hidden = false;
      put(this.note);
    }
    if (change) this.fold.apply(change);
    if (kv.mod >= this.upTo && this.upTo) {
      this.upTo = 0;
      put(this.note);
    }
    const prefix = `${ROOT}${this.run}/deny/`;
    if (!kv.key.startsWith(prefix)) return;
    const host = kv.key.slice(prefix.length);
    if (isDeleted) this.denials.delete(host);
    else this.denials.set(host, denialReason(host, kv.value));
    if (!isDeleted) this.askEnd(host, kv.lease);
  }

  /** Ask once until when a host is left out. */
  async askEnd(host, lease) {
    const answer = await call("/v3/lease/timetolive", { ID: lease }, { signal: this.scope.signal }).catch(() => null);
    this.ends.set(host, Date.now() / 1000 + Number(answer?.TTL ?? 0));
    this.draw();
  }

  beside() {
    const left = (host) => Math.max(0, Math.round((this.ends.get(host) ?? 0) - Date.now() / 1000));
    const denied = [...this.denials].map(([host, reason]) => ({ host, reason, seconds_left: left(host) }));
    return { denied, queue: placeOf(this.run, this.shared) };
  }

  redraw() {
    if (!this.fold || this.upTo || this.body.hidden || this.scope.signal.aborted) return;
    const history = withCommits(this.fold.history(this.known), this.progress);
    const now = describe(history, this.beside());
    this.text.textContent = now.headline.replace(`run ${this.run}: `, "");
    this.drawFigures(history, now);
    this.facts.update(this.details(history, now));
    this.drawTimeline(history);
    this.members.update(now.members);
    this.present.hidden = now.members.length === 0;
    this.waits.hidden = now.waiting.length === 0;
    this.waiting.update(now.waiting);
    this.generations.update([...history.generations].reverse());
    const faults = history.generations.flatMap((one) => {
      const root = rootFault(one);
      return one.faults.map((fault) => ({ id: JSON.stringify(fault), generation: one.generation, fault, isRoot: fault === root }));
    });
    this.faults.update(faults.reverse());
    this.nodes.update([...history.nodes].reverse());
  }

  drawFigures(history, { state: now, members }) {
    const [phase, generation, nodes, ranks, faults, recovery] = this.figures;
    const last = history.generations.filter((one) => one.recovery).at(-1);
    phase.set(now.phase, history.present.length || now.phase === "closed" ? "" : "no node is left");
    const isOver = now.phase === "closed"; // of a finished run the last generation says who took part
    generation.set(String(now.generation), now.time ? `${isOver ? "closed at" : "since"} ${clock(now.time)}` : "");
    const counted = isOver ? (history.generations.at(-1)?.members ?? []) : members;
    nodes.set(String(isOver ? counted.length : history.present.length), `${isOver ? "at the end" : "present"}, ${wantedText(now)}`);
    ranks.set(String(counted.reduce((sum, one) => sum + one.slots, 0)), !counted.length ? "" : isOver ? "at the end" : "in this generation");
    faults.set(String(history.generations.reduce((sum, one) => sum + one.faults.length, 0)), "");
    recovery.set(last ? duration(last.recovery) : "–", last ? `after g${last.generation}` : "");
    phase.element.dataset.kind = KINDS[now.phase];
  }

  details(history, { state: now, queue, denied }) {
    const last = history.generations.at(-2);
    const pairs = [];
    if (now.reason) pairs.push([now.phase === "running" ? "reason" : `${now.phase} because`, now.reason]);
    if (now.phase === "running" && last?.recovery) pairs.push([`re-formed in ${duration(last.recovery)} after`, endText(last)]);
    if (now.waits_for) pairs.push(["waits for", now.waits_for]);
    if (history.boot && now.phase === "running") pairs.push(["store of the workers", history.boot]);
    if (history.arbiter) pairs.push(["arbiter", history.arbiter]);
    if (queue) pairs.push([`cluster ${queue.cluster}`, queue.waits ? queue.reason : "admitted"]);
    for (const one of denied) pairs.push([`left out for ${one.seconds_left} s more`, `${one.host}: ${one.reason}`]);
    for (const host of sorted(Object.keys(now.left_out ?? NO_STATE.left_out))) pairs.push([`left out: ${host}`, now.left_out[host]]);
    if (!history.complete) pairs.push(["history", `begins at revision ${history.since_revision}; older changes were compacted`]);
    return pairs;
  }

  drawTimeline(history) {
    const total = history.generations.length;
    const last = this.last ?? total;
    put(this.drawing, total ? timelineDrawing(history, { now: Date.now() / 1000, last }) : h("p", { class: "muted" }, "No generation has begun yet."));
    const move = (to) => () => {
      this.last = to >= total ? null : to;
      this.draw();
    };
    this.pages.update({
      text: `generations ${Math.max(1, last - GENERATIONS_SHOWN + 1)} to ${last} of ${total}; ${count(history.nodes.length, "node")}`,
      before: last < total ? move(last + GENERATIONS_SHOWN) : null,
      next: last > GENERATIONS_SHOWN ? move(last - GENERATIONS_SHOWN) : null,
    });
  }
}
