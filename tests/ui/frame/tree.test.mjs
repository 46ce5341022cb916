// Levels of keys, read in pages; differences of texts.

import assert from "node:assert/strict";
import { test } from "node:test";

import { base64, bytes, compare, KeyValue, shown } from "../../../raftkv/ui/static/frame/bytes.js";
import { diffLines, folded } from "../../../raftkv/ui/static/frame/diff.js";
import { above, childOf, crumbs, readLevel } from "../../../raftkv/ui/static/frame/tree.js";

const store = (keys) => {
  const kvs = keys.map((key) => new KeyValue({ key: base64(key) })).sort((a, b) => compare(a.keyBytes, b.keyBytes));
  const reads = [];
  return {
    reads,
    read: async (prefix, start, limit) => {
      reads.push(shown(start));
      const found = kvs.filter((kv) => kv.key.startsWith(prefix) && compare(kv.keyBytes, start) >= 0);
      return { kvs: found.slice(0, limit), more: found.length > limit };
    },
  };
};

async function all(keys, prefix, options = {}) {
  const { read, reads } = store(keys);
  const rows = [];
  let start = bytes(prefix);
  let pages = 0;
  while (start) {
    const found = await readLevel(bytes(prefix), start, { read: (from, limit) => read(prefix, from, limit), ...options });
    rows.push(...found.rows);
    start = found.next;
    pages += 1;
  }
  return { rows: rows.map((row) => `${shown(row.path)}${row.isFolder ? `:${row.count}${row.isMore ? "+" : ""}` : ""}`), reads, pages };
}

test("children are folders and leaves", () => {
  const of = (prefix, key) => {
    const child = childOf(bytes(prefix), bytes(key));
    return [shown(child.path), child.isFolder];
  };
  assert.deepEqual(of("", "/a/b"), ["/a/", true]);
  assert.deepEqual(of("/a/", "/a/b"), ["/a/b", false]);
  assert.deepEqual(of("/a", "/a/b"), ["/a/b", false]);
  assert.deepEqual(of("/a/", "/a//b/c"), ["/a//b/", true]);
  assert.deepEqual(of("/a/", "/a/"), ["/a/", false]);
  assert.deepEqual(of("", "plain"), ["plain", false]);
  assert.deepEqual([above(bytes("/a/b/")), above(bytes("/a/b")), above(bytes("/a/")), above(bytes("a"))].map(shown), ["/a/", "/a/", "", ""]);
  assert.deepEqual(crumbs(bytes("/a/b/c"), shown).map((one) => one.name), ["/a/", "b/", "c"]);
});

test("a level is read without what lies below", async () => {
  const many = Array.from({ length: 1000 }, (_, index) => `/big/${String(index).padStart(4, "0")}`);
  const found = await all(["a", ...many, "/small/1", "/small/2", "z"], "", { limit: 50 });
  assert.deepEqual(found.rows, ["/big/:50+", "/small/:2", "a", "z"]);
  assert.equal(found.reads.length, 2);
});

test("pages join without a gap or a repetition", async () => {
  const keys = [];
  for (let folder = 0; folder < 9; folder++) for (let leaf = 0; leaf <= folder * 3; leaf++) keys.push(`/d${folder}/${leaf}`);
  for (let leaf = 0; leaf < 7; leaf++) keys.push(`/leaf${leaf}`);
  const whole = (await all(keys, "", { limit: 1000 })).rows.map((row) => row.split(":")[0]);
  assert.deepEqual(whole, ["/d0/", "/d1/", "/d2/", "/d3/", "/d4/", "/d5/", "/d6/", "/d7/", "/d8/", ...Array.from({ length: 7 }, (_, one) => `/leaf${one}`)]);
  for (const limit of [1, 2, 3, 7, 100]) {
    for (const rowsMax of [1, 2, 5, 100]) {
      const names = (await all(keys, "", { limit, rowsMax })).rows.map((row) => row.split(":")[0]);
      assert.deepEqual(names, whole, `limit ${limit}, rows ${rowsMax}`);
    }
  }
});

test("differences, line by line", () => {
  const text = (lines) => lines.map((line) => line.kind + (line.text ?? line.count));
  assert.deepEqual(text(diffLines("a\nb\nc", "a\nx\nc")), [" a", "-b", "+x", " c"]);
  assert.deepEqual(text(diffLines("", "a")), ["+a"]);
  assert.deepEqual(text(diffLines("a", "")), ["-a"]);
  assert.deepEqual(text(diffLines("a\na\nb", "a\nb\nb")), [" a", "-a", "+b", " b"]);
  const long = Array.from({ length: 30 }, (_, line) => String(line));
  const changed = long.with(15, "x");
  assert.deepEqual(text(folded(diffLines(long.join("\n"), changed.join("\n")), 2)), ["…13", " 13", " 14", "-15", "+x", " 16", " 17", "…12"]);
});

test("what is said to be of a side is that side", () => {
  let seed = 3;
  const next = (below) => (seed = (seed * 1103515245 + 12345) % 2147483648) % below;
  for (let round = 0; round < 500; round++) {
    const make = () => Array.from({ length: next(8) }, () => "abc"[next(3)]).join("\n");
    const [before, after] = [make(), make()];
    const lines = diffLines(before, after);
    const side = (kinds) => lines.filter((line) => kinds.includes(line.kind)).map((line) => line.text).join("\n");
    assert.deepEqual([side(" -"), side(" +")], [before, after]);
  }
});
