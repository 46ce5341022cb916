// The cluster: members and who leads, how far each is, live rates and latencies, alarms, users, what happened.

import { call } from "../frame/call.js";
import { isWeb, remember } from "../frame/connection.js";
import { h, put } from "../frame/dom.js";
import { count, duration, latency, plural, short, size } from "../frame/format.js";
import { history, live } from "../frame/live.js";
import { badge, button, confirmed, empty, failure, figure, head, section, spark, state, table, time, toast } from "../frame/parts.js";
import { view } from "../frame/router.js";
import { editing } from "../frame/session.js";
import { merged } from "../model/events.js";
import { identities } from "./identities.js";

const ADVICE = {
  NOSPACE: "writes are refused until there is space: compact, defragment, then disarm the alarm here",
  CORRUPT: "the data of this member differs from the others': replace it (raftkvctl member replace)",
};
const ROLES = { leader: "info", follower: "", learner: "warn", candidate: "warn", "pre-candidate": "warn" };

const up = (record) => record.members.filter((one) => one.reachable);
const sum = (name) => (record) => total(up(record).map((one) => one[name]));
// Every member applies every write: the one that is furthest has counted all of them.
const most = (name) => (record) => {
  const known = up(record).map((one) => one[name]).filter((value) => value != null);
  return known.length ? Math.max(...known) : null;
};
const worst = (name, index) => (record) => {
  const known = up(record)
    .map((one) => (index === undefined ? one[name] : one[name]?.[index]))
    .filter((value) => value != null);
  return known.length ? Math.max(...known) : null;
};

function total(values) {
  const known = values.filter((value) => value != null);
  return known.length ? known.reduce((a, b) => a + b, 0) : null;
}

const FIGURES = [
  { name: "Puts and deletes", unit: "/s", find: (record) => total([most("puts_per_s")(record), most("deletes_per_s")(record)]), text: short, aside: (record) => (most("txns_per_s")(record) >= 0.5 ? `and ${short(most("txns_per_s")(record))} txns/s` : "") },
  { name: "Reads", unit: "/s", find: sum("ranges_per_s"), text: short },
  { name: "Watch events", unit: "/s", find: sum("events_per_s"), text: short },
  { name: "Renewed leases", unit: "/s", find: sum("keepalives_per_s"), text: short },
  { name: "Time of a put", find: worst("write_s", 0), more: worst("write_s", 1), text: latency, title: "Time of a write, p50 of the slowest member" },
  { name: "Time of a linearizable read", find: worst("read_s", 0), more: worst("read_s", 1), text: latency, title: "Time of a linearizable read, p50 of the slowest member" },
  { name: "Time of a log sync", find: worst("fsync_s", 0), more: worst("fsync_s", 1), text: latency, title: "Time of a sync of the log, p50 of the slowest member" },
  { name: "Database in use", find: worst("db_used_bytes"), more: null, text: size, quota: true },
];

function figures() {
  const shown = FIGURES.map((one) => {
    const curve = spark(one.title ?? one.name, { width: 200 });
    return { ...one, curve, box: figure(one.name, { spark: curve }) };
  });
  return {
    element: h("div", { class: "figures" }, shown.map((one) => one.box.element)),
    update(record) {
      for (const one of shown) {
        const value = one.find(record);
        const text = one.text(value);
        one.box.set(value === null ? "–" : text + (one.unit ?? ""), noteOf(one, record));
        one.curve.set(history(one.find), value === null ? "not known" : `${text}${one.unit ?? ""} now`);
      }
    },
  };
}

function noteOf(one, record) {
  if (one.aside) return one.aside(record);
  if (one.more) {
    const p99 = one.more(record);
    return p99 === null ? "no sample in 30 s" : `p99 ${one.text(p99)}`;
  }
  if (!one.quota) return "";
  const quota = worst("quota_bytes")(record);
  return quota ? `of ${size(quota)}` : "";
}

function memberState(member, record) {
  if (!member.reachable) return state(member.name || member.id, "bad");
  return state(member.name || member.id, member.leader ? "good" : record.members.length === 1 ? "good" : "warn");
}

const roleText = (member) => (member.reachable ? member.role ?? "older version" : "no answer");

function lagText(member) {
  if (member.lag === null || member.lag === undefined) return "–";
  return member.lag === 0 ? "0" : count(member.lag);
}

function columns(current) {
  const me = (member) => member.id === current().me;
  const when = (member, text) => (member.reachable ? text() : "–");
  return [
    {
      title: "Member",
      value: (member) => `${member.name}|${member.id}|${member.reachable}|${member.leader}|${me(member)}`,
      render: (member) =>
        h(
          "span",
          { class: "row" },
          memberState(member, current()),
          me(member)
            ? badge("this one")
            : member.client_urls.find(isWeb) && h("a", { href: `${member.client_urls.find(isWeb)}/ui/`, class: "small-link", title: member.client_urls.join(", ") }, "open", h("span", { class: "sr" }, ` the dashboard of ${member.name || member.id}`)),
        ),
    },
    { title: "Role", value: roleText, render: (member) => badge(roleText(member), member.reachable ? ROLES[member.role] : "bad") },
    { title: "Lag", num: true, value: lagText },
    { title: "Term", num: true, value: (member) => when(member, () => count(member.term)) },
    { title: "Index", num: true, value: (member) => when(member, () => count(member.applied)) },
    { title: "Revision", num: true, value: (member) => when(member, () => count(member.revision)) },
    { title: "Database", num: true, value: (member) => when(member, () => size(member.db_bytes)) },
    { title: "Write p99", num: true, value: (member) => when(member, () => latency(member.write_s?.[1])) },
    { title: "Sync p99", num: true, value: (member) => when(member, () => latency(member.fsync_s?.[1])) },
    { title: "Clients", num: true, value: (member) => when(member, () => count(member.connections)) },
    { title: "Watchers", num: true, value: (member) => when(member, () => count(member.watchers)) },
    { title: "Up for", num: true, value: (member) => when(member, () => duration(coarse(member.uptime_s))) },
    { title: "Version", value: (member) => when(member, () => member.version ?? "–") },
  ];
}

