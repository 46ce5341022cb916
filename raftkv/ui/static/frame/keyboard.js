// Shortcuts: `shortcut("g k", "Keys", work)`. `?` shows them all. None while a text is typed or a dialog is open.

import { h } from "./dom.js";
import { dialog } from "./parts.js";

const known = new Map();
let prefix = "";
let timer = null;

/** Register keys ("t", or "g k": one after the other). Returns what takes them away: `scope.on(shortcut(...))`. */
export function shortcut(keys, text, work, group = "This view") {
  const one = { keys, text, work, group };
  known.set(keys, one);
  return () => {
    if (known.get(keys) === one) known.delete(keys);
  };
}

const typing = (target) => target.closest?.("input, textarea, select, [contenteditable]");

/** Begin to listen. */
export function startKeyboard() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (event.key === "Escape" && typing(event.target) && !event.target.closest("dialog")) event.target.blur();
    if (typing(event.target) || document.querySelector("dialog[open]")) return;
    const both = prefix ? `${prefix} ${event.key}` : event.key;
    const found = known.get(both) ?? known.get(event.key);
    clearTimeout(timer);
    prefix = "";
    if (found) {
      event.preventDefault();
      found.work();
    } else if ([...known.keys()].some((keys) => keys.startsWith(`${event.key} `))) {
      prefix = event.key;
      timer = setTimeout(() => (prefix = ""), 1200);
    }
  });
  shortcut("?", "Show the shortcuts", help, "Everywhere");
  shortcut("/", "Search in this view", () => document.querySelector("#main [data-search]")?.focus(), "Everywhere");
  shortcut("j", "Next row", () => step(1), "Tables");
  shortcut("k", "Row before", () => step(-1), "Tables");
}

function step(by) {
  const links = [...document.querySelectorAll("#main tbody a, #main [data-row]")].filter((one) => one.offsetParent);
  if (!links.length) return;
  const at = links.indexOf(document.activeElement);
  links[Math.max(0, Math.min(links.length - 1, at < 0 ? 0 : at + by))].focus();
}

/** Show all shortcuts. */
export function help() {
  const groups = Map.groupBy ? Map.groupBy(known.values(), (one) => one.group) : byGroup([...known.values()]);
  const parts = [...groups].map(([group, list]) => [
    h("h3", {}, group),
    h(
      "dl",
      { class: "keys" },
      list.map((one) => h("div", {}, h("dt", {}, one.keys.split(" ").map((key) => h("kbd", {}, key))), h("dd", {}, one.text))),
    ),
  ]);
  return dialog("Shortcuts", h("div", { class: "shortcuts" }, parts), [{ text: "Close", kind: "primary" }]);
}

function byGroup(list) {
  const groups = new Map();
  for (const one of list) groups.set(one.group, [...(groups.get(one.group) ?? []), one]);
  return groups;
}
