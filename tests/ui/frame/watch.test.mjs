// Watches on one stream: nothing is lost or seen twice, whatever happens to the stream. The member is played here.

import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";

const listeners = {};
globalThis.document = { baseURI: "http://m:1/ui/", hidden: false, addEventListener: (name, listener) => (listeners[name] = listener) };
globalThis.requestAnimationFrame = (work) => setTimeout(work, 0);
const { base64 } = await import("../../../raftkv/ui/static/frame/bytes.js");
const { keep, signedIn } = await import("../../../raftkv/ui/static/frame/session.js");
const { watchMap, watchPrefix, watchRange } = await import("../../../raftkv/ui/static/frame/watch.js");

/** A member with one history; streams are opened, cut and refused by the tests. */
class Member {
  revision = 1;
  history = [];
  compacted = 0;
  streams = [];
  refuses = "";
  denies = new Map();
  lists = 0;
  put(key, value) {
    this.revision += 1;
    const event = { kv: { key: base64(key), value: base64(value), mod_revision: String(this.revision), create_revision: "1", version: "1" } };
    this.history.push(event);
    for (const stream of this.streams) stream.send(event);
  }
  fetch = async (target, { body, signal }) => {
    const path = new URL(target).pathname;
    if (this.refuses) return new Response(JSON.stringify({ error: this.refuses, message: this.refuses, code: 7 }), { status: 403 });
    if (path === "/v3/kv/range") {
      this.lists += 1;
      const present = new Map(this.history.map((event) => [event.kv.key, event.kv]));
      return Response.json({ header: { revision: String(this.revision) }, kvs: [...present.values()] });
    }
    const creates = body.split("\n").map((line) => JSON.parse(line).create_request);
    let controller;
    const stream = {
      creates,
      cut: () => controller.close(),
      line: (message) => controller.enqueue(new TextEncoder().encode(`${JSON.stringify(message)}\n`)),
      send: (...events) => creates.forEach((one) => stream.line({ result: { header: { revision: String(this.revision) }, watch_id: one.watch_id, events } })),
    };
    const source = new ReadableStream({ start: (one) => (controller = one) });
    signal.addEventListener("abort", () => this.streams.splice(this.streams.indexOf(stream), 1));
    this.streams.push(stream);
    for (const one of creates) this.begin(stream, one);
    return new Response(source);
  };
  begin(stream, one) {
    const header = { revision: String(this.revision) };
    if (this.denies.has(one.key)) {
      stream.line({ result: { header, watch_id: "-1", created: true, canceled: true, cancel_reason: this.denies.get(one.key) } });
      return;
    }
    stream.line({ result: { header, watch_id: one.watch_id, created: true } });
    const from = Number(one.start_revision);
    if (from <= this.compacted) {
      stream.line({ result: { header, watch_id: one.watch_id, canceled: true, compact_revision: String(this.compacted + 1) } });
      return;
    }
    const missed = this.history.filter((event) => Number(event.kv.mod_revision) >= from);
    if (missed.length) stream.line({ result: { header, watch_id: one.watch_id, events: missed } });
  }
}

let member;
beforeEach(() => {
  member = new Member();
  globalThis.fetch = member.fetch;
});

const until = async (condition) => {
  for (let turn = 0; !condition(); turn++) {
    assert.ok(turn < 1000, "it never came");
    await new Promise((resume) => setTimeout(resume, 5));
  }
};

function listen(prefix) {
  const seen = { values: [], snapshots: 0, error: null };
  seen.stop = watchPrefix(prefix, {
    onSnapshot: () => (seen.snapshots += 1),
    onEvents: (events) => seen.values.push(...events.map(({ kv }) => kv.text)),
    onError: (error) => (seen.error = error),
  });
  return seen;
}

test("a prefix is read once, then watched from the next revision", async () => {
  member.put("/a", "0");
  const seen = listen("/a");
  await until(() => member.streams.length === 1);
  assert.equal(member.streams[0].creates[0].start_revision, "3");
  member.put("/a", "1");
  await until(() => seen.values.length === 1);
  assert.deepEqual([seen.snapshots, seen.values], [1, ["1"]]);
  seen.stop();
  await until(() => member.streams.length === 0);
});

test("all watches share one stream, and one that comes later takes nothing from the others", async () => {
  const first = listen("/a");
  await until(() => member.streams.length === 1);
  member.put("/a", "1");
  const second = listen("/b");
  await until(() => member.streams.length === 1 && member.streams[0].creates.length === 2);
  member.put("/a", "2");
  await until(() => second.values.length === 1 && first.values.length === 2);
  assert.deepEqual([first.values, second.values], [["1", "2"], ["2"]]);
  first.stop();
  member.put("/a", "3");
  await until(() => second.values.length === 2);
  assert.deepEqual(first.values, ["1", "2"]);
  second.stop();
});

