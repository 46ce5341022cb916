// What views are made of: tables, times, badges, empty states, errors, toasts, dialogs, curves.

import { lineOf, needsSignIn } from "./call.js";
import { h, put, say, svg } from "./dom.js";
import { ago } from "./format.js";

/** A heading with its line of text and buttons at the right. */
export function head(title, { text = "", actions = [] } = {}) {
  return h(
    "header",
    { class: "head" },
    h("div", {}, h("h1", {}, title), text && h("p", { class: "muted" }, text)),
    h("div", { class: "actions" }, actions),
  );
}

/** A part of a view, under a heading of its own. */
export function section(title, ...children) {
  const heading = h("h2", {}, title);
  return h("section", { class: "part" }, heading, ...children);
}

/** A short label with a colour: "good", "warn", "bad", "info" or "". Colour is never all that it says. */
export const badge = (text, kind = "") => h("span", { class: `badge ${kind}` }, text);

/** A dot before a word: the state of something. */
export const state = (text, kind = "") => h("span", { class: "state" }, h("span", { class: `dot ${kind}` }), text);

/** What stands where there is nothing yet: one line, and what to do. */
export const empty = (text, advice = "", ...more) =>
  h("div", { class: "empty" }, h("p", {}, text), advice && h("p", { class: "muted" }, advice), ...more);

/** A command that can be copied. */
export function command(text) {
  const copy = button("Copy", () => navigator.clipboard?.writeText(text).then(() => toast("Copied")), { small: true });
  return h("p", { class: "command" }, h("code", {}, text), copy);
}

/** An error in one line with what to do; with users on, a button that opens the sign-in. */
export function failure(error) {
  const line = h("p", { class: "failure", role: "alert" }, h("span", { class: "dot bad" }), lineOf(error));
  if (needsSignIn(error)) {
    line.append(" ", button("Sign in", () => document.dispatchEvent(new CustomEvent("raftkv:sign-in"))));
  }
  return line;
}

/** A button. `kind`: "", "primary", "danger", "plain". */
export const button = (text, onClick, { kind = "", small = false, ...props } = {}) =>
  h("button", { type: "button", class: `${kind}${small ? " small" : ""}`.trim() || null, onClick, ...props }, text);

/** A time that says how long ago it was and stays right; the exact time is its title. Milliseconds since the epoch. */
export function time(at) {
  const date = new Date(at);
  const exact = date.toISOString();
  return h("time", { datetime: exact, title: date.toLocaleString(), data: { at: String(at) } }, ago(at));
}

setInterval(() => {
  for (const element of document.querySelectorAll("time[data-at]")) say(element, ago(Number(element.dataset.at)));
}, 1000);

/** A figure with its name; `set(value, note)` changes it. */
export function figure(name, { spark = null } = {}) {
  const value = h("strong", {}, "–");
  const note = h("span", { class: "muted" });
  const element = h("div", { class: "figure" }, h("span", { class: "name" }, name), value, note, spark?.element);
  return {
    element,
    set(text, more = "") {
      say(value, text);
      say(note, more);
    },
  };
}

/** A table that keeps its rows: `update(rows)` changes what has changed, so focus and selections stay.
 *
 *  columns: [{ title, value: (row) => text, render?: (row) => Node, num?: true, mono?: true, wide?: true, sort?: true }].
 *  `value` decides whether a cell is drawn again. `key(row)`: what a row is; `href(row)`: where its first cell leads.
 */
