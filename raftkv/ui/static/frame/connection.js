// Whether the member answers, and what to do if not: it is asked again, then the other members are tried in turn.
//
// A page may ask no other member for data (another origin), only whether it answers: the dashboard is then opened
// there, at the same place. With an open dialog, and in a cluster with users, the way to the other members is only
// offered: no text is lost, and a user stays signed in.

import { BASE, getJson, onReach, reached } from "./call.js";
import { h, observable, put } from "./dom.js";
import { usersOn } from "./session.js";

const ASK_MS = 1000;
const ALONE_ASKS = 2;
const ASK_TIMEOUT_S = 2;
const QUIET_MS = 10_000;

/** `{ member_id, name, cluster_id, version, users, members: [{ id, name, client_urls }] }`, or null. */
export const about = observable(null);

/** "ok", "lost" (asked again) or "moving" (another member answered). */
export const connection = observable("ok");

let asks = 0;
let timer = null;
let known = [];
const notice = () => document.getElementById("notice");

/** Remember where other members are: from `about`, or from a record of the live figures. */
export function remember(members) {
  const here = BASE.origin;
  const found = members
    .map((member) => ({ name: member.name || member.id, urls: (member.client_urls ?? []).filter(isWeb) }))
    .filter((member) => member.urls.length)
    .filter((member) => !member.urls.some((one) => sameOrigin(one, here)));
  if (found.length) known = found;
}

/** Whether a browser can open a member's URL: sockets of files it cannot. */
export const isWeb = (text) => /^https?:\/\//.test(text);

function sameOrigin(text, origin) {
  try {
    return new URL(text).origin === origin;
  } catch {
    return false;
  }
}

/** Ask the member what it is; throws what `call` throws. */
export async function refreshAbout() {
  const found = await getJson("/ui/about", { timeoutS: ASK_TIMEOUT_S });
  usersOn.set(Boolean(found.users));
  remember((found.members ?? []).filter((member) => member.id !== found.member_id));
  about.set(found);
  return found;
}

onReach((ok) => {
  if (ok) found();
  else lose();
});

let heardAt = 0;
onReach(() => {
  heardAt = Date.now();
});

/** From now on, ask a member that has said nothing for a while: one that is frozen ends no stream and refuses nothing. */
export function startAsking() {
  setInterval(() => {
    const isQuiet = Date.now() - heardAt >= QUIET_MS;
    if (isQuiet && !document.hidden && connection.get() === "ok") refreshAbout().catch(() => reached(false));
  }, QUIET_MS);
}

function found() {
  if (connection.get() === "ok") return;
  clearTimeout(timer);
  timer = null;
  asks = 0;
  connection.set("ok");
  put(notice());
  refreshAbout().catch(() => {});
}

function lose() {
  if (connection.get() !== "ok") return;
  connection.set("lost");
  asks = 0;
  tell(`${name()} does not answer; trying it again`);
  timer = setTimeout(ask, ASK_MS);
}

const name = () => (about.get()?.name ? `Member ${about.get().name}` : "The member");

async function ask() {
  asks += 1;
  try {
    await getJson("/ui/about", { timeoutS: ASK_TIMEOUT_S });
    return;
  } catch {
    if (connection.get() === "ok") return;
  }
  if (asks >= ALONE_ASKS && !usersOn.get() && (await move())) return;
  timer = setTimeout(ask, ASK_MS);
}

async function move() {
  for (const member of known) {
    if (connection.get() === "ok") return true;
    tell(`${name()} is lost; trying the next: ${member.name}`);
    for (const one of member.urls) {
      if (!(await answers(one)) || document.querySelector("dialog[open]")) continue;
      connection.set("moving");
      tell(`${name()} is lost; going on with ${member.name}`);
      location.assign(dashboardOf(one));
      return true;
    }
  }
  return false;
}

const dashboardOf = (text) => new URL(`ui/${location.hash}`, text.endsWith("/") ? text : `${text}/`).href;

async function answers(text) {
  try {
    const target = new URL("/livez", text);
    await fetch(target, { mode: "no-cors", cache: "no-store", signal: AbortSignal.timeout(ASK_TIMEOUT_S * 1000) });
    return true;
  } catch {
    return false;
  }
}

function tell(text) {
  const links = known.map((member) => [" ", h("a", { href: dashboardOf(member.urls[0]) }, `Open ${member.name}`)]);
  const again = h("button", { class: "plain", type: "button", onClick: () => refreshAbout().catch(() => reached(false)) });
  again.textContent = "Ask now";
  put(notice(), h("p", { class: "lost" }, h("span", { class: "dot bad" }), text, links, " ", again));
}
