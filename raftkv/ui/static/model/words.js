/**
 * How numbers, times and lists look: the same words as `raftkvctl` prints. Pure.
 *
 *     size(1536)             "1.5 KiB"
 *     span(75)               "1 min 15 s"
 *     duration({seconds: 0.5, approximate: true})      "~0.50 s"
 */

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** A number of bytes. */
export function size(bytes) {
  let unit = 0;
  while (bytes >= 1024 && unit < UNITS.length - 1) {
    bytes /= 1024;
    unit++;
  }
  return unit ? `${bytes.toFixed(1)} ${UNITS[unit]}` : `${bytes.toFixed(0)} B`;
}

/** Seconds, rounded to what people want to know. */
export function span(seconds) {
  if (seconds < 60) return `${seconds.toFixed(2)} s`;
  const whole = Math.round(seconds);
  const minutes = Math.floor(whole / 60);
  return minutes < 60 ? `${minutes} min ${whole % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** A duration between two times; `~` says that two clocks told them. */
export function duration(one) {
  return `${one.approximate ? "~" : ""}${one.seconds.toFixed(2)} s`;
}

/** `1 node`, `2 nodes`. */
export function count(number, what) {
  return `${number} ${what}${number === 1 ? "" : "s"}`;
}

const two = (number) => String(number).padStart(2, "0");

/**
 * A time of day, with the date if it is not today's; empty: not known.
 *
 * @param {number} seconds since 1970.
 * @param {Date} now which day is today.
 */
export function clock(seconds, now = new Date()) {
  if (!seconds) return "";
  const date = new Date(seconds * 1000);
  const day = (one) => `${one.getFullYear()}-${two(one.getMonth() + 1)}-${two(one.getDate())}`;
  const time = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  return day(date) === day(now) ? time : `${day(date)} ${time}`;
}

/** A number with six significant digits, as C's `%.6g`. */
export function general(value) {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "nan" : value > 0 ? "inf" : "-inf";
  if (value === 0) return Object.is(value, -0) ? "-0" : "0";
  const exponent = Number(value.toExponential(5).split("e")[1]);
  const trim = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);
  if (exponent >= -4 && exponent < 6) return trim(value.toFixed(5 - exponent));
  const sign = exponent < 0 ? "-" : "+";
  return `${trim(value.toExponential(5).split("e")[0])}e${sign}${two(Math.abs(exponent))}`;
}

/** Half goes to the even number, as in the command line. */
export function roundEven(value) {
  const floor = Math.floor(value);
  return value - floor === 0.5 ? floor + (floor % 2) : Math.round(value);
}

/** `a, b, c and 2 more`. */
export function some(names, most = 3) {
  const shown = names.slice(0, most).join(", ");
  return names.length > most ? `${shown} and ${names.length - most} more` : shown;
}

/** Names in the order of their code units. */
export function sorted(names) {
  return [...names].sort((one, other) => (one < other ? -1 : one > other ? 1 : 0));
}
