// One checkpoint: what its record says, why it is kept, what it descends from and what descends from it.

import { h, put } from "../frame/dom.js";
import { button, empty, failure, head, section } from "../frame/parts.js";
import { href } from "../frame/router.js";
import { watchMap } from "../frame/watch.js";
import { childrenOf, details, holdsByCheckpoint, lineageRow, readCheckpoint, registryKeys, stepText } from "../model/checkpoints.js";
import { facts, pagedTable } from "./pages.js";
import { lineageDrawing } from "./drawings.js";
import { range } from "./store.js";

const AT_ONCE = 200;
const AHEAD = 50;

const cell = (place) => (one) => lineageRow(one)[place];
const COLUMNS = [
  { title: "run", value: cell(0), mono: true },
  { title: "step", value: cell(1), num: true },
  { title: "kind", value: cell(2) },
  { title: "committed", value: cell(3) },
  { title: "size", value: cell(4), num: true },
  { title: "metrics", value: cell(5), wide: true },
];

/** Show a checkpoint, kept current by a watch of its record and of what holds it. */
export function mountCheckpoint(root, { run, kind, step }, scope) {
  const keys = registryKeys(run);
  const found = { checkpoint: null, held: [], lineage: [], lost: null };
  const note = h("div", { role: "status" });
  const list = facts();
  const drawing = h("div", { class: "scroll drawing", tabindex: "0", role: "region", "aria-label": "Lineage, drawing" });
  const table = pagedTable({
    columns: COLUMNS, key: (one) => `${one.run_id} ${one.kind} ${one.step}`, label: "Lineage", none: "Nothing is known.",
    href: (one) => href("checkpoints", [one.run_id, one.kind, String(one.step)]),
  });
  const more = h("div", {});
  const links = [h("a", { href: href("checkpoints", [run, kind]), class: "button" }, "All of this run")];
  root.append(
    head(`${run}, step ${step}`, { actions: links }), note, list.element,
    section("Ancestors and descendants", drawing, table.element, more),
  );

  function draw() {
    if (!found.checkpoint) return;
    list.update(details(found.checkpoint, found.held));
    if (!found.lineage.length) return;
    put(drawing, lineageDrawing(found.lineage, childrenOf(found.held), found.lost));
    drawing.scrollLeft = drawing.scrollWidth; // what is shown here is at the right
    table.update(found.lineage);
    put(more, found.goOn && button("Go on", () => follow(found.goOn)));
  }

  async function follow(chain) {
    try {
      Object.assign(found, await ancestors(chain, scope));
    } catch (error) {
      if (!scope.signal.aborted) put(note, failure(error));
    }
    draw();
  }

  const onRecord = (map, { error }) => {
    const item = map.get(keys.record(kind, step));
    const now = item && readCheckpoint(item.value);
    if (error) put(note, failure(error));
    else if (!now) put(note, empty(`There is no checkpoint of step ${step}${found.checkpoint ? " any more" : ""}.`, "The list of this run lists the runs."));
    else {
      const isFirst = found.checkpoint === null;
      put(note);
      found.checkpoint = now;
      if (isFirst) follow([now]);
      else found.lineage[0] = now;
    }
    draw();
  };
  scope.on(watchMap(keys.record(kind, step), onRecord));
  const onHolds = (map) => {
    found.held = holdsByCheckpoint(keys, map.values()).get(`${kind} ${step}`) ?? [];
    draw();
  };
  scope.on(watchMap(keys.holdsOf(kind, step), onHolds));
}

/**
 * Go on with a chain towards its oldest ancestor, some hundred at once: `{ lineage, lost, goOn }`. Ancestors in one run
 * lie side by side in the store, so those before a parent are read along with it.
 */
async function ancestors(chain, scope) {
  const lineage = [...chain];
  const known = new Map();
  const seen = new Set(lineage.map((one) => registryKeys(one.run_id).record(one.kind, one.step)));
  for (let parent = lineage.at(-1).parent; parent; parent = lineage.at(-1).parent) {
    const keys = registryKeys(parent.run_id);
    const key = keys.record(parent.kind, parent.step);
    if (seen.has(key)) break;
    seen.add(key);
    if (!known.has(key)) await readAhead(keys, parent, known, scope);
    const one = known.get(key) ?? null;
    if (one === null) return { lineage, lost: parent, goOn: null };
    lineage.push(one);
    if (lineage.length - chain.length >= AT_ONCE) return { lineage, lost: null, goOn: one.parent && lineage };
  }
  return { lineage, lost: null, goOn: null };
}

async function readAhead(keys, { kind, step }, known, scope) {
  const prefix = keys.recordsOf(kind);
  const { items } = await range({ key: prefix, end: `${prefix}${stepText(step)}\0`, limit: AHEAD, descending: true }, scope);
  for (const item of items) known.set(item.key, readCheckpoint(item.value));
}

