// Who is signed in, and whether this page may change anything.
//
// The token lives in this tab alone (sessionStorage). A page begins read-only, always: "edit" is turned on by hand, is
// forgotten with the page, and needs a signed-in user where the cluster asks for users. The member decides in the end.

import { observable } from "./dom.js";

const KEY = "raftkv.session";

function stored() {
  try {
    return JSON.parse(sessionStorage.getItem(KEY)) ?? null;
  } catch {
    return null;
  }
}

/** `{ user, token }` or null. */
export const signedIn = observable(stored());

/** Whether the cluster asks for users; null while that is not known. */
export const usersOn = observable(null);

/** Whether actions that change something are offered. */
export const editing = observable(false);

/** Whether a view may show what needs a user. */
export const mayRead = () => !usersOn.get() || signedIn.get() !== null;

/** Keep a token, or forget it (null); without one that is needed nothing is edited. */
export function keep(session) {
  try {
    if (session) sessionStorage.setItem(KEY, JSON.stringify(session));
    else sessionStorage.removeItem(KEY);
  } catch {
    // Then it is kept in memory alone.
  }
  signedIn.set(session);
  if (!session && usersOn.get()) editing.set(false);
}

usersOn.on((on) => {
  if (on && !signedIn.get()) editing.set(false);
  if (on === false && signedIn.get()) keep(null);
});
