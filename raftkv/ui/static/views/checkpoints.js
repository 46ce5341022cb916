// Checkpoints: which runs have some. Those of one run are shown by `registry.js`, one by `checkpoint.js`.

import { h, perFrame, put } from "../frame/dom.js";
import { empty, failure, figure, head } from "../frame/parts.js";
import { href, view } from "../frame/router.js";
import { watchMap } from "../frame/watch.js";
import { LATEST, runSummaries, summaryRow } from "../model/checkpoints.js";
import { size } from "../model/words.js";
import { mountCheckpoint } from "./checkpoint.js";
import { filter, pagedTable } from "./pages.js";
import { mountRegistry } from "./registry.js";

const SUMMARIES_MAX = 20_000;

const cell = (place) => (one) => summaryRow(one)[place];
const COLUMNS = [
  { title: "run", value: (one) => one.run, mono: true, sort: true },
  { title: "kind", value: (one) => one.kind },
  { title: "latest", value: (one) => one.latest.step, num: true, sort: true },
  { title: "committed", value: cell(3), sortBy: (one) => one.latest.time, sort: true },
  { title: "checkpoints", value: (one) => one.latest.count, num: true, sort: true },
  { title: "size", value: cell(5), sortBy: (one) => one.latest.size_bytes, num: true, sort: true },
  { title: "metrics (from to)", value: cell(6), wide: true },
];

view("checkpoints", {
  title: "Checkpoints",
  key: "p",
  order: 70,
  group: "Training",
  mount(root, route, scope) {
    const [run, kind, step] = route.path;
    if (step !== undefined) mountCheckpoint(root, { run, kind, step: Number(step) }, scope);
    else if (run !== undefined) mountRegistry(root, { run, kind: kind ?? "" }, scope);
    else mountList(root, scope);
  },
});

function mountList(root, scope) {
  const figures = ["Runs", "Checkpoints", "Bytes"].map((name) => figure(name));
  const note = h("div", { role: "status" });
  const table = pagedTable({
    columns: COLUMNS, key: (one) => `${one.kind} ${one.run}`, href: (one) => href("checkpoints", [one.run, one.kind]), label: "Runs with checkpoints",
    none: empty("No run has committed a checkpoint.", "Save one as docs/training/checkpoints.md says, or register existing ones: raftkvctl checkpoint import"),
  });
  let found = null;
  const draw = perFrame(() => found && table.update(found.filter((one) => search.matches(one.run))));
  const search = filter("Names that contain", draw);
  root.append(
    head("Checkpoints", { text: "What runs have committed, and what is kept." }),
    h("div", { class: "figures three" }, figures.map((one) => one.element)), search.element, note, table.element,
  );
  const onChange = (map, { error, more }) => {
    if (error) {
      put(note, failure(error));
      return;
    }
    put(note, more && h("p", { class: "muted" }, `Only the first ${SUMMARIES_MAX} runs are shown.`));
    found = runSummaries(map.values());
    const [runs, checkpoints, bytes] = figures;
    runs.set(new Set(found.map((one) => one.run)).size.toLocaleString("en-US"));
    checkpoints.set(found.reduce((sum, one) => sum + one.latest.count, 0).toLocaleString("en-US"));
    bytes.set(size(found.reduce((sum, one) => sum + one.latest.size_bytes, 0)));
    draw();
  };
  scope.on(watchMap(LATEST, onChange, { limit: SUMMARIES_MAX }));
}
