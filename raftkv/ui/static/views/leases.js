// Leases: which there are, how long each lives on, and which keys go with it. A page of them at a time; the time left
// counts down here, and the members are asked again every few seconds for the page that is shown.

import { idHex, leaseHex, shown, unbase64 } from "../frame/bytes.js";
import { call } from "../frame/call.js";
import { h, put } from "../frame/dom.js";
import { count, duration, plural } from "../frame/format.js";
import { shortcut } from "../frame/keyboard.js";
import { badge, button, confirmed, dialog, empty, failure, field, head, section, table, toast } from "../frame/parts.js";
import { go, href, view } from "../frame/router.js";
import { editing } from "../frame/session.js";

const PAGE = 25;
const ASK_MS = 5000;
const AT_A_TIME = 4;
const KEYS_SHOWN = 100;

const fromHex = (hex) => BigInt.asIntN(64, BigInt(`0x${hex}`)).toString();

/** Run `work` over a list, a few at a time. */
async function few(list, work) {
  const rest = [...list];
  await Promise.all(
    Array.from({ length: AT_A_TIME }, async () => {
      while (rest.length) await work(rest.shift());
    }),
  );
}

const leftNow = (lease) => (lease.ttl === undefined ? null : Math.max(0, lease.ttl - (Date.now() - lease.asked) / 1000));

async function ask(lease, signal) {
  const answer = await call("/v3/lease/timetolive", { ID: lease.id, keys: true }, { signal });
  lease.ttl = Number(answer.TTL ?? 0);
  lease.granted = Number(answer.grantedTTL ?? 0);
  lease.keys = answer.keys ?? [];
  lease.asked = Date.now();
  lease.gone = lease.ttl < 0;
}

function leftText(lease) {
  if (lease.gone) return "ended";
  const left = leftNow(lease);
  return left === null ? "…" : duration(left);
}

function leftBar(lease) {
  const left = leftNow(lease);
  const share = left === null || !lease.granted ? 0 : Math.min(1, left / lease.granted);
  const kind = lease.gone || share < 0.2 ? "bad" : share < 0.5 ? "warn" : "good";
  return h("span", { class: "row end" }, h("meter", { class: kind, min: "0", max: "1", value: share.toFixed(2), "aria-label": "Time left" }), leftText(lease));
}

