// The key browser: a level of keys as folders and leaves, or all keys below a prefix, a page at a time; one key beside it.
//
// Never more is read than a page (`tree.readLevel`); a search over values reads up to a thousand keys a time. The shown
// level is watched; where it changes faster than people read, the watch is given up and the list is read again on request.

import { KeyValue, base64, prefixEnd, shown, unbase64, unshown } from "../frame/bytes.js";
import { CallError, call } from "../frame/call.js";
import { h, perFrame, put, svg } from "../frame/dom.js";
import { plural } from "../frame/format.js";
import { shortcut } from "../frame/keyboard.js";
import { button, choice, empty, failure, field, head } from "../frame/parts.js";
import { go, href, view } from "../frame/router.js";
import { editing, signedIn } from "../frame/session.js";
import { above, childOf, crumbs, readLevel } from "../frame/tree.js";
import { watchRange } from "../frame/watch.js";
import { create, detail } from "./key.js";

const PAGE = 100;
const EVENTS_PER_S_MAX = 100;
// A search reads values, which may be large: few at a time, and at most a thousand before it asks whether to go on.
const SEARCH_PAGE = 20;
const SEARCH_PAGES = 50;
const ALL = Uint8Array.of(0);

const icon = (path) =>
  svg("svg", { viewBox: "0 0 16 16", width: 14, height: 14, "aria-hidden": "true" }, svg("path", { d: path, fill: "none", stroke: "currentColor", "stroke-width": "1.4", "stroke-linejoin": "round" }));
const FOLDER = "M1.5 4.5v8h13v-7h-7l-1.5-2h-4.5z";
const LEAF = "M4 1.5h5.5L12.5 4.5v10h-8.5z M9.5 1.5v3h3";

const rangeOf = (prefix) =>
  prefix.length ? { key: base64(prefix), range_end: base64(prefixEnd(prefix)) } : { key: base64(ALL), range_end: base64(ALL) };

async function page(start, prefix, limit, keysOnly, signal) {
  const range = rangeOf(prefix);
  const answer = await call(
    "/v3/kv/range",
    { ...range, key: base64(start.length ? start : ALL), limit: String(limit), keys_only: keysOnly },
    { signal },
  );
  return { kvs: (answer.kvs ?? []).map((one) => new KeyValue(one)), more: Boolean(answer.more), revision: Number(answer.header.revision) };
}

/** One list of keys: read in pages, watched from the revision of its first page on. */
class Listing {
  constructor(prefix, flat, find, changed) {
    Object.assign(this, { prefix, flat, find, changed, rows: [], next: null, error: null, loading: true, fast: false, touched: new Set() });
    this.controller = new AbortController();
    this.stop = () => {};
    this.seen = 0;
    this.tell = perFrame(() => !this.controller.signal.aborted && changed());
    this.timer = setInterval(() => (this.seen = 0), 1000);
    this.load(prefix, true);
  }

  async load(start, isFirst) {
    this.loading = true;
    this.tell();
    let revision = 0;
    try {
      const read = async (from, limit) => {
        const found = await page(from, this.prefix, limit, !this.find, this.controller.signal);
        revision ||= found.revision;
        return found;
      };
      const found = this.find
        ? await searchPage(start, read, this.find)
        : this.flat ? await flatPage(start, read, PAGE) : await readLevel(this.prefix, start, { read, rowsMax: PAGE });
      this.rows = [...(isFirst ? [] : this.rows), ...found.rows];
      this.next = found.next;
      // Events come without values: what is found stays as it was read.
      if (isFirst && !this.find) this.watch(revision + 1);
    } catch (error) {
      if (this.controller.signal.aborted) return;
      this.error = error;
    }
    this.loading = false;
    this.tell();
  }

  watch(from) {
    this.stop = watchRange(
      rangeOf(this.prefix),
      {
        onEvents: (events) => this.take(events),
        // The list stays as it was read; a right to read without one to watch does not exist, so this is rare.
        onError: (error) => !(error instanceof CallError && error.code === 7) && this.tell(),
      },
      { from, keysOnly: true },
    );
  }

  take(events) {
    this.seen += events.length;
    if (this.seen > EVENTS_PER_S_MAX) {
      this.fast = true;
      this.stop();
      this.tell();
      return;
    }
    for (const { type, kv } of events) this.note(type, kv);
    this.tell();
  }

