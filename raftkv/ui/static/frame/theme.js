// Light or dark, before anything is painted: what was chosen here, else what the system prefers.
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("raftkv.theme");
  } catch {
    // Storage may be forbidden; the system's preference is good enough.
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