view("leases", {
  title: "Leases",
  key: "l",
  order: 30,
  group: "Store",
  mount(root, route, scope) {
    let leases = [];
    let page = 0;
    let chosen = "";
    const grant = button("Grant a lease", () => askGrant().then((done) => done && read()), { kind: "primary" });
    const again = button("Read again", () => read());
    const header = head("Leases", { text: "Reading…", actions: [again, grant] });
    const text = header.querySelector(".muted");
    const trouble = h("div");
    const grid = table({
      label: "Leases",
      key: (one) => one.id,
      href: (one) => href("leases", [leaseHex(one.id)]),
      none: empty("No leases.", "raftkvctl lease grant 60"),
      columns: [
        { title: "Lease", mono: true, value: (one) => leaseHex(one.id) },
        { title: "Granted for", num: true, value: (one) => (one.granted ? duration(one.granted) : "…") },
        { title: "Left", num: true, value: leftText, render: leftBar },
        { title: "Keys", num: true, value: (one) => (one.keys ? count(one.keys.length) : "…") },
        { title: "First key", mono: true, value: (one) => (one.keys?.length ? shown(unbase64(one.keys[0])) : ""), render: (one) => (one.keys?.length ? keyLink(one.keys[0]) : "") },
      ],
    });
    const turn = h("div", { class: "row" });
    const side = h("div");
    root.append(header, trouble, side, grid.element, turn);

    const visible = () => leases.slice(page * PAGE, page * PAGE + PAGE);

    async function read() {
      try {
        const answer = await call("/v3/lease/leases", {}, { signal: scope.signal });
        const before = new Map(leases.map((one) => [one.id, one]));
        leases = (answer.leases ?? []).map((one) => before.get(String(one.ID)) ?? { id: String(one.ID) });
        put(trouble);
        grid.element.hidden = false;
        page = Math.min(page, Math.max(0, Math.ceil(leases.length / PAGE) - 1));
        draw();
        await refresh();
      } catch (error) {
        if (!scope.signal.aborted) fail(error);
      }
    }

    function fail(error) {
      text.textContent = "";
      grid.element.hidden = true;
      put(trouble, failure(error));
    }

    async function refresh() {
      if (document.hidden) return;
      const wanted = [...visible(), ...leases.filter((one) => leaseHex(one.id) === chosen)];
      await few(new Set(wanted), (one) => ask(one, scope.signal)).catch((error) => !scope.signal.aborted && fail(error));
      draw();
    }

    function draw() {
      if (scope.signal.aborted) return;
      grant.hidden = !editing.get();
      text.textContent = `${plural(leases.length, "lease")}; the time left is the leader's`;
      grid.update(visible());
      drawTurn();
      drawChosen();
    }

    function drawTurn() {
      const pages = Math.ceil(leases.length / PAGE);
      const to = (next) => () => ((page = next), draw(), refresh());
      const key = `${page}/${pages}`;
      if (turn.dataset.shown === key) return;
      turn.dataset.shown = key;
      put(
        turn,
        pages > 1 && [
          button("Before", to(page - 1), { disabled: page === 0 }),
          h("span", { class: "muted" }, `${page + 1} of ${pages}`),
          button("Next", to(page + 1), { disabled: page + 1 >= pages }),
        ],
      );
    }

    function drawChosen() {
      const lease = leases.find((one) => leaseHex(one.id) === chosen);
      const key = JSON.stringify([chosen, Boolean(lease), lease?.keys, lease?.gone, editing.get()]);
      if (side.dataset.shown === key) return;
      side.dataset.shown = key;
      if (!chosen) put(side);
      else if (!lease) put(side, empty(`There is no lease ${chosen}`, "It has ended, and its keys with it."));
      else put(side, chosenBox(lease));
    }

    function chosenBox(lease) {
      const keys = lease.keys ?? [];
      return h(
        "div",
        { class: "card detail" },
        h(
          "div",
          { class: "head" },
          h("h2", {}, leaseHex(lease.id), " ", lease.gone && badge("ended", "bad")),
          h("div", { class: "actions" }, editing.get() && button("Revoke", () => revoke(lease).then(read), { kind: "danger" }), button("Close", () => go("leases"))),
        ),
        section(
          plural(keys.length, "key"),
          keys.length
            ? h("ul", { class: "keys-list" }, keys.slice(0, KEYS_SHOWN).map((one) => h("li", {}, keyLink(one))))
            : h("p", { class: "muted" }, "No key is attached: the end of the lease deletes nothing."),
          keys.length > KEYS_SHOWN && h("p", { class: "muted" }, `and ${count(keys.length - KEYS_SHOWN)} more`),
        ),
      );
    }

    function update(next) {
      chosen = next.path[0] ?? "";
      draw();
      if (chosen) refresh();
    }

    scope.every(1000, () => grid.update(visible()));
    scope.every(ASK_MS, refresh);
    scope.on(editing.on(draw));
    scope.on(shortcut("r", "Read again", read));
    update(route);
    read();
    return { update };
  },
});

const keyLink = (key) => {
  const name = shown(unbase64(key));
  return h("a", { href: href("keys", [], { prefix: name.slice(0, name.lastIndexOf("/") + 1), key: name }) }, name);
};

async function revoke(lease) {
  const keys = lease.keys?.length ?? 0;
  const done = await confirmed(`Revoke lease ${leaseHex(lease.id)}?`, `${plural(keys, "key")} attached to it will be deleted. The client that keeps it alive learns that it has ended.`, {
    action: "Revoke",
    word: keys > 1 ? leaseHex(lease.id) : "",
    run: () => call("/v3/lease/revoke", { ID: lease.id }),
  });
  if (done) toast("Revoked");
}

function askGrant() {
  const ttl = field("Seconds to live", { value: "60", type: "number", min: "1", required: true });
  const id = field("Id (hex, empty: chosen by the cluster)", { pattern: "[0-9a-fA-F]{1,16}" });
  return dialog("Grant a lease", h("div", { class: "fields" }, ttl.element, id.element), [
    { text: "Cancel" },
    {
      text: "Grant",
      kind: "primary",
      run: async () => {
        const answer = await call("/v3/lease/grant", { TTL: String(ttl.value), ID: id.value ? fromHex(id.value) : "0" });
        toast(`Granted ${idHex(answer.ID)}`);
        return true;
      },
    },
  ]);
}
