// A level of keys as folders and leaves, read in pages without reading what lies below. Pure but for `read`.

import { after, compare, prefixEnd } from "./bytes.js";

const SLASH = 47;

/** The child of a prefix on which a key lies: `{ path, isFolder }`; a key that is the prefix itself is a leaf. */
export function childOf(prefix, key) {
  let at = prefix.length;
  // The slashes right behind the prefix belong to the name: "/a//b" has a folder "//" below "/a".
  while (at < key.length && key[at] === SLASH) at += 1;
  const end = key.indexOf(SLASH, at);
  return end < 0 ? { path: key, isFolder: false } : { path: key.slice(0, end + 1), isFolder: true };
}

/** Read a page of the children of a prefix, in order of keys.
 *
 *  `read(start, limit)` resolves to `{ kvs, more }`: keys from `start` on, below the prefix. A folder that does not end
 *  within a page is jumped over, so a page costs at most one read for each child, however many keys lie below.
 *  Resolves to `{ rows, next }`: rows `{ path, isFolder, kv (of leaves), count, isMore }`; `next`: where to go on, or null.
 */
export async function readLevel(prefix, start, { read, rowsMax = 100, limit = 200 }) {
  const rows = [];
  let from = start;
  for (;;) {
    const { kvs, more } = await read(from, limit);
    for (const kv of kvs) {
      const child = childOf(prefix, kv.keyBytes);
      const last = rows.at(-1);
      if (child.isFolder && last?.isFolder && compare(last.path, child.path) === 0) {
        last.count += 1;
        continue;
      }
      if (rows.length === rowsMax) return { rows, next: kv.keyBytes };
      rows.push(child.isFolder ? { ...child, kv: null, count: 1, isMore: false } : { ...child, kv, count: 1, isMore: false });
    }
    if (!more || !kvs.length) return { rows, next: null };
    const last = rows.at(-1);
    if (last.isFolder) last.isMore = true;
    from = last.isFolder ? prefixEnd(last.path) : after(kvs.at(-1).keyBytes);
    // A folder whose last byte is the greatest has no end: then its keys are the last.
    if (from.length === 1 && from[0] === 0) return { rows, next: null };
    if (rows.length >= rowsMax) return { rows, next: from };
  }
}

/** The folders on the way to a prefix, the root first: [{ path, name }], as bytes and text. */
export function crumbs(prefix, shown) {
  const found = [];
  let from = 0;
  while (from < prefix.length) {
    const { path, isFolder } = childOf(prefix.slice(0, from), prefix);
    const end = isFolder ? path.length : prefix.length;
    found.push({ path: prefix.slice(0, end), name: shown(prefix.slice(from, end)) });
    from = end;
  }
  return found;
}

/** Where the folder above a prefix is: "/a/b/" -> "/a/"; above the first is the root, which is empty. */
export const above = (prefix) => crumbs(prefix, () => "").at(-2)?.path ?? new Uint8Array();