export function table({ columns, key, href = null, label, none = "Nothing here.", sorted = null }) {
  const rows = new Map();
  let order = sorted ? { column: columns.find((one) => one.title === sorted.title), down: Boolean(sorted.down) } : null;
  let last = [];
  const body = h("tbody");
  const heads = columns.map((column) => {
    const cell = h("th", { scope: "col", class: column.num ? "num" : null });
    if (column.sort) cell.append(h("button", { type: "button", class: "sorter", onClick: () => turn(column) }, column.title));
    else cell.append(column.title);
    return cell;
  });
  const grid = h("table", { "aria-label": label }, h("thead", {}, h("tr", {}, heads)), body);
  const nothing = typeof none === "string" ? empty(none) : none;
  const element = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${label}, table` }, grid);
  const whole = h("div", { class: "table" }, element, nothing);
  nothing.hidden = true;

  function turn(column) {
    order = { column, down: order?.column === column ? !order.down : Boolean(column.num) };
    update(last);
  }

  function sort(list) {
    columns.forEach((column, index) => {
      const direction = order?.column !== column ? null : order.down ? "descending" : "ascending";
      if (direction) heads[index].setAttribute("aria-sort", direction);
      else heads[index].removeAttribute("aria-sort");
    });
    if (!order?.column) return list;
    const by = order.column.sortBy ?? order.column.value;
    const sign = order.down ? -1 : 1;
    return [...list].sort((a, b) => sign * inOrder(by(a), by(b)));
  }

  function draw(row) {
    const id = key(row);
    let kept = rows.get(id);
    if (!kept) {
      const cells = columns.map((column) =>
        h("td", { class: [column.num && "num", column.mono && "mono", column.wide && "wide"].filter(Boolean).join(" ") || null }),
      );
      kept = { element: h("tr", {}, cells), cells, texts: [] };
      rows.set(id, kept);
    }
    columns.forEach((column, index) => {
      const text = String(column.value(row) ?? "");
      if (kept.texts[index] === text) return;
      kept.texts[index] = text;
      const content = column.render ? column.render(row) : text;
      const link = href && index === 0 ? h("a", { href: href(row) }, content) : content;
      put(kept.cells[index], link);
    });
    return kept.element;
  }

  function update(list) {
    last = list;
    const drawn = sort(list).map(draw);
    const alive = new Set(list.map(key));
    for (const [id, kept] of rows) {
      if (!alive.has(id)) {
        kept.element.remove();
        rows.delete(id);
      }
    }
    drawn.forEach((row, index) => {
      if (body.children[index] !== row) body.insertBefore(row, body.children[index] ?? null);
    });
    nothing.hidden = list.length > 0;
    element.hidden = list.length === 0;
  }

  return { element: whole, update };
}

const inOrder = (a, b) =>
  typeof a === "number" && typeof b === "number" ? a - b : String(a ?? "").localeCompare(String(b ?? ""), "en", { numeric: true });

/** A curve in little room. `set([numbers or null], text)`: the newest is at the right; `text` is what it says in words. */
export function spark(label, { width = 132, height = 30, points = 60 } = {}) {
  const line = svg("path", { class: "line", fill: "none" });
  const area = svg("path", { class: "area" });
  const title = svg("title", {}, label);
  const element = svg(
    "svg",
    { class: "spark", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    title,
    area,
    line,
  );
  return {
    element,
    set(values, text = "") {
      const shown = values.slice(-points);
      const { strokes, fills } = paths(shown, width, height, points);
      line.setAttribute("d", strokes);
      area.setAttribute("d", fills);
      const words = text ? `${label}: ${text}` : label;
      element.setAttribute("aria-label", words);
      say(title, words);
    },
  };
}

/** The paths of a curve; gaps (null) interrupt it. Pure. */
export function paths(values, width, height, points) {
  const top = Math.max(1e-9, ...values.filter((value) => value !== null));
  const x = (index) => (((points - values.length + index) / Math.max(1, points - 1)) * width).toFixed(1);
  const y = (value) => (height - 2 - (value / top) * (height - 5)).toFixed(1);
  const runs = [];
  values.forEach((value, index) => {
    if (value === null) return;
    if (index === 0 || values[index - 1] === null) runs.push([]);
    runs.at(-1).push([x(index), y(value)]);
  });
  const strokes = runs.map((run) => `M${run.map((point) => point.join(" ")).join("L")}`).join("");
  const fills = runs.map(
    (run) => `M${run[0][0]} ${height}L${run.map((point) => point.join(" ")).join("L")}L${run.at(-1)[0]} ${height}Z`,
  );
  return { strokes, fills: fills.join("") };
}

/** A short message at the corner; "bad" ones stay longer. */
export function toast(text, kind = "") {
  const close = () => one.remove();
  const one = h("div", { class: `toast ${kind}` }, h("p", {}, text), button("×", close, { kind: "plain", "aria-label": "Dismiss" }));
  document.getElementById("toasts").append(one);
  setTimeout(close, kind === "bad" ? 12_000 : 4_000);
}

/** A dialog. `body` is a node or several; `actions` are `{ text, kind, run }`, where `run` may return a promise: its
 *  error is shown in the dialog and leaves it open; `false` leaves it open too. Resolves when it is closed. */
export function dialog(title, body, actions = [], { wide = false } = {}) {
  return new Promise((resolve) => {
    const trouble = h("p", { class: "failure", role: "alert", hidden: true });
    const buttons = actions.map((action) =>
      h("button", { type: action.run ? "submit" : "button", class: action.kind ?? null, value: action.text }, action.text),
    );
    const form = h("form", { method: "dialog" }, h("h2", { id: "dialog-title" }, title), body, trouble, h("footer", {}, buttons));
    const box = h("dialog", { "aria-labelledby": "dialog-title", class: wide ? "wide" : null }, form);
    let result = null;

    async function run(action) {
      trouble.hidden = true;
      for (const one of buttons) one.disabled = true;
      try {
        result = action.run ? await action.run() : null;
        if (result !== false) box.close();
      } catch (error) {
        say(trouble, lineOf(error));
        trouble.hidden = false;
      } finally {
        for (const one of buttons) one.disabled = false;
      }
    }

    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const action = actions.find((one) => one.text === event.submitter?.value) ?? actions.find((one) => one.run);
      if (action) run(action);
    });
    buttons.forEach((one, index) => {
      if (!actions[index].run) one.addEventListener("click", () => box.close());
    });
    box.addEventListener("close", () => {
      box.remove();
      resolve(result);
    });
    document.body.append(box);
    box.showModal();
  });
}

/** Ask before something that cannot be undone; `word` must be typed first where much is lost. Resolves to a boolean. */
export async function confirmed(title, text, { action = "Delete", word = "", run = async () => {} } = {}) {
  const input = word ? field(`Type ${word} to confirm`) : null;
  const done = await dialog(title, h("div", { class: "fields" }, h("p", {}, text), input?.element), [
    { text: "Cancel" },
    {
      text: action,
      kind: "danger",
      run: async () => {
        if (input && input.value !== word) throw new Error(`the text is not ${word}`);
        await run();
        return true;
      },
    },
  ]);
  return done === true;
}

let fields = 0;

/** A labelled input; `value` reads it. `lines` makes it a text area. */
export function field(label, { value = "", lines = 0, type = "text", note = "", ...props } = {}) {
  const id = `field-${++fields}`;
  const common = { id, value, autocomplete: "off", spellcheck: "false", "aria-describedby": note ? `${id}-note` : null };
  const input = lines ? h("textarea", { ...common, rows: lines, ...props }) : h("input", { ...common, type, ...props });
  const element = h(
    "div",
    { class: "field" },
    h("label", { for: id }, label),
    input,
    note && h("p", { class: "muted", id: `${id}-note` }, note),
  );
  return {
    element,
    input,
    get value() {
      return input.value;
    },
  };
}

/** A choice among a few, as a group of buttons. `set(value)`; `onChange(value)`. */
export function choice(label, options, value, onChange) {
  const buttons = options.map(([name, text]) =>
    h("button", { type: "button", "aria-pressed": String(name === value), onClick: () => onChange(set(name)) }, text),
  );
  function set(name) {
    options.forEach(([one], index) => buttons[index].setAttribute("aria-pressed", String(one === name)));
    return name;
  }
  return { element: h("div", { class: "choice", role: "group", "aria-label": label }, buttons), set };
}
