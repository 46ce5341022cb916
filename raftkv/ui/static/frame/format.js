// Numbers and times for people. Pure: no page needed.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** 1536 -> "1.5 KiB". */
export function size(bytes) {
  if (bytes === null || bytes === undefined || Number.isNaN(Number(bytes))) return "–";
  let value = Number(bytes);
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit && value < 10 ? value.toFixed(1) : Math.round(value)} ${UNITS[unit]}`;
}

/** 12345 -> "12,345"; nothing known -> "–". */
export const count = (value) =>
  value === null || value === undefined ? "–" : Math.round(Number(value)).toLocaleString("en-US");

/** 0.4 -> "0.4", 1234 -> "1.2k": a rate or count in little room. */
export function short(value) {
  if (value === null || value === undefined) return "–";
  const number = Number(value);
  if (number >= 999_500) return `${(number / 1e6).toFixed(number < 9.95e6 ? 1 : 0)}M`;
  if (number >= 9_950) return `${Math.round(number / 1e3)}k`;
  if (number >= 1_000) return `${(number / 1e3).toFixed(1)}k`;
  return number >= 10 || Number.isInteger(number) ? String(Math.round(number)) : number.toFixed(1);
}

/** Seconds -> "0.12 ms", "3.4 ms", "1.2 s". */
export function latency(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds >= 1) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const ms = seconds * 1000;
  return `${ms < 1 ? ms.toFixed(2) : ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
}

/** Seconds -> "4 s", "3 min", "2 h 5 min", "3 d". */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min${whole < 600 && whole % 60 ? ` ${whole % 60} s` : ""}`;
  const hours = Math.floor(whole / 3600);
  if (hours < 48) return `${hours} h${whole % 3600 >= 60 ? ` ${Math.floor((whole % 3600) / 60)} min` : ""}`;
  return `${Math.floor(hours / 24)} d`;
}

/** Milliseconds since the epoch -> "just now", "12 s ago", "in 3 min". */
export function ago(at, now = Date.now()) {
  const seconds = (now - at) / 1000;
  if (Math.abs(seconds) < 1) return "just now";
  return seconds > 0 ? `${duration(seconds)} ago` : `in ${duration(-seconds)}`;
}

/** "1 key", "3 keys". */
export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;
