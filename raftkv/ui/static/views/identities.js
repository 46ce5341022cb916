// Who uses the member that is asked: a table for those who may see it. With users on, that is root.

import { getText } from "../frame/call.js";
import { h } from "../frame/dom.js";
import { count, latency, short, size } from "../frame/format.js";
import { section, table } from "../frame/parts.js";
import { identityRows, readFigures } from "../model/identities.js";

const ASK_MS = 5000;
const rate = (value, text) => (value === null ? "–" : `${text(value)}/s`);
const share = (value) => (value === null ? "–" : `${(100 * value).toFixed(1)} %`);

/** A section that refreshes itself while the view is shown, and is hidden from those who may not see it. */
export function identities(scope) {
  let before = null;
  let askedAt = 0;
  const users = table({
    label: "Who uses this member",
    key: (one) => one.identity,
    columns: [
      { title: "User, certificate or network", value: (one) => one.identity, wide: true },
      { title: "Requests", num: true, value: (one) => rate(one.requestsPerS, short) },
      { title: "Bytes", num: true, value: (one) => rate(one.bytesPerS, size) },
      { title: "Working time", num: true, value: (one) => share(one.timeShare) },
      { title: "Longest wait of a write", num: true, value: (one) => (one.waitS ? latency(one.waitS) : "–") },
      { title: "Watches", num: true, value: (one) => count(one.watches) },
      { title: "Leases", num: true, value: (one) => count(one.leases) },
    ],
  });
  const note = h("p", { class: "muted" }, "Working time is the part of the member's time that their requests take.");
  const element = section("Who uses this member", users.element, note);
  element.hidden = true;

  async function ask() {
    if (document.hidden) return;
    try {
      const after = readFigures(await getText("/debug/identities", { signal: scope.signal }));
      const now = performance.now();
      users.update(identityRows(before, after, (now - askedAt) / 1000));
      [before, askedAt] = [after, now];
      element.hidden = false;
    } catch {
      element.hidden = true;
    }
  }

  scope.every(ASK_MS, ask);
  ask();
  return element;
}
