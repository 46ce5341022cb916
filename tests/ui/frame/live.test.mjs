// The live figures: one stream for all who listen, gaps where it broke, no asking again where it is refused.

import assert from "node:assert/strict";
import { beforeEach, mock, test } from "node:test";

let changeVisibility;
globalThis.document = {
  baseURI: "http://m:1/ui/",
  hidden: false,
  addEventListener: (_, listener) => (changeVisibility = listener),
};
const { onReach } = await import("../../../raftkv/ui/static/frame/call.js");
const { history, lastRecord, live } = await import("../../../raftkv/ui/static/frame/live.js");

let streams;
let last; // that of a test before may be open still
let answer;
beforeEach(() => {
  streams = [];
  answer = (signal) => {
    let controller;
    const body = new ReadableStream({ start: (one) => (controller = one) });
    signal.addEventListener("abort", () => controller.error(signal.reason));
    const stream = {
      send: (record) => controller.enqueue(new TextEncoder().encode(`data: ${JSON.stringify(record)}\n\n`)),
      cut: () => controller.close(),
    };
    streams.push((last = stream));
    return new Response(body);
  };
  globalThis.fetch = async (_, { signal }) => answer(signal);
});

const until = async (condition) => {
  for (let turn = 0; !condition(); turn++) {
    assert.ok(turn < 1000, "it never came");
    await new Promise((resume) => setTimeout(resume, 5));
  }
};

test("who is refused hears why, and is not asked for again and again", async () => {
  let asked = 0;
  answer = () => {
    asked += 1;
    return new Response(JSON.stringify({ error: "etcdserver: user name is empty", code: 16 }), { status: 401 });
  };
  const errors = [];
  const stop = live(() => {}, (error) => errors.push(error.line));
  await until(() => errors.length === 1);
  await new Promise((resume) => setTimeout(resume, 100));
  assert.deepEqual([errors, asked], [["etcdserver: user name is empty – sign in"], 1]);
  stop();
});

test("all who listen share a stream, and who comes later begins with the last record", async () => {
  const seen = [];
  const stops = [live((record) => seen.push(`a${record.n}`))];
  await until(() => streams.length === 1);
  streams[0].send({ n: 1 });
  await until(() => seen.length === 1);
  stops.push(live((record) => seen.push(`b${record.n}`)));
  streams[0].send({ n: 2 });
  await until(() => seen.length === 4);
  assert.deepEqual(seen, ["a1", "b1", "a2", "b2"]);
  assert.equal(streams.length, 1);

  streams[0].cut();
  await until(() => streams.length === 2);
  streams[1].send({ n: 3, inner: { depth: 7 } });
  await until(() => seen.length === 6);
  assert.deepEqual(history("n"), [1, 2, null, 3]);
  assert.deepEqual(history("inner.depth"), [null, null, null, 7]);
  assert.equal(lastRecord().n, 3);

  // A gap is no record: who begins to listen in one gets the record before it.
  streams[1].cut();
  await until(() => history("n").length === 5);
  const late = [];
  stops.push(live((record) => late.push(record.n)));
  assert.deepEqual(late, [3]);
  await until(() => streams.length === 3);
  for (const stop of stops) stop();
});

test("who begins to listen before the broken stream is asked for again gets one", async () => {
  const stop = live(() => {});
  last.cut();
  await until(() => history("n").at(-1) === null);
  stop(); // the view is left, and another is shown
  const stopLater = live(() => {});
  await until(() => streams.length === 1);

  last.send({ n: 1 });
  await until(() => history("n").at(-1) === 1);
  last.cut();
  await until(() => history("n").at(-1) === null);
  for (const hidden of [true, false]) {
    document.hidden = hidden;
    changeVisibility();
  }
  await until(() => streams.length === 2);
  stopLater();
});

test("a stream that is silent is given up, and the member is said not to answer", async () => {
  const reach = [];
  const stopHearing = onReach((ok) => reach.push(ok));
  mock.timers.enable({ apis: ["setTimeout"] });
  const turns = async (condition) => {
    for (let turn = 0; !condition(); turn++) {
      assert.ok(turn < 1000, "it never came");
      await new Promise((resume) => setImmediate(resume));
    }
  };
  const stop = live(() => {});
  const first = last;
  for (let second = 0; second < 20; second++) {
    first.send({ n: second });
    await turns(() => lastRecord()?.n === second);
    mock.timers.tick(1000);
  }
  const count = streams.length;
  assert.ok(!reach.includes(false));
  mock.timers.tick(10_000); // frozen: it ends nothing
  await turns(() => reach.includes(false));
  mock.timers.tick(1000);
  await turns(() => streams.length === count + 1);
  stop();
  mock.timers.reset();
  stopHearing();
});
