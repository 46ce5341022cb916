// One key: its value as text, JSON or hex, its revisions back to its creation or the last compaction, and what changed
// between two of them; what changes it (when editing is on) is a txn on the revision that was seen.

import { KeyValue, base64, hexdump, leaseHex, shown, unshown } from "../frame/bytes.js";
import { call } from "../frame/call.js";
import { diffLines, folded } from "../frame/diff.js";
import { h, put } from "../frame/dom.js";
import { count, plural, size } from "../frame/format.js";
import { badge, button, choice, confirmed, dialog, empty, failure, field, section, toast } from "../frame/parts.js";
import { href } from "../frame/router.js";
import { editing } from "../frame/session.js";
import { watchKey, watchRange } from "../frame/watch.js";

const OLDER = 10;
const LIVES_MAX = 1000;
const SHOWN_MAX = 64 * 1024;
const MOVED = "the key was changed meanwhile: close this, check the new value, and try again";

/** The text of a value for a format: "text", "json" or "hex"; null: it has no such form. */
export function rendered(kv, format) {
  if (format === "hex") return hexdump(kv.value, SHOWN_MAX);
  if (format === "text") return kv.text;
  const json = kv.json;
  return json === undefined ? null : JSON.stringify(json, null, 2);
}

/** The format that says most of a value. */
export const bestFormat = (kv) => {
  const json = kv.json;
  if (json !== undefined && typeof json === "object") return "json";
  return kv.text === null ? "hex" : "text";
};

/** Both values in one form that can be compared line by line. */
export function comparable(before, after) {
  const both = (format) => [before, after].map((kv) => (kv ? rendered(kv, format) : ""));
  for (const format of ["json", "text"]) {
    const found = both(format);
    if (found.every((text) => text !== null)) return found;
  }
  return both("hex");
}

function valueBox() {
  let kv = null;
  let format = "";
  let whole = false;
  const formats = choice("Form of the value", [["text", "Text"], ["json", "JSON"], ["hex", "Hex"]], "text", (name) => {
    format = name;
    draw();
  });
  const box = h("pre", { class: "value", tabindex: "0", "aria-label": "Value" });
  const note = h("p", { class: "muted" });
  const all = button("Show all", () => ((whole = true), draw()), { small: true });
  const copy = button("Copy", () => navigator.clipboard?.writeText(box.textContent).then(() => toast("Copied")), { small: true });

  function draw() {
    const name = format || bestFormat(kv);
    formats.set(name);
    const text = rendered(kv, name);
    box.classList.toggle("hex", name === "hex");
    note.textContent = text === null ? `The value is not ${name === "json" ? "JSON" : "UTF-8 text"}; see it as hex.` : "";
    const cut = !whole && text !== null && text.length > SHOWN_MAX;
    box.textContent = text === null ? "" : cut ? text.slice(0, SHOWN_MAX) : text;
    box.hidden = text === null;
    all.hidden = !cut;
    if (text === "") note.textContent = "The value is empty.";
  }

  return {
    element: h("div", { class: "part" }, h("div", { class: "row" }, formats.element, copy, all), box, note),
    set(next) {
      kv = next;
      draw();
    },
  };
}

