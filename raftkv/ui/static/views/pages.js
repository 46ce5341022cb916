// Long lists in pages: a table, a filter, and how to go on. The rows are in the page already; see `store.js` for those
// that are read page by page.

import { h, put, say } from "../frame/dom.js";
import { button, field, table } from "../frame/parts.js";

const ROWS = 50;

/** Buttons for going through pages: `update({ text, before, next })`, where `before` and `next` are functions or null. */
export function pager(label) {
  let now = { before: null, next: null };
  const text = h("span", { class: "muted" });
  const before = button("Newer", () => now.before?.(), { small: true });
  const next = button("Older", () => now.next?.(), { small: true });
  const element = h("div", { class: "pager", role: "group", "aria-label": label }, before, next, text);
  return {
    element,
    update({ text: words, before: toBefore, next: toNext, names = ["Newer", "Older"] }) {
      now = { before: toBefore, next: toNext };
      before.disabled = !toBefore;
      next.disabled = !toNext;
      say(before, names[0]);
      say(next, names[1]);
      say(text, words);
      element.hidden = !toBefore && !toNext;
    },
  };
}

/** A table of which one page is shown: `update(rows)`; the rest as for `table`. */
export function pagedTable(options) {
  const grid = table(options);
  const pages = pager(`Pages of ${options.label}`);
  let all = [];
  let first = 0;
  function show() {
    if (first >= all.length) first = Math.max(0, Math.floor((all.length - 1) / ROWS) * ROWS);
    const end = Math.min(first + ROWS, all.length);
    grid.update(all.slice(first, end));
    pages.update({
      text: `${first + 1} to ${end} of ${all.length.toLocaleString("en-US")}`,
      before: first > 0 ? () => turn(-ROWS) : null,
      next: end < all.length ? () => turn(ROWS) : null,
      names: ["Before", "Next"],
    });
  }
  function turn(by) {
    first = Math.max(0, first + by);
    show();
  }
  return {
    element: h("div", { class: "paged" }, grid.element, pages.element),
    update(rows) {
      all = rows;
      show();
    },
  };
}

/** A field that filters by a part of a name: `matches(text)`; `onChange()` when it was typed in. */
export function filter(label, onChange) {
  const input = field(label, { type: "search", "data-search": true });
  input.input.addEventListener("input", onChange);
  return { element: input.element, matches: (text) => text.toLowerCase().includes(input.value.toLowerCase()) };
}

/** Lines of a name and a value each: `update([[name, value], ...])`. */
export function facts() {
  const element = h("dl", { class: "pairs" });
  let before = "";
  return {
    element,
    update(pairs) {
      const now = JSON.stringify(pairs);
      if (now === before) return;
      before = now;
      put(element, pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
    },
  };
}
