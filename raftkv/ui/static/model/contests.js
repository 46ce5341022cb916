/**
 * Locks and elections: queues of keys `NAME/LEASE` (lease in hexadecimal), the oldest of which has what all want.
 *
 *     jobs/leader/5f1   created at 5, holds it        fencing token 5
 *     jobs/leader/603   created at 8, waits first     wakes when the key before it is gone
 *
 * Pure. These are the keys of etcd's recipes: its clients, members' Lock and Election services and raftkv's library
 * meet in them. Nothing in the store tells a lock from an election: a candidate's value is what it proclaims, a lock's
 * is empty, or a mark of the library.
 */

import {shownText} from "./records.js";

const LEASE_HEX = /^[0-9a-f]+$/;
const MARK = /^[0-9a-f]{16}$/;

/**
 * The name of the queue in which a key is an entry; null: it is none. An entry is named by the lease that it ends with.
 *
 * @param {{key: string, lease: string}} item its lease in decimal digits; 0: none.
 */
export function queueOf(item) {
  const slash = item.key.lastIndexOf("/");
  const last = item.key.slice(slash + 1);
  if (slash < 0 || item.lease === "0" || !LEASE_HEX.test(last)) return null;
  return BigInt.asUintN(64, BigInt(item.lease)) === BigInt(`0x${last}`) ? item.key.slice(0, slash) : null;
}

/** Whether a key may be an entry, by its name alone: a listing of names has no leases. */
export function mayBeEntry(item) {
  const slash = item.key.lastIndexOf("/");
  return slash >= 0 && LEASE_HEX.test(item.key.slice(slash + 1));
}

/** What an entry says of itself: what it proclaims; empty: it is a lock's. */
export function proclaimed(value) {
  const text = shownText(value);
  return MARK.test(text) ? "" : text;
}

/** The queues of a store, kept current by changes; the same changes give the same queues. */
export class Contests {
  constructor() {
    this.queues = new Map();
  }

  /** Take a key as it is now. Returns whether it belongs to a queue. */
  put(item) {
    const name = queueOf(item);
    if (name === null) return this.remove(item.key);
    if (!this.queues.has(name)) this.queues.set(name, new Map());
    this.queues.get(name).set(item.key, {
      key: item.key,
      lease: item.key.slice(name.length + 1),
      token: item.create,
      value: proclaimed(item.value),
    });
    return true;
  }

  /** Take the deletion of a key. Returns whether it was in a queue. */
  remove(key) {
    const name = key.slice(0, Math.max(key.lastIndexOf("/"), 0));
    const queue = this.queues.get(name);
    const known = queue?.delete(key) ?? false;
    if (queue?.size === 0) this.queues.delete(name);
    return known;
  }

  /** All queues by name: who holds, with the fencing token, and who waits, the next first. */
  list() {
    return [...this.queues]
      .map(([name, entries]) => {
        const [holder, ...waiting] = [...entries.values()].sort((one, other) => one.token - other.token);
        const kind = [holder, ...waiting].some((one) => one.value !== "") ? "election" : "lock";
        return {name, kind, holder, waiting};
      })
      .sort((one, other) => (one.name < other.name ? -1 : 1));
  }
}
