// Training runs: all of them, and the queue for the slots that they share. One run is shown by `run.js`.

import { h, perFrame, put } from "../frame/dom.js";
import { badge, empty, failure, head, section, state } from "../frame/parts.js";
import { href, view } from "../frame/router.js";
import { watchMap, watchRange } from "../frame/watch.js";
import { CLUSTER_ROOT, describeClusters } from "../model/admission.js";
import { ROOT, isListed, listRuns, runRow } from "../model/runs.js";
import { clock, count } from "../model/words.js";
import { filter, pagedTable } from "./pages.js";
import { mountRun } from "./run.js";
import { floodGate, getAll, interval, scan } from "./store.js";

const KEYS_MAX = 200_000;
const EVENTS_PER_S = 5000;
/** What lies below these is a run's own, and may be much: a listing goes on behind it. */
const INSIDE = /^(.+?\/(?:boot|deny|elect|fault|store|strike|sync))\//s;

export const PHASES = { running: "good", gathering: "warn", broken: "bad", closed: "" };

const RUN_COLUMNS = [
  { title: "run", value: (one) => one.run, mono: true, sort: true },
  { title: "phase", value: (one) => runRow(one)[1], render: (one) => state(runRow(one)[1], one.isDead ? "bad" : PHASES[one.state.phase]), sort: true },
  { title: "generation", value: (one) => one.state.generation, num: true, sort: true },
  { title: "nodes", value: (one) => one.nodes, num: true, sort: true },
  { title: "limits", value: (one) => runRow(one)[4], num: true },
  { title: "since", value: (one) => clock(one.state.time), sortBy: (one) => one.state.time, sort: true },
  { title: "reason", value: (one) => one.state.reason, wide: true },
];
const HOST_COLUMNS = [
  { title: "host", value: (one) => one.host, mono: true },
  { title: "slots", value: (one) => one.slots, num: true },
  { title: "free", value: (one) => one.free, num: true },
  { title: "slots reported by", value: (one) => one.source },
  { title: "held by", value: (one) => Object.entries(one.held).map(([run, slots]) => `${run} ${slots}`).sort().join(", "), wide: true },
  { title: "strikes", value: (one) => one.strikes || "", num: true },
  { title: "denied", value: (one) => one.denied, wide: true },
];
const QUEUE_COLUMNS = [
  { title: "waiting", value: (one) => one.run, mono: true },
  { title: "place", value: (one) => one.place || "–", num: true },
  { title: "limits", value: (one) => `${one.min_nodes}:${one.max_nodes}`, num: true },
  { title: "nodes", value: (one) => one.nodes, num: true },
  { title: "weight", value: (one) => one.weight, num: true },
  { title: "why", value: (one) => one.reason, wide: true },
];

view("runs", {
  title: "Runs",
  key: "r",
  order: 60,
  group: "Training",
  mount(root, route, scope) {
    if (route.path.length) mountRun(root, route.path[0], scope);
    else new RunList(root, scope).read();
  },
});

class RunList {
  constructor(root, scope) {
    this.scope = scope;
    this.items = new Map();
    this.draw = perFrame(() => this.redraw());
    this.note = h("div", { role: "status" });
    this.filter = filter("Names that contain", this.draw);
    this.table = pagedTable({
      columns: RUN_COLUMNS, key: (one) => one.run, href: (one) => href("runs", [one.run]), label: "Runs",
      none: empty("There are no runs yet.", "Start one: raftkvctl run exec --job NAME --nnodes 2 -- COMMAND"),
    });
    this.clusters = h("div", { class: "stack" });
    this.heading = head("Runs", { text: "Training jobs: who takes part, and what has happened to them." });
    root.append(this.heading, this.filter.element, this.note, this.table.element, this.clusters);
    this.queues = new Map();
    scope.on(watchMap(CLUSTER_ROOT, (map, change) => this.drawClusters(map, change), { limit: 20_000 }));
  }

  async read() {
    put(this.note, h("p", { class: "muted" }, "Reading…"));
    this.items.clear();
    try {
      const skip = (key) => {
        const inside = INSIDE.exec(key.slice(ROOT.length));
        return inside && `${ROOT}${inside[1]}0`;
      };
      const onPage = (items) => items.forEach((item) => isListed(item.key) && this.items.set(item.key, item));
      const { revision, isWhole } = await scan(ROOT, { onPage, skip, max: KEYS_MAX }, this.scope);
      const states = [...this.items.keys()].filter((key) => key.endsWith("/state"));
      for (const kv of await getAll(states, this.scope)) if (kv) this.items.set(kv.key, kv);
      put(this.note, isWhole ? null : h("p", { class: "muted" }, "Not all runs are shown: there are too many."));
      this.isRead = true;
      this.follow(revision + 1);
      this.draw();
    } catch (error) {
      if (!this.scope.signal.aborted) put(this.note, failure(error));
    }
  }

  follow(from) {
    const isFlooded = floodGate(EVENTS_PER_S, () => {
      stop();
      put(this.note, h("p", { class: "failure" }, "Runs change faster than this list can follow; open one of them, or reload."));
    });
    const onEvents = (events) => {
      isFlooded(events.length);
      for (const { type, kv } of events) {
        if (!isListed(kv.key)) continue;
        if (type === "put") this.items.set(kv.key, kv);
        else this.items.delete(kv.key);
        this.draw();
      }
    };
    const onError = (error) => put(this.note, failure(error));
    const stop = watchRange(interval({ prefix: ROOT }), { onEvents, onError, onCompacted: () => this.read() }, { from });
    this.scope.on(stop);
  }

  redraw() {
    if (!this.isRead) return; // nothing is known, which is not that there is nothing
    this.table.update(listRuns(this.items.values()).filter((one) => this.filter.matches(one.run)));
  }

  drawClusters(map, { error }) {
    if (error) {
      const text = "The queue for shared slots is hidden: this user has no permission to read it.";
      put(this.clusters, this.isRead && h("p", { class: "muted" }, text));
      return;
    }
    const clusters = describeClusters(map.values());
    for (const name of this.queues.keys()) if (!clusters.some((one) => one.cluster === name)) this.queues.delete(name);
    for (const one of clusters) {
      if (!this.queues.has(one.cluster)) this.queues.set(one.cluster, new Queue(one.cluster));
      this.queues.get(one.cluster).update(one);
    }
    const elements = clusters.map((one) => this.queues.get(one.cluster).element);
    if (elements.length !== this.clusters.children.length) put(this.clusters, elements);
  }
}

/** A cluster whose slots runs share: its hosts, and who waits. */
class Queue {
  constructor(cluster) {
    this.text = h("p", { class: "muted" });
    this.hosts = pagedTable({ columns: HOST_COLUMNS, key: (one) => one.host, label: `Hosts of ${cluster}`, none: "No host is known." });
    this.queue = pagedTable({
      columns: QUEUE_COLUMNS, key: (one) => one.run, href: (one) => href("runs", [one.run]), label: `Admission queue of ${cluster}`,
      none: "No run waits for slots.",
    });
    this.element = section(`Admission to cluster ${cluster}`, this.text, this.queue.element, this.hosts.element);
  }

  update({ hosts, grants, queue, isReadable }) {
    const text = `${count(hosts.length, "host")}, ${count(grants.length, "run")} admitted, ${queue.length} waiting`;
    put(this.text, isReadable ? text : badge("the ledger cannot be read: another program wrote to it", "bad"));
    this.hosts.update(hosts);
    this.queue.update(queue);
  }
}