  note(type, kv) {
    const child = this.flat ? { path: kv.keyBytes, isFolder: false } : childOf(this.prefix, kv.keyBytes);
    const id = shown(child.path);
    const at = this.rows.findIndex((row) => shown(row.path) === id && row.isFolder === child.isFolder);
    this.touched.add(id);
    if (child.isFolder) {
      // Whether a folder is empty now is not known without reading: it stays until the list is read again.
      if (at < 0 && type === "put") this.insert({ ...child, kv: null, count: 1, isMore: true });
    } else if (type === "delete") {
      if (at >= 0) this.rows.splice(at, 1);
    } else if (at >= 0) this.rows[at] = { ...child, kv, count: 1 };
    else this.insert({ ...child, kv, count: 1 });
  }

  insert(row) {
    const text = shown(row.path);
    const at = this.rows.findIndex((one) => shown(one.path) > text);
    // Behind the page that is shown: it comes with the next.
    if (at < 0 && this.next) return;
    this.rows.splice(at < 0 ? this.rows.length : at, 0, row);
  }

  close() {
    clearInterval(this.timer);
    this.controller.abort();
    this.stop();
  }
}

/** The keys and prefixes that the signed-in user may read. */
async function allowed(signal) {
  const user = signedIn.get();
  if (!user) return [];
  const { roles = [] } = await call("/v3/auth/user/get", { name: user.user }, { signal });
  const answers = await Promise.all(roles.map((role) => call("/v3/auth/role/get", { role }, { signal })));
  const rights = answers.flatMap((answer) => answer.perm ?? []).filter((right) => right.permType !== "WRITE");
  return [...new Set(rights.map((right) => shown(unbase64(right.key))))].sort();
}

async function flatPage(start, read, limit) {
  const { kvs, more } = await read(start, limit);
  const rows = kvs.map((kv) => ({ path: kv.keyBytes, isFolder: false, kv, count: 1 }));
  const last = kvs.at(-1)?.keyBytes;
  return { rows, next: more && last ? Uint8Array.of(...last, 0) : null };
}

/** Keys from `start` on whose values contain a text, and the key at which the search goes on. */
async function searchPage(start, read, find) {
  const rows = [];
  let next = start;
  for (let pages = 0; pages < SEARCH_PAGES && next && rows.length < PAGE; pages++) {
    const found = await flatPage(next, read, SEARCH_PAGE);
    rows.push(...found.rows.filter(({ kv }) => (kv.text ?? "").includes(find)));
    next = found.next;
  }
  return { rows, next };
}