const EVENTS = [
  { title: "When", value: (one) => one.at, render: (one) => time(one.at) },
  { title: "What", value: (one) => one.text, render: (one) => state(one.text, one.kind), wide: true },
];

/** Members in the order in which people count them. */
export const byName = (a, b) => (a.name || a.id).localeCompare(b.name || b.id, "en", { numeric: true });

// Seconds that change each second are noise beside figures that matter.
const coarse = (seconds) => (seconds === undefined ? undefined : seconds < 60 ? seconds : Math.floor(seconds / 60) * 60);

function drawAlarms(root, record, names) {
  const text = JSON.stringify([record.alarms, editing.get()]);
  if (root.dataset.shown === text) return;
  root.dataset.shown = text;
  put(
    root,
    record.alarms.map((alarm) =>
      h(
        "div",
        { class: "failure", role: "alert" },
        badge(alarm.alarm, "bad"),
        h("span", {}, `${names.get(alarm.member) ?? alarm.member}: ${ADVICE[alarm.alarm] ?? "see the member's log"}`),
        editing.get() && button("Disarm", () => disarm(alarm), { small: true }),
      ),
    ),
  );
}

async function disarm(alarm) {
  const id = BigInt(`0x${alarm.member}`).toString();
  const done = await confirmed(`Disarm ${alarm.alarm}?`, "Disarm it when its cause is removed; otherwise it is raised again.", {
    action: "Disarm",
    run: () => call("/v3/maintenance/alarm", { action: "DEACTIVATE", memberID: id, alarm: alarm.alarm }),
  });
  if (done) toast("Disarmed");
}

function summary(record) {
  const found = record.members.find((one) => one.reachable && one.role === "leader");
  const away = record.members.length - up(record).length;
  const parts = [plural(record.members.length, "member")];
  parts.push(found ? `${found.name || found.id} leads in term ${found.term}` : "no leader");
  if (away) parts.push(`${away} not answering`);
  return parts.join(" · ");
}

view("cluster", {
  title: "Cluster",
  key: "c",
  order: 10,
  mount(root, _route, scope) {
    let record = null;
    const header = head("Cluster", { text: "Asking the member…" });
    const text = header.querySelector(".muted");
    const alarms = h("div", { class: "part" });
    const numbers = figures();
    const members = table({ columns: columns(() => record), key: (one) => one.id, label: "Members" });
    const store = h("dl", { class: "sheet" });
    const events = table({ columns: EVENTS, key: (one) => `${one.at} ${one.text}`, label: "Events", none: "Nothing has happened since the members started." });
    const trouble = h("div");
    const content = h("div", { class: "stack", hidden: true }, alarms, numbers.element, section("Members", members.element), identities(scope), section("Store", store), section("Events", events.element));
    root.append(header, trouble, content);

    function draw(next) {
      record = next;
      const names = new Map(record.members.map((one) => [one.id, one.name || one.id]));
      remember(record.members.filter((one) => one.id !== record.me));
      put(trouble);
      content.hidden = false;
      text.textContent = summary(record);
      drawAlarms(alarms, record, names);
      alarms.hidden = !record.alarms.length;
      numbers.update(record);
      members.update([...record.members].sort(byName));
      events.update(merged(record.members));
      drawStore(store, record);
    }

    scope.on(
      live(draw, (error) => {
        content.hidden = true;
        text.textContent = "";
        put(trouble, failure(error), empty("No figures.", "Only users of the cluster can see figures."));
      }),
    );
    scope.on(editing.on(() => record && draw(record)));
  },
});

function drawStore(store, record) {
  const me = record.members.find((one) => one.id === record.me) ?? {};
  const facts = [
    ["Keys", count(me.keys)],
    ["Revision", count(me.revision)],
    ["History from revision", count(Math.max(1, me.compact_revision ?? 0))],
    ["Leases", count(me.leases)],
    ["Watchers, all members", count(sum("watchers")(record))],
    ["Behind with events", count(sum("slow_watchers")(record))],
    ["Database on disk", size(me.db_bytes)],
    ["Changes of leaders", count(me.leader_changes)],
  ];
  if (store.children.length !== facts.length) {
    put(store, facts.map(([name]) => h("div", {}, h("dt", {}, name), h("dd", {}))));
  }
  facts.forEach(([, value], index) => {
    const cell = store.children[index].lastChild;
    if (cell.textContent !== value) cell.textContent = value;
  });
}
