// Bytes as the gateway carries them (base64, int64 as text) and as people read them. Pure: no page needed.

// A byte order mark is a part of a key like any other.
const DECODER = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
const ENCODER = new TextEncoder();

/** The bytes of a text. */
export const bytes = (text) => ENCODER.encode(text);

/** Base64 of bytes, or of a text. */
export function base64(data) {
  const array = typeof data === "string" ? bytes(data) : data;
  let binary = "";
  for (let at = 0; at < array.length; at += 0x8000) binary += String.fromCharCode(...array.subarray(at, at + 0x8000));
  return btoa(binary);
}

/** The bytes of a base64 text; none for an absent one. */
export function unbase64(text) {
  return text ? Uint8Array.from(atob(text), (one) => one.charCodeAt(0)) : new Uint8Array();
}

/** The text of bytes, or null if they are not UTF-8 or hold control characters that no text has. */
export function textOf(data) {
  try {
    const text = DECODER.decode(data);
    return /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f]/.test(text) ? null : text;
  } catch {
    return null;
  }
}

// Controls, white space and marks of direction that change what a reader sees; joiners are parts of words.
const UNSEEN = /[\p{Cc}\p{Zl}\p{Zp}]|(?![\u200c\u200d])\p{Cf}|(?! )\p{Zs}|^ +| +$/gu;

/** Bytes for people: text, with invisible characters and bytes that are not UTF-8 as \xNN. `unshown` makes the same
 *  bytes of it, so a backslash that would be read as such is written \x5c. */
export function shown(data) {
  let text;
  try {
    text = DECODER.decode(data);
  } catch {
    return [...data].map((one) => (one >= 32 && one < 127 && one !== 92 ? String.fromCharCode(one) : escaped(one))).join("");
  }
  return text
    .replace(/\\(?=x[0-9a-fA-F]{2})/g, escaped(92))
    .replace(UNSEEN, (part) => [...bytes(part)].map(escaped).join(""));
}

const escaped = (one) => `\\x${hex2(one)}`;

/** The bytes that a text stands for: \xNN is a byte, all else is itself. */
export function unshown(text) {
  const parts = text.split(/(\\x[0-9a-fA-F]{2})/);
  const pieces = parts.map((part, index) => (index % 2 ? Uint8Array.of(parseInt(part.slice(2), 16)) : bytes(part)));
  const whole = new Uint8Array(pieces.reduce((size, piece) => size + piece.length, 0));
  let at = 0;
  for (const piece of pieces) {
    whole.set(piece, at);
    at += piece.length;
  }
  return whole;
}

const hex2 = (one) => one.toString(16).padStart(2, "0");

/** Hex of bytes, sixteen a line: offset, bytes, characters. */
export function hexdump(data, max = 4096) {
  const lines = [];
  for (let at = 0; at < Math.min(data.length, max); at += 16) {
    const row = [...data.subarray(at, at + 16)];
    const left = row.map(hex2).join(" ").padEnd(47);
    const right = row.map((one) => (one >= 32 && one < 127 ? String.fromCharCode(one) : ".")).join("");
    lines.push(`${at.toString(16).padStart(6, "0")}  ${left}  ${right}`);
  }
  if (data.length > max) lines.push(`... ${data.length - max} more bytes`);
  return lines.join("\n");
}

/** JSON of bytes as a value, or undefined. */
export function jsonOf(data) {
  const text = textOf(data);
  if (text === null || !/^\s*[[{"\-0-9tfn]/.test(text)) return undefined;
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

/** Where a prefix ends: the `range_end` of all keys that begin with it; a zero byte: to the end of all keys. */
export function prefixEnd(prefix) {
  const data = typeof prefix === "string" ? bytes(prefix) : prefix;
  for (let at = data.length - 1; at >= 0; at--) {
    if (data[at] < 0xff) {
      const end = data.slice(0, at + 1);
      end[at] += 1;
      return end;
    }
  }
  return Uint8Array.of(0);
}

/** Bytes followed by a zero byte: the least key that is greater. */
export function after(key) {
  const next = new Uint8Array(key.length + 1);
  next.set(key);
  return next;
}

/** -1, 0, 1: as the store orders keys. */
export function compare(a, b) {
  const length = Math.min(a.length, b.length);
  for (let at = 0; at < length; at++) if (a[at] !== b[at]) return a[at] < b[at] ? -1 : 1;
  return Math.sign(a.length - b.length);
}

/** A key with its value, from the gateway's JSON. `id` is a text that is equal exactly for equal keys. */
export class KeyValue {
  constructor(json) {
    this.id = json.key ?? "";
    this.keyBytes = unbase64(json.key);
    this.create = Number(json.create_revision ?? 0);
    this.mod = Number(json.mod_revision ?? 0);
    this.version = Number(json.version ?? 0);
    /** Decimal text, "0" for none: lease ids do not fit a number. */
    this.lease = String(json.lease ?? "0");
    this.encoded = json.value ?? "";
  }
  /** The key for people. */
  get key() {
    return (this._key ??= shown(this.keyBytes));
  }
  get value() {
    return (this._value ??= unbase64(this.encoded));
  }
  /** The value as text, or null. */
  get text() {
    return textOf(this.value);
  }
  /** The value as JSON, or undefined. */
  get json() {
    return jsonOf(this.value);
  }
  get size() {
    return Math.floor((this.encoded.replace(/=+$/, "").length * 3) / 4);
  }
}

/** A lease id as raftkvctl shows it: sixteen hex digits, from decimal text. */
export const leaseHex = (id) => BigInt.asUintN(64, BigInt(id)).toString(16).padStart(16, "0");

/** A 64-bit id (of a member, of the cluster) in hex, from decimal text. */
export const idHex = (id) => BigInt.asUintN(64, BigInt(id)).toString(16);
