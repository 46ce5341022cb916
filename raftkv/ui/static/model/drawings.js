/**
 * Where the parts of two drawings lie: the time line of a run, and what a checkpoint descends from. Pure: numbers, no
 * page. `views/` makes SVG of them.
 *
 *     timelineLayout(history, {now})     lanes of nodes, bars of generations, faults, commits, on a scale from 0 to 1
 *     lineageLayout(chain, children)     boxes by column (age) and lane (run), and arrows between them
 */

import {commitsText, endText, rootFault} from "./timeline.js";
import {faultText, firstRanks, ranksText} from "./runs.js";

export const LANES_MAX = 24;
export const GENERATIONS_SHOWN = 12;
const MARKS_MAX = 200;
const CHAIN_END = 1;

/**
 * @param {object} history of a run, with its commits.
 * @param {{now: number, last?: number}} window until when what goes on is drawn, in seconds since 1970; and the index
 *   behind the last generation that is shown.
 * @returns lanes `{id, host, isThere, cause, bars: [{from, to, generation, ranks}], faults: [{at, text}]}`, commits
 *   `{at, text}`, generations `{at, to, generation, text, isBroken}`, ticks, and how many nodes have no lane.
 */
export function timelineLayout(history, {now, last = history.generations.length}) {
  const shown = history.generations.slice(Math.max(0, last - GENERATIONS_SHOWN), last);
  const isOpen = last === history.generations.length;
  const begin = shown[0]?.began.time ?? now;
  const ends = shown.map((one) => one.ended?.time ?? now);
  const until = Math.max(begin + 1, isOpen && history.state?.phase !== "closed" ? now : begin, ...ends);
  const at = (time) => Math.min(1, Math.max(0, (time - begin) / (until - begin)));
  const lanes = new Map();
  const laneOf = (node) => {
    if (!lanes.has(node.id)) lanes.set(node.id, {id: node.id, host: node.host, bars: [], faults: []});
    return lanes.get(node.id);
  };
  const byAge = [...shown].reverse();
  for (const one of byAge) one.members.forEach((member) => laneOf(member));
  if (isOpen) history.present.forEach((node) => laneOf(node));
  for (const one of shown) addBars(one, laneOf, at, one.ended?.time ?? now);
  const nodes = new Map(history.nodes.map((node) => [node.id, node]));
  const all = [...lanes.values()].map((lane) => ({
    ...lane, isThere: nodes.get(lane.id)?.left_revision === 0, cause: nodes.get(lane.id)?.cause ?? "",
  }));
  return {
    begin, until,
    lanes: pickLanes(all), hidden: Math.max(0, all.length - LANES_MAX),
    commits: thinned(shown.flatMap((one) => one.commits)).map((one) => ({
      at: at(one.committed.time), text: `step ${one.step} (${one.kind})`,
    })),
    generations: shown.map((one) => ({
      at: at(one.began.time), to: at(one.ended?.time ?? now), generation: one.generation,
      isBroken: one.ended !== null && !one.closed,
      text: [`generation ${one.generation}`, endText(one), commitsText(one)].filter(Boolean).join("; "),
    })),
  };
}

function addBars(one, laneOf, at, end) {
  const root = rootFault(one);
  const firsts = firstRanks(one.members);
  one.members.forEach((member, place) => {
    const lane = laneOf(member);
    const ranks = ranksText(firsts[place], member.slots);
    lane.bars.push({from: at(one.began.time), to: at(end), generation: one.generation, ranks});
    for (const fault of one.faults.filter((fault) => fault.node === member.id)) {
      lane.faults.push({at: at(fault.time), text: faultText(fault), isRoot: fault === root});
    }
    if (one.faults.length === 0 && one.node === member.id && one.ended && !one.closed) {
      lane.faults.push({at: at(end), text: endText(one), isRoot: true});
    }
  });
}

/** Those with faults first go in, then those of the newest generation; in the order in which they came. */
function pickLanes(lanes) {
  if (lanes.length <= LANES_MAX) return lanes;
  const order = [...lanes].sort((one, other) => (other.faults.length > 0) - (one.faults.length > 0));
  const picked = new Set(order.slice(0, LANES_MAX));
  return lanes.filter((lane) => picked.has(lane));
}

function thinned(marks) {
  const every = Math.ceil(marks.length / MARKS_MAX);
  return marks.filter((_, place) => every <= 1 || place % every === 0 || place === marks.length - 1);
}

/**
 * @param {object[]} chain a checkpoint and those it descends from, the nearest first.
 * @param {object[]} children references to checkpoints of other runs that descend from it.
 * @param {object|null} lost the parent of the last, if it does not exist any more.
 * @returns boxes `{column, lane, run_id, step, kind, role, more}`, arrows `[from, to]` (indexes of boxes), and the runs
 *   of the lanes. A long chain within one run is drawn as its ends, with a box for the `more` between.
 */
export function lineageLayout(chain, children, lost) {
  const oldest = [...chain].reverse();
  const boxes = [];
  const runs = [];
  const laneOf = (run) => {
    if (!runs.includes(run)) runs.push(run);
    return runs.indexOf(run);
  };
  const add = (column, one, role, more = 0) => {
    boxes.push({column, lane: laneOf(one.run_id), run_id: one.run_id, step: one.step, kind: one.kind, role, more});
    return boxes.length - 1;
  };
  const arrows = [];
  let before = lost ? add(0, lost, "lost") : null;
  let column = lost ? 1 : 0;
  for (const {one, more} of folded(oldest)) {
    const role = one === chain[0] ? "chosen" : more ? "more" : "ancestor";
    const box = add(column++, one, role, more);
    if (before !== null) arrows.push([before, box]);
    before = box;
  }
  for (const child of children) arrows.push([before, add(column, child, "child")]);
  return {boxes, arrows, runs, columns: column + (children.length ? 1 : 0)};
}

/** Of a long chain within one run its ends, and one in the middle that stands for `more`. */
function folded(chain) {
  const found = [];
  for (let first = 0; first < chain.length; ) {
    let end = first;
    while (end < chain.length && chain[end].run_id === chain[first].run_id) end++;
    const length = end - first;
    chain.slice(first, end).forEach((one, place) => {
      const isMiddle = length > 2 * CHAIN_END + 1 && place >= CHAIN_END && place < length - CHAIN_END;
      if (!isMiddle) found.push({one, more: 0});
      else if (place === CHAIN_END) found.push({one, more: length - 2 * CHAIN_END});
    });
    first = end;
  }
  return found;
}
