// Who uses a member: its figures by user, certificate or network, and the rates between two readings. Pure.

const SAMPLE = /^raftkv_identity_(\w+)\{identity="((?:[^"\\]|\\.)*)"\} (\S+)$/;

/** The samples of `/debug/identities`, which are in Prometheus's format: figures by name, by identity. */
export function readFigures(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const [, name, label, value] = SAMPLE.exec(line) ?? [];
    if (name === undefined) continue;
    const identity = label.replace(/\\(.)/g, (_, escaped) => (escaped === "n" ? "\n" : escaped));
    if (!found.has(identity)) found.set(identity, {});
    found.get(identity)[name] = Number(value);
  }
  return found;
}

/** A row for each identity that uses something, the busiest first. Rates are null until a second reading. */
export function identityRows(before, after, seconds) {
  const rows = [...after].map(([identity, now]) => {
    const rate = (name) => {
      const grown = now[name] - before?.get(identity)?.[name];
      return seconds > 0 && grown >= 0 ? grown / seconds : null;
    };
    return {
      identity: identity === "other" ? "all others" : identity,
      requestsPerS: rate("requests_total"),
      bytesPerS: rate("bytes_total"),
      timeShare: rate("loop_seconds_total"),
      waitS: now.queue_wait_seconds,
      watches: now.watches,
      leases: now.leases,
      isIdle: !(now.requests_total || now.watches || now.leases),
    };
  });
  return rows
    .filter((row) => !row.isIdle)
    .sort((a, b) => (b.timeShare ?? 0) - (a.timeShare ?? 0) || a.identity.localeCompare(b.identity, "en"));
}
