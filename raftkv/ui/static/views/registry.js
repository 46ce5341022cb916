// The checkpoints of one run: what is being saved, what is committed (a page at a time), why each is kept.
//
// Everything but the records is small and kept current by one watch; of the records only the page that is shown is in
// the browser, and the watch changes it. Ten thousand checkpoints cost what fifty do.

import { h, perFrame, put } from "../frame/dom.js";
import { badge, choice, empty, failure, figure, head, section } from "../frame/parts.js";
import { go, href } from "../frame/router.js";
import { watchMap, watchRange } from "../frame/watch.js";
import {
  attemptsUnderWay, checkpointRow, deletionsUnderWay, holdsByCheckpoint, readCheckpoint, readFence, registryKeys,
  runSummaries, stepText, tagsOf,
} from "../model/checkpoints.js";
import { clock, size } from "../model/words.js";
import { pagedTable, pager } from "./pages.js";
import { getAll, interval, range, scan } from "./store.js";

const PAGE = 50;
const KEYS_MAX = 100_000;

const cell = (place) => (one) => one.row[place];
const linked = (one) => h("a", { href: href("checkpoints", [one.run_id, one.kind, String(one.step)]) }, String(one.step));
const RECORDS = [
  { title: "step", value: cell(0), num: true, render: linked },
  { title: "committed", value: cell(6) },
  { title: "took", value: cell(7), num: true },
  { title: "size", value: (one) => `${one.row[5]} ${one.share.toFixed(2)}`, num: true, render: (one) => [h("meter", { class: "share", min: 0, max: 1, value: one.share, "aria-hidden": "true" }), one.row[5]] },
  { title: "kept as", value: cell(9), wide: true, render: (one) => keptAs(one) },
  { title: "metrics", value: cell(8), wide: true },
  { title: "generation", value: cell(2), num: true },
  { title: "ranks", value: cell(3), num: true },
  { title: "files", value: cell(4), num: true },
];
const ATTEMPTS = [
  { title: "step", value: (one) => one.step, num: true },
  { title: "kind", value: (one) => one.kind },
  { title: "prepared", value: (one) => `${one.prepared} of ${one.worldSize} ranks`, render: (one) => progress(one) },
  { title: "state", value: (one) => (one.isStale ? "waits for a takeover" : "saving"), render: (one) => (one.isStale ? badge("waits for a takeover", "warn") : badge("saving", "good")) },
  { title: "generation", value: (one) => one.generation, num: true },
  { title: "begun", value: (one) => clock(one.time) },
  { title: "by", value: (one) => one.holder, wide: true },
];
const TAGS = [
  { title: "tag", value: (one) => one.name, mono: true },
  { title: "is on", value: (one) => `${one.on.run_id}@${one.on.step} (${one.on.kind})` },
];
const DELETIONS = [
  { title: "step", value: (one) => one.step, num: true },
  { title: "kind", value: (one) => one.kind },
  { title: "why", value: (one) => one.reason, wide: true },
  { title: "decided", value: (one) => clock(one.time) },
  { title: "bytes at", value: (one) => one.uri, mono: true, wide: true },
];

const keptAs = (one) => [one.isLatest && badge("latest", "good"), " ", one.held.map((hold) => [badge(hold.text, hold.why === "pin" ? "warn" : "info"), " "])];
const progress = (one) => [
  h("progress", { max: one.worldSize, value: one.prepared, "aria-label": `step ${one.step}: ranks that have prepared` }),
  ` ${one.prepared} of ${one.worldSize} ranks`,
];

/** Show the checkpoints of a run; `kind` may be empty: the one with the newest. */
export function mountRegistry(root, { run, kind }, scope) {
  const page = new RegistryPage(run, kind, scope);
  root.append(page.element);
  page.read();
}

class RegistryPage {
  constructor(run, kind, scope) {
    Object.assign(this, { run, kind, scope, keys: registryKeys(run) });
    this.items = new Map();
    this.records = new Map();
    this.summaries = [];
    this.before = null; // the step below which the page begins; null: it begins with the newest
    this.hasOlder = false;
    this.draw = perFrame(() => this.redraw());
    this.build();
  }

  build() {
    this.note = h("div", { role: "status" });
    this.figures = ["Latest step", "Checkpoints", "Size", "Writer", "Being saved", "Being deleted"].map((name) => figure(name));
    this.kinds = h("div", {});
    const table = (columns, label, none, key) => pagedTable({ columns, label, none, key });
    this.table = table(RECORDS, "Checkpoints", empty("This run has committed no checkpoint yet."), (one) => one.step);
    this.pages = pager("Pages of checkpoints");
    this.attempts = table(ATTEMPTS, "Being saved", "Nothing is being saved now.", (one) => `${one.kind} ${one.step} ${one.generation}`);
    this.tags = table(TAGS, "Tags", "No tag.", (one) => one.name);
    this.deletions = table(DELETIONS, "Being deleted", "Nothing.", (one) => one.uri);
    this.tagPart = section("Tags", this.tags.element);
    this.deletionPart = section("Being deleted", this.deletions.element);
    const links = [h("a", { href: href("runs", [this.run]), class: "button" }, "The run"), h("a", { href: href("checkpoints"), class: "button" }, "All checkpoints")];
    this.element = h(
      "div", { class: "stack" },
      head(this.run, { text: "Checkpoints of this run", actions: links }), this.note,
      h("div", { class: "figures six" }, this.figures.map((one) => one.element)), this.kinds,
      section("Being saved", this.attempts.element),
      section("Committed", this.table.element, this.pages.element), this.tagPart, this.deletionPart,
    );
  }

