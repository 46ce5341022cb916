// Bytes, keys for people, numbers and times.

import assert from "node:assert/strict";
import { test } from "node:test";

import {
  KeyValue, after, base64, bytes, compare, hexdump, idHex, jsonOf, leaseHex, prefixEnd, shown, textOf, unbase64, unshown,
} from "../../../raftkv/ui/static/frame/bytes.js";
import { ago, count, duration, latency, short, size } from "../../../raftkv/ui/static/frame/format.js";

const random = (seed) => () => (seed = (seed * 1103515245 + 12345) % 2147483648) / 2147483648;

test("what is shown stands for the same bytes, whatever they are", () => {
  const next = random(7);
  const alphabet = [32, 92, 120, 52, 49, 0, 10, 47, 255, 0xc3, 0xa9, 0xef, 0xbb, 0xbf, 127];
  for (let round = 0; round < 3000; round++) {
    const data = Uint8Array.from({ length: Math.floor(next() * 12) }, () => alphabet[Math.floor(next() * alphabet.length)]);
    assert.deepEqual(unshown(shown(data)), data, shown(data));
    assert.deepEqual(unbase64(base64(data)), data);
  }
});

test("keys for people", () => {
  assert.equal(shown(bytes("/ä/b c")), "/ä/b c");
  assert.equal(shown(Uint8Array.of(97, 0, 255)), "a\\x00\\xff");
  assert.equal(shown(bytes("a\nb")), "a\\x0ab");
  assert.equal(shown(bytes("\\x41")), "\\x5cx41");
  assert.equal(shown(bytes("  ")), "\\x20\\x20");
  assert.equal(shown(bytes(" a b ")), "\\x20a b\\x20");
  assert.equal(shown(bytes("jobs/\u202e1/pmoc")), "jobs/\\xe2\\x80\\xae1/pmoc", "it would turn the rest of the row around");
  assert.equal(shown(bytes("a\u200bb\u00a0\u2028")), "a\\xe2\\x80\\x8bb\\xc2\\xa0\\xe2\\x80\\xa8");
  assert.equal(shown(bytes("می\u200cخواهم")), "می\u200cخواهم", "words of some scripts need it");
});

test("a prefix ends before the next key that has it not", () => {
  assert.deepEqual(prefixEnd("a"), bytes("b"));
  assert.deepEqual(prefixEnd(Uint8Array.of(97, 255)), bytes("b"));
  assert.deepEqual(prefixEnd(Uint8Array.of(255, 255)), Uint8Array.of(0));
  assert.deepEqual(after(bytes("a")), Uint8Array.of(97, 0));
  assert.deepEqual(["b", "a", "ab", ""].map(bytes).sort(compare).map(shown), ["", "a", "ab", "b"]);
});

test("values are text, JSON or neither", () => {
  assert.equal(textOf(Uint8Array.of(255)), null);
  assert.equal(textOf(Uint8Array.of(0)), null);
  assert.equal(textOf(bytes("a\tb\n")), "a\tb\n");
  assert.deepEqual(jsonOf(bytes(' {"a":[1]}')), { a: [1] });
  assert.equal(jsonOf(bytes("hello")), undefined);
  assert.equal(jsonOf(bytes("{")), undefined);
  assert.equal(hexdump(bytes("AB\n")), "000000  41 42 0a                                         AB.");
  assert.match(hexdump(new Uint8Array(40), 32), /8 more bytes$/);
});

test("a key as the gateway tells it: what is zero is left out", () => {
  const kv = new KeyValue({ key: base64("k"), mod_revision: "9007199254740991", value: base64("héllo"), lease: "7587862094" });
  assert.deepEqual([kv.key, kv.mod, kv.create, kv.version, kv.size, kv.text], ["k", 9007199254740991, 0, 0, 6, "héllo"]);
  const bare = new KeyValue({});
  assert.deepEqual([bare.key, bare.lease, bare.size, bare.text], ["", "0", 0, ""]);
  assert.equal(leaseHex("-1"), "ffffffffffffffff");
  assert.equal(leaseHex("7587862094"), "00000001c445964e");
  assert.equal(idHex("10276657743932975437"), "8e9e05c52164694d");
});

test("numbers and times are short", () => {
  assert.deepEqual([size(0), size(1536), size(2 * 1024 ** 3), size(null)], ["0 B", "1.5 KiB", "2.0 GiB", "–"]);
  assert.deepEqual([short(0), short(0.44), short(144.4), short(1234), short(12345), short(2.5e6)], ["0", "0.4", "144", "1.2k", "12k", "2.5M"]);
  assert.deepEqual([latency(0.00012), latency(0.0034), latency(0.216), latency(2.04), latency(null)], ["0.12 ms", "3.4 ms", "216 ms", "2.0 s", "–"]);
  assert.deepEqual([duration(59.4), duration(75), duration(3600), duration(7500), duration(200000)], ["59 s", "1 min 15 s", "1 h", "2 h 5 min", "2 d"]);
  assert.deepEqual([ago(1000, 1200), ago(0, 12_000), ago(60_000, 0)], ["just now", "12 s ago", "in 1 min"]);
  assert.deepEqual([count(12345), count(undefined)], ["12,345", "–"]);
});