/** Show a key in `root` and keep it as it is in the store. Returns what stops it. */
export function detail(root, keyText) {
  const keyBytes = unshown(keyText);
  const key = base64(keyBytes);
  const versions = []; // the newest first
  let present = null;
  let end = ""; // why there is nothing older
  let from = 1;
  let to = 0;
  let stopLives = null;
  const value = valueBox();
  const facts = h("dl", { class: "sheet" });
  const actions = h("div", { class: "actions" });
  const title = h("div", { class: "head" }, h("h2", {}, keyText), actions);
  const past = h("div", { class: "part" });
  const trouble = h("div");
  const card = h("div", { class: "card detail" }, title, trouble, facts, value.element, past);
  put(root, card);

  function take(kv, event = kv) {
    present = kv;
    if (event && versions[0]?.mod !== event.mod) versions.unshift(event);
    draw();
  }

  /** All that is left of the key's history, with earlier lives of it: a watch from the last compaction on. */
  function lives() {
    end = "All since the last compaction.";
    stopLives = watchRange(
      { key },
      {
        onEvents(events) {
          const all = new Map(versions.map((kv) => [kv.mod, kv]));
          for (const event of events) if (!all.has(event.kv.mod)) all.set(event.kv.mod, marked(event));
          const newest = [...all.values()].sort((a, b) => b.mod - a.mod).slice(0, LIVES_MAX);
          versions.splice(0, versions.length, ...newest);
          if (!card.isConnected) put(root, card);
          draw();
        },
        onError: (error) => put(trouble, failure(error)),
      },
      { from: 1, isHistory: true },
    );
    draw();
  }

  function draw() {
    put(
      actions,
      present ? null : versions.length > 0 && badge("deleted", "bad"),
      editing.get() && present && button("Edit", () => edit(present)),
      editing.get() && present && button("Delete", () => remove(present), { kind: "danger" }),
    );
    value.element.hidden = !present;
    facts.hidden = !present;
    if (present) {
      value.set(present);
      drawFacts();
    }
    drawPast();
  }

  function drawFacts() {
    const lease = present.lease !== "0" && h("a", { href: href("leases", [leaseHex(present.lease)]) }, leaseHex(present.lease));
    const rows = [
      ["Changed at", `rev ${count(present.mod)}`],
      ["Created at", `rev ${count(present.create)}`],
      ["Version", count(present.version)],
      ["Size", size(present.size)],
      ["Lease", lease || "none"],
    ];
    put(facts, rows.map(([name, content]) => h("div", {}, h("dt", {}, name), h("dd", {}, content))));
  }

  async function older() {
    try {
      for (let step = 0; step < OLDER && !end; step++) {
        const last = versions.at(-1);
        if (last.version <= 1) break;
        const answer = await call("/v3/kv/range", { key, revision: String(last.mod - 1) });
        if (!answer.kvs?.length) end = "Nothing older.";
        else versions.push(new KeyValue(answer.kvs[0]));
      }
    } catch (error) {
      end = /compacted/.test(error.message) ? "Older revisions were compacted." : error.line;
    }
    drawPast();
  }

  function drawPast() {
    if (!versions.length) {
      put(past);
      return;
    }
    const first = versions.at(-1);
    if (!end && first.version <= 1 && !first.deleted) end = `Created at revision ${count(first.create)}.`;
    const pick = (name, chosen, index, set) =>
      h("input", {
        type: "radio",
        name,
        checked: index === chosen,
        "aria-label": `${name === "diff-from" ? "Compare from" : "Compare to"} revision ${versions[index].mod}`,
        onChange: () => {
          set(index);
          drawPast();
        },
      });
    const rows = versions.map((kv, index) =>
      h(
        "tr",
        {},
        h("td", {}, pick("diff-from", from, index, (one) => (from = one))),
        h("td", {}, pick("diff-to", to, index, (one) => (to = one))),
        h("td", { class: "num" }, count(kv.mod)),
        h("td", { class: "num" }, kv.deleted ? "–" : count(kv.version)),
        h("td", { class: "num" }, kv.deleted ? "–" : size(kv.size)),
        h("td", { class: "mono clip" }, kv.deleted ? badge("deleted", "bad") : preview(kv)),
      ),
    );
    const heads = ["From", "To", "Revision", "Version", "Size", "Value"];
    const grid = h(
      "table",
      { "aria-label": "Revisions of the key" },
      h("thead", {}, h("tr", {}, heads.map((name, index) => h("th", { scope: "col", class: index > 1 && index < 5 ? "num" : null }, name)))),
      h("tbody", {}, rows),
    );
    put(
      past,
      section(
        "History",
        h("div", { class: "table history" }, h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "History, table" }, grid)),
        h(
          "p",
          { class: "row muted" },
          end || button("Older", older, { small: true }),
          end && !stopLives && button("Earlier lives of this key", lives, { small: true }),
        ),
        versions[from] && versions[to] && from !== to && diffBox(versions[from], versions[to]),
      ),
    );
  }

  const stop = watchKey(keyBytes, {
    onSnapshot(kvs) {
      if (!kvs.length && !versions.length) {
        const look = button("Show its last value", lives, { small: true });
        put(root, empty(`There is no key ${keyText}`, "It may have been deleted, or its lease has ended.", look));
        return;
      }
      take(kvs[0] ?? null);
      if (versions.length === 1 && versions[0].version > 1) older();
    },
    onEvents(events) {
      for (const event of events) {
        if (!card.isConnected) put(root, card);
        from = Math.min(from + (from > 1 || to > 0 ? 1 : 0), versions.length);
        if (to > 0) to += 1;
        take(event.type === "put" ? event.kv : null, marked(event));
      }
    },
    // What was read stays; only news are missing.
    onError: (error) => (present ? put(trouble, failure(error)) : put(root, failure(error))),
  });
  const stopEditing = editing.on(draw);
  return () => {
    stop();
    stopLives?.();
    stopEditing();
  };
}

