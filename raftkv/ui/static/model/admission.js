/**
 * Who holds the slots that runs of a cluster share, and who waits for them. Pure; the twin of
 * `raftkv.training.scheduling.ledger` and of the explanations in `scheduling.admission`.
 *
 *     describeClusters(items, alive)      // [{cluster, hosts, grants, queue}], out of the keys below CLUSTER_ROOT
 *
 * Leaves out handing out slots: a page only looks.
 */

import {listOf, parseJson, readRecord} from "./records.js";
import {denialReason} from "./runs.js";
import {some, sorted} from "./words.js";

export const CLUSTER_ROOT = "/raftkv/train-cluster/";
const PASSED_OVER_MAX = 3;

const least = (limit) => (value) => (Number.isInteger(value) && value >= limit ? value : undefined);
const isTable = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const slotsTable = (value) =>
  isTable(value) && Object.values(value).every((slots) => least(0)(slots) !== undefined) ? value : undefined;
const NEED = {id: ["text"], host: ["text"], slots: ["int", 1]};
const CLAIM = {
  run: ["text"], since: [least(0)], weight: [least(1), 1], min_nodes: [least(1), 1], max_nodes: [least(1), 1],
  nodes: [listOf(NEED), []], granted: [(value) => (Array.isArray(value) ? value.map(String) : undefined), []],
  passed: [least(0), 0],
};
const LEDGER = {
  claims: [(value) => soundClaims(listOf(CLAIM)(value)), []], declared: [slotsTable, {}], arrivals: [least(0), 0],
};

function soundClaims(claims) {
  const isSound = ({nodes, granted, min_nodes, max_nodes}) => {
    const ids = new Set(nodes.map((need) => need.id));
    const fits = ids.size === nodes.length && new Set(granted).size === granted.length;
    const isWithin = granted.length === 0 || (min_nodes <= granted.length && granted.length <= max_nodes);
    return fits && isWithin && granted.every((id) => ids.has(id));
  };
  return claims?.every(isSound) ? claims : undefined;
}

const waits = (claim) => claim.granted.length === 0;
const holding = (claim) => claim.nodes.filter((need) => claim.granted.includes(need.id));

/** Slots that nodes take, by host. */
function slotsByHost(needs) {
  const taken = new Map();
  for (const {host, slots} of needs) taken.set(host, (taken.get(host) ?? 0) + slots);
  return taken;
}

/** The slots of every host that a claim names: told by itself, declared by a run, or else assumed. */
export function capacity(ledger, hosts) {
  const wished = new Map();
  for (const claim of ledger.claims) {
    for (const [host, slots] of slotsByHost(claim.nodes)) wished.set(host, Math.max(slots, wished.get(host) ?? 0));
  }
  const declared = new Map(Object.entries(ledger.declared));
  const slotsOf = (host) => hosts.get(host) ?? declared.get(host) ?? wished.get(host);
  return new Map(sorted(wished.keys()).map((host) => [host, slotsOf(host)]));
}

/** Whether what becomes free is kept for a run. */
export function reserves(claim) {
  return waits(claim) && claim.passed >= PASSED_OVER_MAX;
}

function fitting(needs, room, wanted) {
  const left = new Map(room);
  let picked = 0;
  for (const {host, slots} of needs) {
    if (picked === wanted) break;
    if (slots > (left.get(host) ?? 0)) continue;
    left.set(host, left.get(host) - slots);
    picked++;
  }
  return picked === wanted;
}

/** Whether `min_nodes` of a run's nodes fit together. */
function canRun(claim, room) {
  const smallest = [...claim.nodes].sort((one, other) => one.slots - other.slots);
  return fitting(claim.nodes, room, claim.min_nodes) || fitting(smallest, room, claim.min_nodes);
}

/** The runs that wait and can be served one day, in the order in which they are considered. */
export function queue(ledger, hosts) {
  const room = capacity(ledger, hosts);
  const waiting = ledger.claims.filter((claim) => waits(claim) && canRun(claim, room));
  return waiting.sort((one, other) => reserves(other) - reserves(one) || one.since - other.since);
}

/** Why a run waits, in one line; empty: it does not. */
export function why(ledger, run, hosts) {
  const claim = ledger.claims.find((one) => one.run === run);
  if (!claim || !waits(claim)) return "";
  if (claim.nodes.length < claim.min_nodes) return `${claim.nodes.length} of ${claim.min_nodes} nodes are present`;
  const room = capacity(ledger, hosts);
  if (!canRun(claim, room)) {
    const short = [...slotsByHost(claim.nodes)].filter(([host, slots]) => slots > room.get(host));
    const names = some(sorted(short.map(([host]) => host)));
    return `it needs more slots than there are on ${names}: start it with fewer, or declare the slots`;
  }
  const wanted = new Set(claim.nodes.map((need) => need.host));
  const holds = (other) => holding(other).some((need) => wanted.has(need.host));
  const holders = ledger.claims.filter(holds).map((other) => other.run);
  const place = 1 + queue(ledger, hosts).indexOf(claim);
  const reserving = reserves(claim) ? ", and reserves what becomes free" : "";
  if (holders.length === 0) return `number ${place} in line${reserving}`;
  return `number ${place} in line for slots that ${some(holders)} hold${holders.length === 1 ? "s" : ""}${reserving}`;
}

