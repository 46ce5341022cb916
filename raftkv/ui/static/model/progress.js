/**
 * The checkpoints in the history of a run: what each generation committed, and what its end cost in work. Pure; the
 * twin of `raftkv.training.history`.
 *
 *     const progress = new Progress("job");
 *     progress.record(item);  progress.deleting(item);        // every change, from the run's first revision on
 *     withCommits(history, progress)
 *
 * A checkpoint belongs to the generation in which its saving began: the number of its attempt says at which revision.
 * Of each commit only a few numbers are kept, so that ten thousand are no burden.
 */

import {beganRevision, parseAttempt, readCheckpoint, registryKeys} from "./checkpoints.js";
import {between} from "./timeline.js";
import {roundEven} from "./words.js";

/** Commits and attempts that were given up, change by change. */
export class Progress {
  /** @param {string} run its id. */
  constructor(run) {
    this.keys = registryKeys(run);
    this.found = new Map();
    this.attempts = new Map();
  }

  /** Take a record as it was put; a later change of it, as of its metrics, is no commit. */
  record(item) {
    const place = `${item.create} ${item.key}`;
    const one = this.found.has(place) ? null : readCheckpoint(item.value);
    if (one === null) return;
    const saved = {time: one.time - one.duration_s, writer: one.holder, revision: beganRevision(one.number)};
    const committed = {time: one.time, writer: one.holder, revision: item.create};
    const {step, kind, size_bytes, holder} = one;
    this.found.set(place, {step, kind, size_bytes, holder, saved, committed});
  }

  /** Take a key below `deleting/`, put or deleted. */
  deleting(item) {
    const text = item.key.slice(this.keys.deletings.length);
    const attempt = parseAttempt(text.slice(text.indexOf("/") + 1));
    if (attempt) this.attempts.set(text, {step: attempt.step, revision: beganRevision(attempt.number)});
  }

  /** All commits, the oldest first. */
  get commits() {
    return [...this.found.values()].sort((one, other) => one.committed.revision - other.committed.revision);
  }

  /** Attempts that were never committed. */
  get givenUp() {
    const saved = new Set([...this.found.values()].map((commit) => commit.saved.revision));
    return [...this.attempts.values()].filter((one) => !saved.has(one.revision));
  }
}

/** The history of a run with its commits, and what faults cost. */
export function withCommits(history, progress) {
  const {commits, givenUp} = progress;
  if (commits.length === 0 && givenUp.length === 0) return history;
  const generations = history.generations.map((one, place) => {
    const begin = one.began.revision;
    const end = history.generations[place + 1]?.began.revision ?? Infinity;
    const kept = commits.filter((commit) => commit.saved.revision < end);
    const own = kept.filter((commit) => commit.saved.revision >= begin);
    const ahead = givenUp.filter((attempt) => begin <= attempt.revision && attempt.revision < end);
    return {...one, commits: own, lost: lostIn(one, own, kept, Math.max(0, ...ahead.map((attempt) => attempt.step)))};
  });
  return {...history, generations};
}

function lostIn(generation, own, kept, ahead) {
  if (generation.ended === null || generation.closed) return null;
  const newest = kept.reduce((best, commit) => (best === null || commit.step > best.step ? commit : best), null);
  if (newest === null) {
    const since = between(generation.began, generation.ended);
    return {kept_step: null, since, steps_at_least: ahead, steps_estimated: null};
  }
  const since = between(own.includes(newest) ? newest.saved : generation.began, generation.ended);
  const same = own.filter((commit) => commit.kind === newest.kind);
  const atLeast = Math.max(0, ahead - newest.step);
  return {kept_step: newest.step, since, steps_at_least: atLeast, steps_estimated: estimated(same, since)};
}

function estimated(commits, since) {
  if (commits.length < 2) return null;
  const [first, last] = [commits[0], commits.at(-1)];
  const took = last.saved.time - first.saved.time;
  return took > 0 ? roundEven(((last.step - first.step) / took) * since.seconds) : null;
}