function marked({ type, kv }) {
  kv.deleted = type === "delete";
  return kv;
}

const preview = (kv) => (kv.text ?? hexdump(kv.value, 16).slice(8)).replace(/\s+/g, " ").slice(0, 120);

function diffBox(before, after) {
  const [a, b] = comparable(before, after);
  const lines = folded(diffLines(a, b));
  const changed = lines.filter((line) => line.kind === "+" || line.kind === "-").length;
  const names = { "+": "added", "-": "removed", "…": "skipped" };
  return h(
    "div",
    { class: "part" },
    h("p", { class: "muted" }, `Revision ${count(before.mod)} to ${count(after.mod)}: ${changed ? plural(changed, "changed line") : "the values are equal"}`),
    changed > 0 &&
      h(
        "div",
        { class: "diff mono", tabindex: "0", role: "region", "aria-label": "Changes of the value" },
        lines.map((line) =>
          h("div", { class: names[line.kind] ?? null }, line.kind === "…" ? `  … ${plural(line.count, "equal line")}` : `${line.kind} ${line.text}`),
        ),
      ),
  );
}

async function txn(compare, success) {
  const answer = await call("/v3/kv/txn", { compare: [compare], success: [success] });
  if (!answer.succeeded) throw new Error(MOVED);
}

const asSeen = (kv) => ({ key: kv.id, target: "MOD", result: "EQUAL", mod_revision: String(kv.mod) });

function edit(kv) {
  if (kv.text === null) {
    return dialog("This value is not text", h("p", {}, "A page can only write text. In a terminal: raftkvctl put KEY < file"), [{ text: "Close", kind: "primary" }]);
  }
  const text = field("Value", { lines: 12, value: kv.text });
  const note = kv.lease !== "0" && h("p", { class: "muted" }, `It stays attached to lease ${leaseHex(kv.lease)}.`);
  return dialog(
    `Edit ${kv.key}`,
    h("div", { class: "fields" }, text.element, note),
    [
      { text: "Cancel" },
      {
        text: "Save",
        kind: "primary",
        run: async () => {
          await txn(asSeen(kv), { request_put: { key: kv.id, value: base64(text.value), lease: kv.lease } });
          toast(`Saved ${kv.key}`);
        },
      },
    ],
    { wide: true },
  );
}

async function remove(kv) {
  const done = await confirmed(`Delete ${kv.key}?`, "Its present value is kept in the history until the next compaction.", {
    run: () => txn(asSeen(kv), { request_delete_range: { key: kv.id } }),
  });
  if (done) toast(`Deleted ${kv.key}`);
}

/** Ask for a new key; resolves to its text, or null. */
export function create(prefix) {
  const key = field("Key", { value: prefix, required: true });
  const text = field("Value", { lines: 8 });
  const lease = field("Lease (hex, empty for none)", { pattern: "[0-9a-fA-F]{1,16}" });
  return dialog(
    "New key",
    h("div", { class: "fields" }, key.element, text.element, lease.element),
    [
      { text: "Cancel" },
      {
        text: "Create",
        kind: "primary",
        run: async () => {
          const id = base64(unshown(key.value));
          const absent = { key: id, target: "CREATE", result: "EQUAL", create_revision: "0" };
          const lease64 = lease.value ? BigInt.asIntN(64, BigInt(`0x${lease.value}`)).toString() : "0";
          const answer = await call("/v3/kv/txn", {
            compare: [absent],
            success: [{ request_put: { key: id, value: base64(text.value), lease: lease64 } }],
          });
          if (!answer.succeeded) throw new Error(`${key.value} is there already: edit it`);
          toast(`Created ${key.value}`);
          return shown(unshown(key.value));
        },
      },
    ],
    { wide: true },
  );
}
