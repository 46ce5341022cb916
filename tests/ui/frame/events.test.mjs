// Events of several members in one list.

import assert from "node:assert/strict";
import { test } from "node:test";

import { merged } from "../../../raftkv/ui/static/model/events.js";

const members = (a, b = []) => [{ id: "a1", name: "m1", happened: a }, { id: "b2", name: "m2", happened: b }, { id: "c3", name: "m3" }];
const texts = (...lists) => merged(members(...lists)).map((one) => one.text);

test("an election of which each member tells is there once, at its earliest time", () => {
  const found = merged(members([[5_200, "leader", "b2", "4"]], [[5_000, "leader", "b2", "4"]]));
  assert.deepEqual(found, [{ at: 5_000, text: "m2 leads in term 4", kind: "info" }]);
});

test("the newest comes first", () => {
  assert.deepEqual(texts([[1, "leader", "", "4"], [9, "leader", "c3", "5"]], [[2, "lost", "c3", "reset"]]), [
    "m3 leads in term 5",
    "m2 lost the connection to m3: reset",
    "no leader in term 4",
  ]);
});

test("an alarm that is raised again is told again", () => {
  const alarms = [[1, "raised", "a1", "NOSPACE"], [2, "cleared", "a1", "NOSPACE"], [90_000, "raised", "a1", "NOSPACE"]];
  assert.equal(texts(alarms, alarms).length, 3);
});

test("what one member alone knows says of which", () => {
  assert.deepEqual(texts([[1, "defragmented", "a1", "2048 1024 0.25"]], [[1, "connected", "a1", ""]]), [
    "m2 is connected to m1",
    "m1 is defragmented: 2.0 KiB, now 1.0 KiB, in 0.3 s",
  ]);
});

test("members come and go, and kinds of a later version are left out", () => {
  assert.deepEqual(texts([[1, "joined", "c3", "learner"], [2, "votes", "c3", ""], [3, "left", "d4", "m4"], [4, "new", "a1", ""]]), [
    "m4 left the cluster",
    "m3 votes from now on",
    "m3 joined as a learner",
  ]);
});
