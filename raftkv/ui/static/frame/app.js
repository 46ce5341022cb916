// The page: its bar, its navigation, sign-in, edit switch, theme, connection. Views register themselves when imported.

import "../views/index.js";
import { call, reached } from "./call.js";
import { about, connection, refreshAbout, startAsking } from "./connection.js";
import { h, put } from "./dom.js";
import { shortcut, startKeyboard, help } from "./keyboard.js";
import { button, dialog, field, toast } from "./parts.js";
import { allViews, go, href, remount, startRouter } from "./router.js";
import { editing, keep, signedIn, usersOn } from "./session.js";

const THEMES = { "": "system", light: "light", dark: "dark" };
const SIGNS = { "": "◐", light: "☀", dark: "☾" };

function theme() {
  return document.documentElement.dataset.theme ?? "";
}

function turnTheme() {
  const names = Object.keys(THEMES);
  const next = names[(names.indexOf(theme()) + 1) % names.length];
  if (next) document.documentElement.dataset.theme = next;
  else delete document.documentElement.dataset.theme;
  try {
    if (next) localStorage.setItem("raftkv.theme", next);
    else localStorage.removeItem("raftkv.theme");
  } catch {
    // Then it lasts as long as the page.
  }
  drawTools();
}

async function signIn() {
  const name = field("User", { autocomplete: "username", required: true });
  const password = field("Password", { type: "password", autocomplete: "current-password" });
  const text = h("p", { class: "muted" }, "Kept in this tab until it is closed. The page stays read-only until you turn on Edit.");
  await dialog("Sign in", h("div", { class: "fields" }, text, name.element, password.element), [
    { text: "Cancel" },
    {
      text: "Sign in",
      kind: "primary",
      run: async () => {
        const user = name.value.trim();
        const answer = await call("/v3/auth/authenticate", { name: user, password: password.value });
        keep({ user, token: answer.token });
        toast(`Signed in as ${user}`);
        return true;
      },
    },
  ]);
}

function signOut() {
  keep(null);
  toast("Signed out");
}

function turnEdit() {
  if (usersOn.get() && !signedIn.get()) {
    signIn();
    return;
  }
  editing.set(!editing.get());
  toast(editing.get() ? "Edit is on: this page can now change the store" : "Read-only again");
}

/** The address names the view, the key, the prefix and the revision that are shown; without a clipboard it is shown. */
const copyLink = () =>
  navigator.clipboard ? navigator.clipboard.writeText(location.href).then(() => toast("Link copied")) : toast(location.href);

function drawTools() {
  const user = signedIn.get();
  const parts = [
    button(editing.get() ? "Editing" : "Read-only", turnEdit, {
      kind: editing.get() ? "edit on" : "edit",
      "aria-pressed": String(editing.get()),
      title: "Allow this page to change the store (e)",
    }),
    usersOn.get() &&
      (user
        ? button(`${user.user} · Sign out`, signOut, { kind: "plain" })
        : button("Sign in", signIn, { kind: "primary" })),
    button(SIGNS[theme()], turnTheme, {
      kind: "plain",
      "aria-label": `Theme: ${THEMES[theme()]}`,
      title: `Theme: ${THEMES[theme()]} (t)`,
    }),
    button("Link", copyLink, { kind: "plain", "aria-label": "Copy a link to this view", title: "Copy a link to this view (l)" }),
    button("?", help, { kind: "plain", "aria-label": "Shortcuts", title: "Shortcuts (?)" }),
  ];
  put(document.getElementById("tools"), parts);
  document.documentElement.classList.toggle("editing", editing.get());
}

function drawWhere() {
  const found = about.get();
  const where = document.getElementById("where");
  if (!found) return;
  const kind = connection.get() === "ok" ? "good" : "bad";
  const text = connection.get() === "ok" ? found.name : `${found.name}: no answer`;
  put(where, h("span", { class: `dot ${kind}` }), h("span", {}, text), h("span", { class: "muted id" }, ` cluster ${found.cluster_id}`));
}

function drawNav(chosen) {
  const nav = document.getElementById("nav");
  const groups = new Map();
  for (const one of allViews()) groups.set(one.group, [...(groups.get(one.group) ?? []), one]);
  put(
    nav,
    [...groups].map(([group, list]) => [
      group && h("p", { class: "group" }, group),
      h(
        "ul",
        {},
        list.map((one) =>
          h("li", {}, h("a", { href: href(one.name), "aria-current": one === chosen ? "page" : null }, one.title)),
        ),
      ),
    ]),
  );
  nav.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
}

function shown(view, route, isNew) {
  document.title = `${view.title} · raftkv`;
  if (!isNew) return;
  drawNav(view);
  // A new view begins at its top; its heading is where a screen reader goes on.
  window.scrollTo(0, 0);
  if (document.activeElement?.closest?.("#nav, .brand")) document.getElementById("main").focus({ preventScroll: true });
}

function begin() {
  document.getElementById("skip").addEventListener("click", (event) => {
    event.preventDefault();
    document.getElementById("main").focus();
  });
  document.addEventListener("raftkv:sign-in", signIn);
  for (const changed of [signedIn, usersOn, editing]) changed.on(drawTools);
  signedIn.on(remount);
  about.on(drawWhere);
  connection.on(drawWhere);
  drawWhere();
  drawTools();
  startKeyboard();
  for (const one of allViews()) if (one.key) shortcut(`g ${one.key}`, one.title, () => go(one.name), "Go to");
  shortcut("l", "Copy a link to this view", copyLink, "Everywhere");
  shortcut("e", "Turn Edit on or off", turnEdit, "Everywhere");
  shortcut("t", "Light, dark, or as the system", turnTheme, "Everywhere");
  startRouter(shown);
  startAsking();
}

refreshAbout()
  .catch(() => reached(false))
  .finally(begin);