test("after a broken stream it goes on where it was", async () => {
  const seen = listen("/a");
  await until(() => member.streams.length === 1);
  for (let round = 0; round < 3; round++) {
    member.put("/a", `${round}`);
    const stream = member.streams.pop();
    member.put("/a", `${round} while nobody listened`);
    stream.cut();
    await until(() => member.streams.length === 1);
  }
  await until(() => seen.values.length === 6);
  assert.deepEqual(seen.values, ["0", "1", "2"].flatMap((one) => [one, `${one} while nobody listened`]));
  assert.equal(seen.snapshots, 1);
  seen.stop();
});

test("a compaction that was missed leads to a new list", async () => {
  const seen = listen("/a");
  await until(() => member.streams.length === 1);
  const stream = member.streams.pop();
  member.put("/a", "compacted");
  member.put("/a", "present");
  member.compacted = 3;
  stream.cut();
  await until(() => seen.snapshots === 2);
  member.put("/a", "next");
  await until(() => seen.values.includes("next"));
  assert.deepEqual(seen.values, ["next"]);
  seen.stop();
});

test("a history begins where it was compacted", async () => {
  for (const value of ["1", "2", "3", "4"]) member.put("/a", value);
  member.compacted = 2;
  const seen = [];
  const stop = watchRange({ key: base64("/a") }, { onEvents: (events) => seen.push(...events.map(({ kv }) => kv.text)) }, { from: 1, isHistory: true });
  await until(() => seen.length === 3);
  member.put("/a", "5");
  await until(() => seen.length === 4);
  assert.deepEqual(seen, ["2", "3", "4", "5"]);
  assert.equal(member.lists, 0);
  stop();
});

test("what is refused ends with one error, and is not asked again", async () => {
  member.refuses = "etcdserver: permission denied";
  const seen = listen("/a");
  await until(() => seen.error);
  assert.match(seen.error.line, /^etcdserver: permission denied – ask an administrator/);
  member.refuses = "";
  const watched = listen("/b");
  await until(() => member.streams.length === 1);
  const id = member.streams[0].creates[0].watch_id;
  member.streams[0].line({ result: { header: {}, watch_id: id, canceled: true, cancel_reason: "etcdserver: permission denied" } });
  await until(() => watched.error);
  assert.equal(watched.error.code, 7);
  await until(() => member.streams.length === 0);
});

test("a member that is away is asked again", async () => {
  const away = () => Promise.reject(new TypeError("failed"));
  globalThis.fetch = away;
  const seen = listen("/a");
  await new Promise((resume) => setTimeout(resume, 50));
  globalThis.fetch = member.fetch;
  await until(() => seen.snapshots === 1);
  seen.stop();
});

test("a map is told at most once a frame", async () => {
  member.put("/a/1", "x");
  const told = [];
  const stop = watchMap("/a/", (map, { first }) => told.push([first, [...map].map(([key, kv]) => `${key}=${kv.text}`).join()]));
  await until(() => told.length === 1 && member.streams.length === 1);
  member.put("/a/1", "y");
  member.put("/a/2", "z");
  await until(() => told.at(-1)[1].includes("z"));
  assert.deepEqual(told[0], [true, "/a/1=x"]);
  assert.deepEqual(told.at(-1), [false, "/a/1=y,/a/2=z"]);
  stop();
});

test("a watch that is refused without its id fails alone", async () => {
  member.denies.set(base64("/b"), "rpc error: code = PermissionDenied desc = etcdserver: permission denied");
  const [first, refused, last] = ["/a", "/b", "/c"].map(listen);
  await until(() => refused.error !== null);
  assert.equal(refused.error.code, 7);
  member.put("/a", "1");
  await until(() => first.values.length > 0 && last.values.length > 0);
  assert.deepEqual([first.error, last.error], [null, null]);
  for (const one of [first, last]) one.stop();
});

test("a token that ended is forgotten", async () => {
  keep({ user: "root", token: "t" });
  member.denies.set(base64("/a"), "rpc error: code = Unauthenticated desc = etcdserver: invalid auth token");
  const seen = listen("/a");
  await until(() => seen.error !== null);
  assert.equal(signedIn.get(), null);
});

test("a watch from the past reads nothing, and says up to where that is compacted", async () => {
  for (const value of ["0", "1", "2"]) member.put("/a", value);
  const values = [];
  let compacted = 0;
  const begin = (from) =>
    watchPrefix("/a", { onEvents: (events) => values.push(...events.map(({ kv }) => kv.text)), onCompacted: (revision) => (compacted = revision) }, { from });
  const stop = begin(3);
  await until(() => values.length === 2);
  stop();
  member.compacted = 3;
  begin(2);
  await until(() => compacted === 4);
  assert.deepEqual([values, member.lists], [["1", "2"], 0]);
});
