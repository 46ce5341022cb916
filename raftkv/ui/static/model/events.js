// What happened to the cluster: the lists of all members (`server/ui/figures`) in one, in words. Pure.
//
//     merged(record.members)     [{ at, text, kind }], the newest first; `kind` is the colour of its badge

import { size } from "./words.js";

const SAME_MS = 60_000; // clocks of members differ, and one is told later than another

// Only the member itself knows these; of all else each member tells.
const OWN = new Set(["connected", "lost", "defragmented"]);

const WORDS = {
  leader: (who, text, by, id) => (id ? [`${who} leads in term ${text}`, "info"] : [`no leader in term ${text}`, "warn"]),
  joined: (who, text) => [`${who} joined${text === "learner" ? " as a learner" : ""}`, "good"],
  votes: (who) => [`${who} votes from now on`, "good"],
  left: (who, text) => [`${text || who} left the cluster`, "warn"],
  raised: (who, text) => [`${who}: the alarm ${text} is raised`, "bad"],
  cleared: (who, text) => [`${who}: the alarm ${text} is over`, "good"],
  connected: (who, _text, by) => [`${by} is connected to ${who}`, ""],
  lost: (who, text, by) => [`${by} lost the connection to ${who}${text ? `: ${text}` : ""}`, "bad"],
  defragmented: (_who, text, by) => {
    const [before, after, seconds] = text.split(" ").map(Number);
    return [`${by} is defragmented: ${size(before)}, now ${size(after)}, in ${seconds.toFixed(1)} s`, ""];
  },
};

/** One list; an event of which several members tell is there once, at its earliest time. */
export function merged(members) {
  const names = new Map(members.map((one) => [one.id, one.name || one.id]));
  const all = members.flatMap((one) => (one.happened ?? []).map(([at, kind, id, text]) => ({ at, kind, id, text, by: one.id })));
  all.sort((a, b) => a.at - b.at);
  const last = new Map();
  const found = [];
  for (const { at, kind, id, text, by } of all) {
    if (!WORDS[kind]) continue; // of a later version
    const same = JSON.stringify([kind, id, text, OWN.has(kind) ? by : ""]);
    if (at - (last.get(same) ?? -Infinity) < SAME_MS && !OWN.has(kind)) continue;
    last.set(same, at);
    const [words, colour] = WORDS[kind](names.get(id) ?? id, text, names.get(by), id);
    found.push({ at, text: words, kind: colour });
  }
  return found.reverse();
}
