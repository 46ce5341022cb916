// Two drawings in SVG: the time line of a run, and what a checkpoint descends from. Where things lie is decided by
// `model/drawings.js`; colours come from classes, so that both themes hold. What a drawing shows stands in tables too.

import { svg } from "../frame/dom.js";
import { href } from "../frame/router.js";
import { lineageLayout, timelineLayout } from "../model/drawings.js";
import { clock } from "../model/words.js";

const WIDTH = 1000;
const LABEL_MAX = 160;
const LETTER = 7;
const RIGHT = 14;
const ROW = 24;
const TOP = 26;
const TICKS = 5;
const COLOURS = 6;
const BOX = { width: 150, height: 46, across: 172, down: 66 };

const text = (x, y, words, props = {}) => svg("text", { x, y, ...props }, words);
const short = (words, most) => (words.length > most ? `${words.slice(0, most - 1)}…` : words);

/** The time line of a run: a lane for each node, a bar for each generation, crosses for faults, diamonds for commits. */
export function timelineDrawing(history, when) {
  const layout = timelineLayout(history, when);
  const left = Math.min(LABEL_MAX, 20 + LETTER * Math.max(7, ...layout.lanes.map((lane) => nameOf(lane).length)));
  const x = (at) => left + at * (WIDTH - left - RIGHT);
  const bottom = TOP + layout.lanes.length * ROW;
  const height = bottom + 46;
  const label = `Timeline of run ${history.run_id}: ${layout.generations.map((one) => one.text).join(". ")}`;
  const commits = bottom + 12;
  return svg(
    "svg", { class: "timeline", viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": label },
    layout.generations.map((one) => generation(one, x, bottom)),
    layout.lanes.map((lane, row) => laneOf(lane, TOP + row * ROW, x)),
    layout.commits.length > 0 && text(left - 10, commits + 4, "commits", { class: "label", "text-anchor": "end" }),
    layout.commits.map((one) => commit(one, x(one.at), commits)),
    ticks(layout, x, bottom + 38),
    layout.hidden > 0 && text(left - 10, TOP - 11, `and ${layout.hidden} more`, { class: "label", "text-anchor": "end" }),
  );
}

function generation(one, x, bottom) {
  const from = x(one.at);
  return svg(
    "g", { class: "generation" },
    svg("line", { x1: from, x2: from, y1: TOP - 8, y2: bottom }),
    text(from + 3, TOP - 11, `g${one.generation}`),
    one.isBroken && svg("line", { class: "end", x1: x(one.to), x2: x(one.to), y1: TOP - 8, y2: bottom }),
    svg("title", {}, one.text),
  );
}

const nameOf = (lane) => `${short(lane.host, 14)}${lane.isThere ? "" : lane.cause ? " †" : " (left)"}`;

function laneOf(lane, y, x) {
  const state = lane.isThere ? "there" : lane.cause ? "dead" : "left";
  const bars = lane.bars.map((bar) => {
    const width = Math.max(2, x(bar.to) - x(bar.from));
    const words = `${/^\d+$/.test(bar.ranks) ? "rank" : "ranks"} ${bar.ranks}`;
    return svg(
      "g", {},
      svg("rect", { class: `bar g${bar.generation % COLOURS}`, x: x(bar.from), y: y + 4, width, height: ROW - 8, rx: 3 }),
      width > 60 && text(x(bar.from) + 6, y + 16, words, { class: "ranks" }),
      svg("title", {}, `${lane.id}: generation ${bar.generation}, ${words}`),
    );
  });
  const faults = lane.faults.map((fault) => {
    const [at, middle] = [x(fault.at), y + ROW / 2];
    const cross = `M${at - 5} ${middle - 5}l10 10m0 -10l-10 10`;
    return svg("g", {}, svg("path", { class: fault.isRoot ? "fault root" : "fault", d: cross }), svg("title", {}, fault.text));
  });
  const words = lane.isThere ? `${lane.id} is there` : `${lane.id} is gone${lane.cause ? `: ${lane.cause}` : ""}`;
  return svg(
    "g", { class: `lane ${state}` },
    svg("line", { class: "track", x1: x(0), x2: x(1), y1: y + ROW / 2, y2: y + ROW / 2 }),
    text(x(0) - 10, y + 16, nameOf(lane), { class: "label", "text-anchor": "end" }),
    svg("title", {}, words), bars, faults,
  );
}

function commit(one, x, y) {
  return svg("g", {}, svg("path", { class: "commit", d: `M${x} ${y - 5}l5 5l-5 5l-5 -5z` }), svg("title", {}, one.text));
}

function ticks({ begin, until }, x, y) {
  return Array.from({ length: TICKS }, (_, place) => {
    const at = place / (TICKS - 1);
    const anchor = place === 0 ? "start" : place === TICKS - 1 ? "end" : "middle";
    return text(x(at), y, clock(begin + at * (until - begin)), { class: "label", "text-anchor": anchor });
  });
}

/** What a checkpoint descends from, and what descends from it: a lane for each run, the oldest at the left. */
export function lineageDrawing(chain, children, lost) {
  const layout = lineageLayout(chain, children, lost);
  const width = layout.columns * BOX.across - (BOX.across - BOX.width) + 4;
  const rows = new Map();
  const height = placeBoxes(layout.boxes, rows) * BOX.down - (BOX.down - BOX.height) + 4;
  const at = layout.boxes.map((box, number) => [2 + box.column * BOX.across, 2 + rows.get(number) * BOX.down]);
  const names = layout.boxes.map((box) => (box.more ? `${box.more} more` : `${box.run_id} step ${box.step}`));
  return svg(
    "svg", { class: "lineage", viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": `Lineage: ${names.join(", ")}` },
    layout.arrows.map(([from, to]) => arrow(at[from], at[to])),
    layout.boxes.map((box, number) => boxOf(box, ...at[number])),
  );
}

/** Give every box a row: that of its lane, or the next one down if its column is taken there. Returns how many there are. */
function placeBoxes(boxes, rows) {
  const taken = new Set();
  let most = 1;
  boxes.forEach((box, number) => {
    let row = box.lane;
    while (taken.has(`${box.column} ${row}`)) row++;
    taken.add(`${box.column} ${row}`);
    rows.set(number, row);
    most = Math.max(most, row + 1);
  });
  return most;
}

function arrow([fromX, fromY], [toX, toY]) {
  const [x1, y1, x2, y2] = [fromX + BOX.width, fromY + BOX.height / 2, toX, toY + BOX.height / 2];
  const bend = (x1 + x2) / 2;
  const line = `M${x1} ${y1}C${bend} ${y1} ${bend} ${y2} ${x2 - 6} ${y2}`;
  return svg("g", { class: "arrow" }, svg("path", { d: line }), svg("path", { class: "tip", d: `M${x2} ${y2}l-8 -4v8z` }));
}

function boxOf(box, x, y) {
  const parts = [
    svg("rect", { x, y, width: BOX.width, height: BOX.height, rx: 7 }),
    text(x + 10, y + 19, box.more ? `${box.more} more` : `step ${box.step}`, { class: "step" }),
    text(x + 10, y + 36, short(box.role === "lost" ? `${box.run_id}, deleted` : box.run_id, 21), { class: "label" }),
    svg("title", {}, `${box.run_id}, step ${box.step} (${box.kind})`),
  ];
  if (box.role === "lost" || box.more) return svg("g", { class: `box ${box.role}` }, parts);
  const to = href("checkpoints", [box.run_id, box.kind, String(box.step)]);
  const name = `${box.run_id}, step ${box.step} (${box.kind})${box.role === "chosen" ? ", shown here" : ""}`;
  return svg("a", { class: `box ${box.role}`, href: to, "aria-label": name }, parts);
}