  async read() {
    try {
      const { keys, scope } = this;
      const latest = await range({ prefix: keys.latest }, scope);
      this.summaries = runSummaries(latest.items);
      this.kind ||= this.summaries.reduce((best, one) => (one.latest.step > best.latest.step ? one : best), this.summaries[0] ?? { kind: "dcp", latest: { step: -1 } }).kind;
      const { revision } = latest;
      for (const prefix of [keys.holds, keys.tags, keys.deletings]) this.keep((await range({ prefix, revision, limit: KEYS_MAX }, scope)).items);
      await scan(keys.attempts, { onPage: (items) => this.keep(items), max: KEYS_MAX }, scope);
      const heads = [...this.items.keys()].filter((key) => key.startsWith(keys.attempts) && key.endsWith("/head"));
      this.keep((await getAll([keys.fence, ...heads], scope)).filter(Boolean));
      await this.readPage();
      this.follow(revision + 1);
    } catch (error) {
      if (!this.scope.signal.aborted) put(this.note, failure(error));
    }
  }

  keep(items) {
    for (const item of items) this.items.set(item.key, item);
  }

  async readPage() {
    const prefix = this.keys.recordsOf(this.kind);
    const end = this.before === null ? `${prefix.slice(0, -1)}0` : `${prefix}${stepText(this.before)}`;
    const { items, more } = await range({ key: prefix, end, limit: PAGE, descending: true }, this.scope);
    this.records = new Map(items.map((item) => [item.key, item]));
    this.hasOlder = more;
    this.draw();
  }

  follow(from) {
    const { keys } = this;
    const onError = (error) => put(this.note, failure(error));
    const onEvents = (events) => {
      for (const { type, kv } of events) this.take(kv, type === "delete");
      this.draw();
    };
    const onCompacted = () => this.read();
    this.scope.on(watchRange(interval({ prefix: keys.base }), { onEvents, onError, onCompacted }, { from }));
    const onChange = (map) => {
      this.summaries = runSummaries(map.values());
      this.draw();
    };
    this.scope.on(watchMap(keys.latest, onChange));
  }

  take(kv, isDeleted) {
    const { keys } = this;
    if (!kv.key.startsWith(keys.records)) {
      if (isDeleted) this.items.delete(kv.key);
      else this.items.set(kv.key, kv);
      return;
    }
    if (!kv.key.startsWith(keys.recordsOf(this.kind))) return;
    if (isDeleted) {
      if (this.records.delete(kv.key) && this.hasOlder) this.readPage().catch(() => {});
      return;
    }
    const isNew = !this.records.has(kv.key) && this.before === null;
    if (isNew || this.records.has(kv.key)) this.records.set(kv.key, kv);
    if (this.records.size > PAGE) {
      this.records.delete([...this.records.keys()].sort()[0]);
      this.hasOlder = true;
    }
  }

  below(prefix) {
    return [...this.items.values()].filter((item) => item.key.startsWith(prefix));
  }

  redraw() {
    const { keys } = this;
    const held = holdsByCheckpoint(keys, this.below(keys.holds));
    const summary = this.summaries.find((one) => one.kind === this.kind)?.latest ?? null;
    const found = [...this.records.values()].map((item) => readCheckpoint(item.value)).filter(Boolean);
    found.sort((one, other) => other.step - one.step);
    const largest = Math.max(1, ...found.map((one) => one.size_bytes));
    const rows = found.map((one) => {
      const isLatest = summary?.step === one.step;
      const holds = held.get(`${one.kind} ${one.step}`) ?? [];
      return { ...one, isLatest, held: holds, share: one.size_bytes / largest, row: checkpointRow(one, isLatest, holds) };
    });
    this.table.update(rows);
    const fence = this.items.get(keys.fence);
    const claim = fence ? readFence(fence.value) : null;
    const attempts = attemptsUnderWay(keys, this.below(keys.attempts), claim);
    this.attempts.update(attempts);
    const [tags, deletions] = [tagsOf(keys, this.below(keys.tags)), deletionsUnderWay(keys, this.below(keys.deletings))];
    this.tags.update(tags);
    this.deletions.update(deletions);
    this.tagPart.hidden = tags.length === 0;
    this.deletionPart.hidden = deletions.length === 0;
    this.drawFigures(summary, claim, attempts, deletions);
    this.drawPages(found, summary);
    this.drawKinds();
  }

  drawFigures(summary, claim, attempts, deletions) {
    const [latest, checkpoints, bytes, writer, saving, deleting] = this.figures;
    latest.set(summary ? String(summary.step) : "–", summary ? `at ${clock(summary.time)}` : "");
    checkpoints.set(summary ? summary.count.toLocaleString("en-US") : "0", `of kind ${this.kind}`);
    bytes.set(summary ? size(summary.size_bytes) : "–");
    writer.set(claim ? `g${claim.generation}` : "–", claim ? claim.holder : "not claimed yet");
    saving.set(String(attempts.filter((one) => !one.isStale).length));
    deleting.set(String(deletions.length));
  }

  drawPages(found, summary) {
    const move = (before) => () => {
      this.before = before;
      this.readPage().catch((error) => put(this.note, failure(error)));
    };
    const oldest = found.at(-1)?.step;
    this.pages.update({
      text: found.length ? `steps ${found[0].step} to ${oldest}, of ${(summary?.count ?? found.length).toLocaleString("en-US")}` : "",
      before: this.before === null ? null : move(null),
      next: this.hasOlder ? move(oldest) : null,
      names: ["Newest", "Older"],
    });
  }

  drawKinds() {
    const names = this.summaries.map((one) => one.kind);
    if (names.join() === this.drawnKinds) return;
    this.drawnKinds = names.join();
    const to = (kind) => go("checkpoints", [this.run, kind]);
    put(this.kinds, names.length > 1 && choice("Kind", names.map((name) => [name, name]), this.kind, to).element);
  }
}