/** Read a ledger; null: it holds something else. */
export function readLedger(value) {
  return readRecord(LEDGER, parseJson(value));
}

/**
 * Every cluster of which something is known, by name.
 *
 * @param {Iterable<object>} items the keys below `CLUSTER_ROOT`.
 */
export function describeClusters(items) {
  const clusters = new Map();
  for (const item of items) {
    const [cluster, ...rest] = item.key.slice(CLUSTER_ROOT.length).split("/");
    if (!clusters.has(cluster)) clusters.set(cluster, new Map());
    clusters.get(cluster).set(rest.join("/"), item.value);
  }
  return sorted(clusters.keys()).map((cluster) => describeCluster(cluster, clusters.get(cluster)));
}

function describeCluster(cluster, values) {
  const below = (prefix) => [...values].filter(([name]) => name.startsWith(prefix));
  const named = (prefix) => below(prefix).map(([name, value]) => [name.slice(prefix.length), value]);
  const stored = values.has("ledger") ? readLedger(values.get("ledger")) : {claims: [], declared: {}, arrivals: 0};
  const ledger = stored ?? {claims: [], declared: {}, arrivals: 0};
  const told = named("host/").map(([host, value]) => [host, readRecord({slots: ["int"]}, parseJson(value))?.slots]);
  const hosts = new Map(told.filter(([, slots]) => slots !== undefined));
  const denials = new Map(named("deny/").map(([host, value]) => [host, denialReason(host, value)]));
  const strikes = named("strike/").map(([name]) => name.split("/")[0]);
  return {
    cluster,
    isReadable: stored !== null,
    hosts: describeHosts(ledger, hosts, denials, strikes),
    grants: ledger.claims.filter((claim) => !waits(claim)).map((claim) => ({
      run: claim.run, weight: claim.weight, slots: Object.fromEntries(slotsByHost(holding(claim))),
      nodes: claim.granted.length, min_nodes: claim.min_nodes, max_nodes: claim.max_nodes,
      candidates: claim.nodes.length,
    })),
    queue: describeQueue(ledger, hosts),
  };
}

function describeHosts(ledger, hosts, denials, strikes) {
  const room = capacity(ledger, hosts);
  const held = new Map();
  for (const claim of ledger.claims) {
    for (const [host, slots] of slotsByHost(holding(claim))) {
      held.set(host, {...held.get(host), [claim.run]: slots});
    }
  }
  const names = new Set([...room.keys(), ...hosts.keys(), ...denials.keys(), ...strikes]);
  return sorted(names).map((host) => {
    const slots = hosts.get(host) ?? room.get(host) ?? 0;
    const own = held.get(host) ?? {};
    const taken = Object.values(own).reduce((sum, one) => sum + one, 0);
    const isDeclared = Object.hasOwn(ledger.declared, host);
    return {
      host, slots, held: own, free: Math.max(slots - taken, 0),
      source: hosts.has(host) ? "host" : isDeclared ? "declared" : "assumed",
      strikes: strikes.filter((one) => one === host).length,
      denied: denials.get(host) ?? "",
    };
  });
}

function describeQueue(ledger, hosts) {
  const inLine = queue(ledger, hosts);
  const others = ledger.claims.filter((claim) => waits(claim) && !inLine.includes(claim));
  return [...inLine, ...others].map((claim) => ({
    place: inLine.indexOf(claim) + 1, run: claim.run, weight: claim.weight, min_nodes: claim.min_nodes,
    max_nodes: claim.max_nodes, nodes: claim.nodes.length,
    hosts: sorted(new Set(claim.nodes.map((need) => need.host))), passed: claim.passed,
    reserves: reserves(claim), reason: why(ledger, claim.run, hosts),
  }));
}

/** The place of a run in the cluster whose slots it shares: `{cluster, waits, reason}`; null: it shares none. */
export function placeOf(run, items) {
  for (const item of items) {
    const name = item.key.slice(CLUSTER_ROOT.length);
    const ledger = name.endsWith("/ledger") ? readLedger(item.value) : null;
    if (!ledger?.claims.some((claim) => claim.run === run)) continue;
    const cluster = name.slice(0, -"/ledger".length);
    const own = items.filter((other) => other.key.startsWith(`${CLUSTER_ROOT}${cluster}/`));
    const waiting = describeClusters(own)[0].queue.find((one) => one.run === run);
    return {cluster, waits: waiting !== undefined, reason: waiting?.reason ?? ""};
  }
  return null;
}
