// Runs the model of the dashboard for tests: a line of JSON in, a line of JSON out.
//
//     {"scenario": "runs", "input": {"kvs": [...]}}      ->      {"result": ...} or {"error": "..."}

import {createInterface} from "node:readline";

const root = new URL("../../../raftkv/ui/static/model/", import.meta.url);
const load = (name) => import(new URL(`${name}.js`, root).href);
const [records, words, contests, runs, timeline, progress, admission, checkpoints, drawings, identities] = await Promise.all(
  ["records", "words", "contests", "runs", "timeline", "progress", "admission", "checkpoints", "drawings", "identities"].map(load),
);

const items = (kvs) => (kvs ?? []).map(records.itemOf);

function historyOf({run, events, commits = [], deletions = [], since = 0, complete = true}) {
  const fold = new timeline.Fold(run);
  for (const event of events.map(records.eventOf)) {
    const change = runs.readChange(run, event.item, event.deleted);
    if (change) fold.apply(change);
  }
  const found = new progress.Progress(run);
  for (const event of commits.map(records.eventOf)) if (!event.deleted) found.record(event.item);
  for (const event of deletions.map(records.eventOf)) found.deleting(event.item);
  return progress.withCommits(fold.history({sinceRevision: since, complete}), found);
}

function checkpointsOf({run, kvs, latest}) {
  const keys = checkpoints.registryKeys(run);
  const below = (prefix) => items(kvs).filter((item) => item.key.startsWith(prefix));
  const held = checkpoints.holdsByCheckpoint(keys, below(keys.holds));
  const newest = new Map(checkpoints.runSummaries(items(latest)).map((one) => [one.kind, one.latest.step]));
  const found = below(keys.records).map((item) => checkpoints.readCheckpoint(item.value)).filter(Boolean);
  const heldBy = (one) => held.get(`${one.kind} ${one.step}`);
  const fence = below(keys.fence)[0];
  return {
    rows: found.map((one) => checkpoints.checkpointRow(one, newest.get(one.kind) === one.step, heldBy(one))),
    details: found.map((one) => checkpoints.details(one, heldBy(one))),
    children: found.map((one) => checkpoints.childrenOf(heldBy(one))),
    lineage: found.map(checkpoints.lineageRow),
    tags: checkpoints.tagsOf(keys, below(keys.tags)),
    attempts: checkpoints.attemptsUnderWay(keys, below(keys.attempts), fence ? checkpoints.readFence(fence.value) : null),
    deletions: checkpoints.deletionsUnderWay(keys, below(keys.deletings)),
  };
}

const scenarios = {
  identities: ({before, after, seconds}) =>
    identities.identityRows(before && identities.readFigures(before), identities.readFigures(after), seconds),
  history: (input) => {
    const history = historyOf(input);
    const roots = history.generations.map(timeline.rootFault);
    return {
      history, roots, generations: timeline.generationTable(history), nodes: timeline.nodeTable(history),
      described: runs.describe(history, input.beside),
    };
  },
  drawing: (input) => drawings.timelineLayout(historyOf(input), {now: input.now, last: input.last}),
  runs: ({kvs}) => runs.listRuns(items(kvs).filter((item) => runs.isListed(item.key))).map(runs.runRow),
  clusters: ({kvs}) => admission.describeClusters(items(kvs)),
  place: ({run, kvs}) => admission.placeOf(run, items(kvs)),
  contests: ({events}) => {
    const found = new contests.Contests();
    for (const {deleted, item} of events.map(records.eventOf)) deleted ? found.remove(item.key) : found.put(item);
    return found.list();
  },
  summaries: ({kvs}) => checkpoints.runSummaries(items(kvs)).map(checkpoints.summaryRow),
  checkpoints: checkpointsOf,
  lineage: ({chain, children, lost}) => drawings.lineageLayout(chain, children, lost),
  words: ({sizes, spans, numbers, names}) => ({
    sizes: sizes.map(words.size),
    spans: spans.map(words.span),
    numbers: numbers.map(words.general),
    quoted: names.map(checkpoints.quoted),
  }),
};

for await (const line of createInterface({input: process.stdin})) {
  const {scenario, input} = JSON.parse(line);
  let answer;
  try {
    answer = {result: scenarios[scenario](input)};
  } catch (error) {
    answer = {error: String(error.stack)};
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}
