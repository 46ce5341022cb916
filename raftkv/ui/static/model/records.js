/**
 * Keys and values of the store, as the gateway gives them, and the JSON records that raftkv keeps in them.
 *
 * Pure: nothing here asks the store or touches the page. A value of another program is `null`, never an error:
 * it hides nothing else. Fields that are not known are left out, so that an older page reads what a newer raftkv wrote.
 *
 *     const item = itemOf({key: "L2E=", value: "e30=", mod_revision: "7"});      // key "/a", revision 7
 *     readRecord({text: ["text"], times: ["int", 1]}, parseJson(item.value));
 */

const NOT_FINITE = {NaN: NaN, Infinity: Infinity, "-Infinity": -Infinity};
const utf8 = new TextDecoder("utf-8", {fatal: true});
const utf8Lossy = new TextDecoder("utf-8");

/** Bytes of a base64 text. */
export function bytesOf(base64) {
  const binary = atob(base64 ?? "");
  const bytes = new Uint8Array(binary.length);
  for (let place = 0; place < binary.length; place++) bytes[place] = binary.charCodeAt(place);
  return bytes;
}

/** A key-value pair of the gateway as `{key, value, create, mod, version, lease}`: text, bytes, numbers, decimal digits. */
export function itemOf(kv) {
  return {
    key: utf8Lossy.decode(bytesOf(kv.key)),
    value: bytesOf(kv.value),
    create: Number(kv.create_revision ?? 0),
    mod: Number(kv.mod_revision ?? 0),
    version: Number(kv.version ?? 0),
    lease: String(kv.lease ?? 0),
  };
}

/** An event of the gateway as `{deleted, item}`. */
export function eventOf(event) {
  return {deleted: event.type === "DELETE", item: itemOf(event.kv)};
}

/** Text of a value; null: it is not UTF-8. */
export function textOf(value) {
  try {
    return utf8.decode(value);
  } catch {
    return null;
  }
}

/** Text of a value; bytes that are not UTF-8 are replaced. */
export function shownText(value) {
  return utf8Lossy.decode(value);
}

/** What a JSON value holds; undefined: it is none. */
export function parseJson(value) {
  const text = textOf(value);
  try {
    return text === null ? undefined : JSON.parse(text);
  } catch {
    return undefined;
  }
}

const isTable = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const number = (value) => (Object.hasOwn(NOT_FINITE, value) ? NOT_FINITE[value] : value);
const everyValue = (table, test) => isTable(table) && Object.values(table).every(test);

const READERS = {
  int: (value) => (Number.isInteger(value) ? value : undefined),
  float: (value) => (typeof number(value) === "number" ? number(value) : undefined),
  text: (value) => (typeof value === "string" ? value : undefined),
  texts: (value) => (everyValue(value, (one) => typeof one === "string") ? value : undefined),
  numbers: (value) => {
    if (!everyValue(value, (one) => typeof number(one) === "number")) return undefined;
    return Object.fromEntries(Object.entries(value).map(([name, one]) => [name, number(one)]));
  },
};

/**
 * Read a record; null: a field that must be there is missing, or has another type.
 *
 * @param {object} layout field to `[type]`, `[type, default]` or `[type, default, name in JSON]`; a type is one of
 *   `int float text texts numbers`, or a function that returns undefined for what it refuses.
 * @param {unknown} plain out of JSON.
 */
export function readRecord(layout, plain) {
  if (!isTable(plain)) return null;
  const record = {};
  for (const [field, [type, fallback, stored = field]] of Object.entries(layout)) {
    if (Object.hasOwn(plain, stored)) {
      record[field] = (typeof type === "function" ? type : READERS[type])(plain[stored]);
    } else {
      record[field] = typeof fallback === "object" && fallback !== null ? structuredClone(fallback) : fallback;
    }
    if (record[field] === undefined) return null;
  }
  return record;
}

/** A type for `readRecord`: a list of records of one layout. */
export function listOf(layout) {
  return (value) => {
    if (!Array.isArray(value)) return undefined;
    const found = value.map((one) => readRecord(layout, one));
    return found.includes(null) ? undefined : found;
  };
}
