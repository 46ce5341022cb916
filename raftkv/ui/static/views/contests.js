// Locks and elections: who holds, who waits, and the fencing token of each.
//
// Entries are keys named by their lease, anywhere in the store: the names of keys below a prefix are read in pages, as
// far as a page of people should, and watched on from there. A prefix that changes too fast to follow is not followed.

import { leaseHex } from "../frame/bytes.js";
import { h, perFrame, put } from "../frame/dom.js";
import { badge, button, empty, failure, field, head, section } from "../frame/parts.js";
import { go, href, view } from "../frame/router.js";
import { watchRange } from "../frame/watch.js";
import { Contests, mayBeEntry, queueOf } from "../model/contests.js";
import { count } from "../model/words.js";
import { pagedTable } from "./pages.js";
import { floodGate, getAll, interval, scan } from "./store.js";

const KEYS_MAX = 20_000;
const EVENTS_PER_S = 2000;

const COLUMNS = [
  { title: "name", value: (one) => one.name, mono: true },
  { title: "kind", value: (one) => one.kind, render: (one) => badge(one.kind, one.kind === "election" ? "info" : "") },
  { title: "held by", value: (one) => who(one.holder), wide: true },
  { title: "fencing token", value: (one) => one.holder.token, num: true },
  { title: "waiting", value: (one) => one.waiting.length, num: true, sort: true },
  { title: "next", value: (one) => (one.waiting.length ? who(one.waiting[0]) : "") },
];
const ENTRY_COLUMNS = [
  { title: "place", value: (one) => (one.place ? `waits, ${one.place}` : "holds"), render: (one) => place(one) },
  { title: "proclaims", value: (one) => one.value, wide: true },
  { title: "fencing token", value: (one) => one.token, num: true },
  { title: "lease", value: (one) => one.lease, mono: true, render: (one) => lease(one) },
  { title: "key", value: (one) => one.key, mono: true },
];

const who = (entry) => entry.value || `lease ${entry.lease}`;
const place = (one) => (one.place ? badge(`waits, ${one.place}`) : badge("holds", "good"));
const lease = (one) => h("a", { href: href("leases", [leaseHex(BigInt(`0x${one.lease}`))]) }, one.lease);

view("contests", {
  title: "Locks and elections",
  key: "o",
  order: 50,
  group: "Store",
  mount(root, route, scope) {
    const page = new Page(scope);
    root.append(page.element);
    page.show(route);
    page.read(route.query.get("prefix") ?? "");
    return {
      update(now) {
        page.show(now);
        if ((now.query.get("prefix") ?? "") !== page.prefix) page.read(now.query.get("prefix") ?? "");
      },
    };
  },
});

class Page {
  constructor(scope) {
    this.scope = scope;
    this.prefix = null;
    this.stop = () => {};
    this.draw = perFrame(() => this.redraw());
    this.note = h("div", { role: "status" });
    this.below = field("Names that begin with", { "data-search": true, placeholder: "all keys" });
    const form = h("form", { class: "row search" }, this.below.element, h("button", {}, "Look"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      go("contests", [], { prefix: this.below.value });
    });
    this.table = pagedTable({
      columns: COLUMNS, key: (one) => one.name, label: "Locks and elections",
      href: (one) => href("contests", [one.name], { prefix: this.prefix }),
      none: empty("No lock is held and no election runs here.", "Take one: raftkvctl lock NAME, or elect NAME VALUE."),
    });
    this.entries = pagedTable({
      columns: ENTRY_COLUMNS, key: (one) => one.key, label: "Entries", none: "Free, and no client is waiting.",
    });
    this.detail = h("div", { class: "stack" });
    this.element = h("div", { class: "stack" }, form, this.note, this.table.element, this.detail);
    this.heading = head("Locks and elections", { text: "The oldest entry of a queue holds the lock or leads; the others wait." });
    this.element.prepend(this.heading);
  }

  show(route) {
    this.chosen = route.path[0] ?? null;
    this.below.input.value = route.query.get("prefix") ?? "";
    this.draw();
  }

  async read(prefix) {
    this.stop();
    this.prefix = prefix;
    this.isRead = false;
    const contests = (this.contests = new Contests());
    const found = [];
    put(this.note, h("p", { class: "muted" }, "Reading the names of keys…"));
    try {
      const onPage = (items) => found.push(...items.filter(mayBeEntry));
      const { revision, isWhole } = await scan(prefix, { onPage, max: KEYS_MAX }, this.scope);
      for (const kv of await getAll(found, this.scope)) if (kv) contests.put(kv);
      if (this.contests !== contests) return;
      put(this.note, isWhole ? null : this.partly());
      this.isRead = true;
      this.follow(prefix, revision + 1, contests);
      this.draw();
    } catch (error) {
      if (!this.scope.signal.aborted) put(this.note, failure(error));
    }
  }

  partly() {
    const text = `Only the first ${KEYS_MAX.toLocaleString("en-US")} keys were searched; enter a prefix of the names.`;
    return h("p", { class: "muted" }, text);
  }

  follow(prefix, from, contests) {
    const isFlooded = floodGate(EVENTS_PER_S, () => {
      this.stop();
      const again = button("Follow again", () => this.read(prefix), { small: true });
      put(this.note, h("p", { class: "failure" }, "Keys change too fast here to be followed; choose a longer prefix.", again));
    });
    const onEvents = (events) => {
      isFlooded(events.length);
      for (const { type, kv } of events) {
        if (type === "put" ? contests.put(kv) : contests.remove(kv.key)) this.draw();
      }
    };
    const onError = (error) => put(this.note, failure(error));
    this.stop = watchRange(interval({ prefix }), { onEvents, onError, onCompacted: () => this.read(prefix) }, { from });
    this.scope.on(this.stop);
  }

  redraw() {
    if (!this.isRead) return; // nothing is known, which is not that there is nothing
    const all = this.contests?.list() ?? [];
    this.table.update(all);
    const one = this.chosen === null ? null : all.find((queue) => queue.name === this.chosen);
    if (this.chosen === null) {
      put(this.detail);
      this.drawn = null;
      return;
    }
    if (this.drawn !== this.chosen) put(this.detail, section(this.chosen, this.entries.element));
    this.drawn = this.chosen;
    const entries = one ? [one.holder, ...one.waiting] : [];
    this.entries.update(entries.map((entry, number) => ({ ...entry, place: number })));
    this.entries.element.setAttribute("aria-label", one ? `${one.name}: ${count(one.waiting.length, "contender")} waiting` : "");
  }
}