view("keys", {
  title: "Keys",
  key: "k",
  order: 20,
  group: "Store",
  mount(root, route, scope) {
    let listing = null;
    let place = {};
    let stopDetail = () => {};
    const search = field("Keys that begin with", { "data-search": true, placeholder: "all keys", type: "search" });
    search.element.classList.add("grow");
    const within = field("Values that contain", { placeholder: "any value", type: "search" });
    within.element.classList.add("grow");
    const mode = choice("How keys are shown", [["tree", "Tree"], ["flat", "Flat"]], "tree", (value) => move(value === "flat" ? { flat: "1" } : { flat: "", find: "" }));
    const form = h("form", { class: "seek", role: "search" }, search.element, within.element, h("div", { class: "row end" }, mode.element));
    const trail = h("ol", { class: "crumbs", "aria-label": "Where this is" });
    const list = h("div", { class: "part" });
    const side = h("div", { class: "detail" });
    const add = button("New key", () => create(shown(place.prefix)).then((key) => key && move({ prefix: key.slice(0, key.lastIndexOf("/") + 1), key })), { kind: "primary" });
    const header = head("Keys", { text: "", actions: [add] });
    root.append(header, form, h("div", { class: "browser" }, h("div", { class: "part" }, trail, list), side));

    function move(changes) {
      const now = { prefix: shown(place.prefix), key: place.key, flat: place.flat ? "1" : "", find: place.find, ...changes };
      go("keys", [], now);
    }

    function update(next) {
      const prefix = unshown(next.query.get("prefix") ?? "");
      const flat = next.query.get("flat") === "1";
      const key = next.query.get("key") ?? "";
      const find = next.query.get("find") ?? "";
      const isOther = !listing || shown(prefix) !== shown(place.prefix) || flat !== place.flat || find !== place.find;
      const isOtherKey = key !== place.key;
      place = { prefix, flat, key, find };
      mode.set(flat || find ? "flat" : "tree");
      if (document.activeElement !== within.input) within.input.value = find;
      if (document.activeElement !== search.input) search.input.value = shown(prefix);
      if (isOther) open();
      else draw();
      if (isOtherKey || isOther) openDetail();
    }

    function open() {
      listing?.close();
      listing = new Listing(place.prefix, place.flat || Boolean(place.find), place.find, draw);
      drawTrail();
      draw();
    }

    function openDetail() {
      stopDetail();
      put(side);
      stopDetail = place.key ? detail(side, place.key) : () => {};
      if (!place.key) put(side, empty("No key chosen.", "Choose one to see its value, its history and its lease."));
    }

    /** Where the user may read, for one that may not read here. */
    async function offerAllowed(of) {
      const prefixes = await allowed(scope.signal).catch(() => []);
      if (of !== listing || !prefixes.length) return;
      const links = prefixes.map((key) => h("li", {}, h("a", { href: linkTo(unshown(key)) }, icon(FOLDER), key)));
      put(list, failure(listing.error), h("p", { class: "muted" }, `${signedIn.get().user} may read:`), h("ul", { class: "keys-list" }, links));
    }

    const linkTo = (prefix, key = "") => href("keys", [], { prefix: shown(prefix), key, flat: place.flat ? "1" : "", find: place.find });

    function drawTrail() {
      const parts = crumbs(place.prefix, shown);
      put(
        trail,
        h("li", {}, h("a", { href: linkTo(new Uint8Array()) }, "all keys")),
        parts.map((part, index) => h("li", {}, "› ", h("a", { href: linkTo(part.path), "aria-current": index === parts.length - 1 ? "location" : null }, part.name))),
      );
    }

    function draw() {
      add.hidden = !editing.get();
      header.querySelector(".muted")?.remove();
      const focused = list.contains(document.activeElement) ? document.activeElement.dataset.row : null;
      if (listing.error) {
        put(list, failure(listing.error));
        if (listing.error.code === 7) offerAllowed(listing);
        return;
      }
      const rows = listing.rows.map(drawRow);
      listing.touched.clear();
      put(
        list,
        listing.fast && h("p", { class: "failure soft" }, "Keys here change faster than they can be read. ", button("Read again", open, { small: true })),
        rows.length ? h("ul", { class: "keys-list", "aria-label": "Keys" }, rows) : !listing.loading && nothing(),
        h(
          "p",
          { class: "row muted", role: "status" },
          listing.loading ? "Reading…" : rows.length ? `${plural(rows.length, "row")}${listing.next ? ", more below" : ""}` : "",
          !listing.loading && listing.next && button(place.find ? "Search on" : "Show more", () => listing.load(listing.next, false), { small: true }),
        ),
      );
      if (focused) [...list.querySelectorAll("[data-row]")].find((one) => one.dataset.row === focused)?.focus();
    }

    function nothing() {
      const prefix = shown(place.prefix);
      if (place.find) return empty(`No value ${listing.next ? "that was read so far " : ""}contains ${place.find}`);
      return prefix ? empty(`No key begins with ${prefix}`) : empty("No keys yet.", "raftkvctl put hello world");
    }

    function drawRow(row) {
      const id = shown(row.path);
      const name = listing.flat ? id : shown(row.path.slice(place.prefix.length)) || id;
      const more = row.isFolder ? (row.isMore ? `${row.count}+ keys` : plural(row.count, "key")) : "";
      const target = row.isFolder ? linkTo(row.path) : linkTo(place.prefix, id);
      const current = !row.isFolder && id === place.key;
      return h(
        "li",
        { class: listing.touched.has(id) ? "changed" : null },
        h(
          "a",
          { href: target, class: row.isFolder ? "folder" : null, "aria-current": current ? "true" : null, data: { row: id }, title: id },
          icon(row.isFolder ? FOLDER : LEAF),
          h("span", { class: "name" }, name),
          h("span", { class: "more" }, more || (row.kv ? `rev ${row.kv.mod}` : "")),
        ),
      );
    }

    form.addEventListener("submit", (event) => {
      event.preventDefault();
      seek();
    });
    const seek = () => move({ prefix: search.value, find: within.value, key: "" });
    for (const { input } of [search, within])
      input.addEventListener("input", () => {
        clearTimeout(typed);
        typed = setTimeout(seek, 300);
      });
    let typed = null;
    scope.on(shortcut("u", "One level up", () => move({ prefix: shown(above(place.prefix)), key: "" })));
    scope.on(shortcut("r", "Read again", open));
    scope.on(shortcut("n", "New key (when editing)", () => editing.get() && add.click()));
    scope.on(editing.on(() => draw()));
    scope.on(() => listing?.close());
    scope.on(() => stopDetail());
    scope.on(() => clearTimeout(typed));
    update(route);
    return { update };
  },
});
