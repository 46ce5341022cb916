// Views by the hash of the location: `#/keys/path?prefix=/app/`.
//
//     view("keys", {
//       title: "Keys", key: "k", order: 20, group: "Store",
//       mount(root, route, scope) {
//         scope.on(watchPrefix(...));        // undone when the view is left
//         return { update(route) {...} };    // optional: the path or query changed within the view
//       },
//     });
//
// `route`: { name, path: ["decoded", "parts"], query: URLSearchParams }. `href("keys", ["a b"], { prefix: "/" })` is the
// text of a link, `go(...)` follows one.

const views = new Map();
let current = null;
let onShow = () => {};

/** Register a view. `key` is the letter after `g` that opens it; views of one `group` stand together, by `order`. */
export function view(name, definition) {
  views.set(name, { name, order: 100, group: "", ...definition });
}

/** All views, in order. */
export const allViews = () => [...views.values()].sort((a, b) => a.order - b.order);

/** The hash of a place. */
export function href(name, path = [], query = {}) {
  const parts = [name, ...path].map(encodeURIComponent).join("/");
  const params = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "" && value != null));
  return `#/${parts}${params.size ? `?${params}` : ""}`;
}

/** Go to a place; `replace` leaves no step in the history. */
export function go(name, path = [], query = {}, { replace = false } = {}) {
  const hash = href(name, path, query);
  if (hash === location.hash) return;
  if (replace) {
    history.replaceState(null, "", hash);
    show();
  } else {
    location.hash = hash;
  }
}

function parse(hash) {
  const [path, query = ""] = hash.replace(/^#\//, "").split(/\?(.*)/s);
  const parts = path.split("/").map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  });
  return { name: parts[0], path: parts.slice(1).filter((part) => part !== ""), query: new URLSearchParams(query) };
}

/** What a view leaves behind when it goes: `scope.on(stop)`, `scope.signal` for calls, `scope.every(ms, work)`. */
class Scope {
  constructor() {
    this.controller = new AbortController();
    this.signal = this.controller.signal;
    this.stops = [];
  }
  on(stop) {
    if (typeof stop !== "function") return;
    if (this.signal.aborted) stop();
    else this.stops.push(stop);
  }
  every(ms, work) {
    const timer = setInterval(work, ms);
    this.on(() => clearInterval(timer));
  }
  listen(target, type, listener) {
    target.addEventListener(type, listener, { signal: this.signal });
  }
  close() {
    this.controller.abort();
    for (const stop of this.stops.splice(0).reverse()) stop();
  }
}

function show() {
  if (location.hash && !location.hash.startsWith("#/")) return;
  const route = parse(location.hash);
  const chosen = views.get(route.name) ?? allViews()[0];
  if (!chosen) return;
  if (current?.view === chosen && current.handle?.update) {
    current.handle.update(route);
    onShow(chosen, route, false);
    return;
  }
  const isNew = current?.view !== chosen;
  current?.scope.close();
  const main = document.getElementById("main");
  const root = document.createElement("div");
  root.className = `view view-${chosen.name}`;
  main.replaceChildren(root);
  const scope = new Scope();
  current = { view: chosen, scope, handle: null };
  onShow(chosen, route, isNew);
  try {
    current.handle = chosen.mount(root, route, scope) ?? null;
  } catch (error) {
    root.textContent = `This view failed: ${error.message}. Reload the page; if it fails again, the browser is too old.`;
    console.error(error);
  }
}

/** Begin to show views; `shown(view, route, isNew)` is called for each. */
export function startRouter(shown) {
  onShow = shown;
  window.addEventListener("hashchange", show);
  show();
}

/** Show the present view from its beginning: after a sign-in, for one. */
export function remount() {
  if (current) {
    current.handle = null;
    show();
  }
}
