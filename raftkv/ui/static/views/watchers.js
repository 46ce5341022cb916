// Who watches: numbers of all members, and the streams of the member that is asked, the ones with the most watchers
// first. Which keys others watch is for root alone where users are on.

import { prefixEnd, shown, unbase64 } from "../frame/bytes.js";
import { getJson } from "../frame/call.js";
import { h, put } from "../frame/dom.js";
import { count, plural, short, size } from "../frame/format.js";
import { live } from "../frame/live.js";
import { badge, failure, head, section, state, table } from "../frame/parts.js";
import { href, view } from "../frame/router.js";
import { byName } from "./cluster.js";

const ASK_MS = 5000;

/** What a range is, for people: one key, a prefix, all keys, or from-to. Pure. */
export function rangeText(key, end) {
  if (end.length === 0) return shown(key);
  if (end.length === 1 && end[0] === 0) return key.length === 0 || (key.length === 1 && key[0] === 0) ? "all keys" : `${shown(key)} and all after`;
  return shown(prefixEnd(key)) === shown(end) ? `${shown(key)}*` : `${shown(key)} to ${shown(end)}`;
}

function ranges(stream) {
  const texts = stream.ranges.map((one) => {
    const key = unbase64(one.key);
    const text = one.is_cut ? `${shown(key)}…` : rangeText(key, unbase64(one.range_end));
    const link = one.is_cut
      ? h("span", { class: "mono" }, text)
      : h("a", { href: href("keys", [], { prefix: shown(key), flat: one.range_end ? "" : "1" }), class: "mono" }, text);
    return one.watchers > 1 ? [link, h("span", { class: "muted" }, ` ×${count(one.watchers)}`)] : link;
  });
  const more = stream.ranges_total - stream.ranges.length;
  return h("span", {}, texts.map((one, index) => [index > 0 && ", ", one]), more > 0 && h("span", { class: "muted" }, ` and ${count(more)} more`));
}

view("watchers", {
  title: "Watchers",
  key: "w",
  order: 40,
  group: "Store",
  mount(root, _route, scope) {
    const header = head("Watchers", { text: "Asking the member…" });
    const text = header.querySelector(".muted");
    const trouble = h("div");
    const members = table({
      label: "Watchers by member",
      key: (one) => one.id,
      columns: [
        { title: "Member", value: (one) => `${one.name}|${one.reachable}`, render: (one) => state(one.name || one.id, one.reachable ? "good" : "bad") },
        { title: "Streams", num: true, value: (one) => count(one.watch_streams) },
        { title: "Watchers", num: true, value: (one) => count(one.watchers) },
        { title: "Behind", num: true, value: (one) => count(one.slow_watchers), render: (one) => (one.slow_watchers ? badge(count(one.slow_watchers), "warn") : "0") },
        { title: "Events sent", num: true, value: (one) => (one.events_per_s == null ? "–" : `${short(one.events_per_s)}/s`) },
      ],
    });
    const streams = table({
      label: "Streams of this member",
      key: (one) => one.index,
      none: "This member has no watchers.",
      columns: [
        { title: "Client", mono: true, value: (one) => one.client || "inside the member" },
        { title: "User", value: (one) => one.user || "–" },
        { title: "Watchers", num: true, value: (one) => count(one.watchers) },
        { title: "Behind", num: true, value: (one) => one.slow_watchers, render: (one) => (one.slow_watchers ? badge(count(one.slow_watchers), "warn") : "0") },
        { title: "Unread", num: true, value: (one) => size(one.unread_bytes) },
        { title: "Watched", wide: true, value: (one) => JSON.stringify(one.ranges), render: ranges },
      ],
    });
    const note = h("p", { class: "muted" });
    const own = section("Streams of this member", trouble, streams.element, note);
    root.append(header, members.element, own);

    async function ask() {
      if (document.hidden) return;
      try {
        const found = await getJson("/ui/watchers", { signal: scope.signal });
        put(trouble);
        streams.update(found.streams.map((one, index) => ({ ...one, index: `${one.client}#${index}` })));
        const left = found.streams_total - found.streams.length;
        note.textContent = left > 0 ? `and ${plural(left, "stream")} with fewer watchers` : "";
        streams.element.hidden = false;
      } catch (error) {
        if (scope.signal.aborted) return;
        put(trouble, failure(error));
        streams.element.hidden = true;
      }
    }

    scope.on(
      live(
        (record) => {
          const total = record.members.reduce((all, one) => all + (one.watchers ?? 0), 0);
          const behind = record.members.reduce((all, one) => all + (one.slow_watchers ?? 0), 0);
          text.textContent = `${plural(total, "watcher")}${behind ? `, ${count(behind)} behind` : ", all up to date"}`;
          members.update([...record.members].sort(byName));
        },
        (error) => {
          text.textContent = "";
          put(members.element, failure(error));
        },
      ),
    );
    scope.every(ASK_MS, ask);
    ask();
  },
});
