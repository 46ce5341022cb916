// What changed between two texts, line by line. Pure.

const CELLS_MAX = 4_000_000;

/** `[{ kind: " " | "-" | "+", text }]`: lines of both, only of the first, only of the second; in order. */
export function diffLines(before, after) {
  const a = before === "" ? [] : before.split("\n");
  const b = after === "" ? [] : after.split("\n");
  let head = 0;
  while (head < a.length && head < b.length && a[head] === b[head]) head += 1;
  let tail = 0;
  while (tail < a.length - head && tail < b.length - head && a[a.length - 1 - tail] === b[b.length - 1 - tail]) tail += 1;
  const middle = between(a.slice(head, a.length - tail), b.slice(head, b.length - tail));
  const same = (text) => ({ kind: " ", text });
  return [...a.slice(0, head).map(same), ...middle, ...a.slice(a.length - tail).map(same)];
}

function between(a, b) {
  const gone = (text) => ({ kind: "-", text });
  const come = (text) => ({ kind: "+", text });
  // Texts that have little in common and many lines: all of one, then all of the other.
  if (!a.length || !b.length || a.length * b.length > CELLS_MAX) return [...a.map(gone), ...b.map(come)];
  const width = b.length + 1;
  const longest = new Uint32Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      longest[i * width + j] =
        a[i] === b[j]
          ? longest[(i + 1) * width + j + 1] + 1
          : Math.max(longest[(i + 1) * width + j], longest[i * width + j + 1]);
    }
  }
  const out = [];
  let i = 0;
  let j = 0;
  while (i < a.length && j < b.length) {
    if (a[i] === b[j]) {
      out.push({ kind: " ", text: a[i] });
      i += 1;
      j += 1;
    } else if (longest[(i + 1) * width + j] >= longest[i * width + j + 1]) out.push(gone(a[i++]));
    else out.push(come(b[j++]));
  }
  return [...out, ...a.slice(i).map(gone), ...b.slice(j).map(come)];
}

/** Leave out long runs of equal lines: `context` stay on each side; a run is replaced by `{ kind: "…", count }`. */
export function folded(lines, context = 3) {
  const out = [];
  let at = 0;
  while (at < lines.length) {
    if (lines[at].kind !== " ") {
      out.push(lines[at++]);
      continue;
    }
    let end = at;
    while (end < lines.length && lines[end].kind === " ") end += 1;
    const first = at === 0 ? 0 : context;
    const last = end === lines.length ? 0 : context;
    if (end - at > first + last + 1) {
      out.push(...lines.slice(at, at + first), { kind: "…", count: end - at - first - last }, ...lines.slice(end - last, end));
    } else {
      out.push(...lines.slice(at, end));
    }
    at = end;
  }
  return out;
}
