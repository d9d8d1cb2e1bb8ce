// What translated Python (pyjs.py) runs on: Python's containers, operators and functions, as far as the library uses them.
// Lists and tuples are arrays, None is null, numbers are doubles.
"use strict";

class Exception extends Error {
  constructor(...args) { super(args.map(String).join(", ")); this.args = args; this.name = this.constructor.name; }
}
class LookupError extends Exception {}
class KeyError extends LookupError {}
class IndexError extends LookupError {}
class ValueError extends Exception {}
class ZeroDivisionError extends Exception {}

// --- functions that know their parameters, so that they can be called with keywords ---

const $function = (f, signature) => Object.assign(f, { $signature: signature });

function $arranged(name, [names, extra], args, words) {
  const out = [...args], more = [];
  for (const [key, value] of words) {
    const at = names.indexOf(key);
    if (at >= 0) out[at] = value;
    else if (extra) more.push([key, value]);
    else throw new TypeError(`${name}() got an unexpected keyword argument '${key}'`);
  }
  if (extra) out[names.length] = dict(more);
  return out;
}
const $call = (f, args, words) => (f.$words ? f(...args, new $Words(words)) : f(...$arranged(f.name, f.$signature, args, words)));
class $Words {
  constructor(words) { for (const [key, value] of words) this[key] = value; }
}
const $make = (C, args, words) => new C(...$arranged(C.name, C.prototype.__init__?.$signature ?? C.$signature, args, words));
function $send(object, name, args, words) {
  const f = object[name];
  return f.call(object, ...$arranged(name, f.$signature, args, words));
}
function $bound(object, name) {
  const value = object[name];
  return typeof value === "function" && !Object.hasOwn(object, name) ? value.bind(object) : value;
}

// --- classes ---

class $Object {
  constructor(...args) { if (this.__init__) this.__init__(...args); }
}
class $NamedTuple extends Array {
  static get [Symbol.species]() { return Array; }
  constructor(...args) {
    super();
    const fields = new.target.$all;
    for (let i = 0; i < fields.length; i++) this.push(args[i] === undefined ? fields[i][1]() : args[i]);
  }
}
$NamedTuple.prototype._replace = $function(function (changes) {
  const fields = this.constructor.$all;
  return new this.constructor(...fields.map(([name], i) => changes.get(name, this[i])));
}, [[], true]);

const $hidden = (owner, name, value) => Object.defineProperty(owner, name, { value, writable: true, configurable: true });
const $method = (C, name, f, signature) => $hidden(C.prototype, name, $function(f, signature));
const $classmethod = (C, name, f, signature) => $hidden(C, name, $function(f, signature));
const $staticmethod = $classmethod;
const $property = (C, name, get) => Object.defineProperty(C.prototype, name, { get });
const $cached_property = (C, name, get) => Object.defineProperty(C.prototype, name, {
  get() { const value = get.call(this); $hidden(this, name, value); return value; },
});

/** Fields of a named tuple or a dataclass: [name] or [name, a function that makes the default]. */
function $fields(C, fields) {
  const missing = (name) => () => { throw new TypeError(`${C.name}: ${name} is missing`); };
  const all = fields.map(([name, value]) => [name, value ?? missing(name)]);
  const signature = [all.map(([name]) => name), false];
  $hidden(C, "$all", all);
  if (C.prototype instanceof $NamedTuple) {
    C.$signature = signature;
    all.forEach(([name], i) => Object.defineProperty(C.prototype, name, { get() { return this[i]; } }));
    return;
  }
  $method(C, "__init__", function (...args) {
    all.forEach(([name, value], i) => { this[name] = args[i] === undefined ? value() : args[i]; });
  }, signature);
}

// --- dicts and sets ---

/** What a Map can compare: tuples and frozensets by what is in them. */
function $key(key) {
  if (typeof key !== "object" || key === null) return key;
  if (Array.isArray(key)) return "(" + key.map((k) => (typeof k === "string" ? JSON.stringify(k) : $key(k))).join() + ")";
  if (key instanceof $Set) return "{" + [...key.map.keys()].map(String).sort().join() + "}";
  return key;
}
class Dict {
  constructor(pairs = []) { this.map = new Map(); this.fill(pairs); }
  fill(pairs) { for (const [key, value] of pairs) this.put(key, value); }
  get size() { return this.map.size; }
  [Symbol.iterator]() { return this.keys(); }
  has(key) { return this.map.has($key(key)); }
  put(key, value) {
    const at = $key(key), cell = this.map.get(at);
    if (cell) cell[1] = value;
    else this.map.set(at, [key, value]);
  }
  item(key) {
    const cell = this.map.get($key(key));
    return cell ? cell[1] : this.missing(key);
  }
  missing(key) { throw new KeyError(repr(key)); }
  get(key, otherwise = null) {
    const cell = this.map.get($key(key));
    return cell ? cell[1] : otherwise;
  }
  *keys() { for (const cell of this.map.values()) yield cell[0]; }
  *values() { for (const cell of this.map.values()) yield cell[1]; }
  *items() { for (const cell of this.map.values()) yield [cell[0], cell[1]]; }
  setdefault(key, value = null) { if (!this.has(key)) this.put(key, value); return this.item(key); }
  update(other) { this.fill(other instanceof Dict ? other.items() : other); return null; }
  clear() { this.map.clear(); return null; }
  copy() { return new this.constructor(this.items()); }
  $pop(key, otherwise) {
    const value = this.get(key, otherwise === undefined ? $absent : otherwise);
    if (value === $absent) throw new KeyError(repr(key));
    this.map.delete($key(key));
    return value;
  }
  popitem() {
    const [key, value] = [...this.map.values()].pop();
    this.map.delete($key(key));
    return [key, value];
  }
}
const $absent = {};
class DefaultDict extends Dict {
  missing(key) { const value = this.make(); this.put(key, value); return value; }
}
class Counter extends Dict {
  constructor(of = []) { super(); for (const key of of) this.put(key, this.item(key) + 1); }
  missing() { return 0; }
}
class $Set {
  constructor(of = []) { this.map = new Map(); for (const key of of) this.add(key); }
  get size() { return this.map.size; }
  [Symbol.iterator]() { return this.map.values(); }
  has(key) { return this.map.has($key(key)); }
  add(key) { const at = $key(key); if (!this.map.has(at)) this.map.set(at, key); return null; }
  discard(key) { this.map.delete($key(key)); return null; }
  update(others) { for (const key of others) this.add(key); return null; }
  difference_update(others) { for (const key of others) this.discard(key); return null; }
  isdisjoint(others) { for (const key of others) if (this.has(key)) return false; return true; }
  clear() { this.map.clear(); return null; }
}
class Deque {
  constructor(of = []) { this.list = [...of]; this.first = 0; }
  get size() { return this.list.length - this.first; }
  popleft() { if (!this.size) throw new IndexError("pop from an empty deque"); return this.list[this.first++]; }
  append(value) { this.list.push(value); return null; }
  *[Symbol.iterator]() { for (let i = this.first; i < this.list.length; i++) yield this.list[i]; }
}

for (const [type, methods] of [
  [Array.prototype, {
    append(value) { this.push(value); return null; },
    extend(values) { for (const value of values) this.push(value); return null; },
    clear() { this.length = 0; return null; },
    index(value) { return this.findIndex((other) => $equal(value, other)); },
    count(value) { return this.filter((other) => $equal(value, other)).length; },
    $pop(at = -1) { return this.splice(at, 1)[0]; },
    $sort: $function(function (key = null, reverse = false) { $sorted(this, key, reverse); return null; }, [["key", "reverse"], false]),
  }],
  [String.prototype, {
    join(parts) { return [...parts].join(this); },
    startswith(start) { return this.startsWith(start); },
    endswith(end) { return this.endsWith(end); },
    strip() { return this.trim(); },
    lower() { return this.toLowerCase(); },
    $split(by = null) { return by === null ? this.trim().split(/\s+/).filter(Boolean) : this.split(by); },
    $replace(old, fresh) { return this.replaceAll(old, fresh); },
  }],
]) for (const [name, f] of Object.entries(methods)) $hidden(type, name, f);

// --- operators ---

const $true = (x) =>
  typeof x !== "object" ? !!x : x === null ? false : Array.isArray(x) ? x.length > 0 : x.size === undefined ? true : x.size > 0;
const $and = (a, b) => ($true(a) ? b() : a);
const $either = (a, b) => ($true(a) ? a : b());
const $add = (a, b) => (typeof a === "object" ? [...a, ...b] : a + b);
function $iadd(a, b) {
  if (!Array.isArray(a)) return a + b;
  for (const value of b) a.push(value);
  return a;
}
function $mul(a, b) {
  if (Array.isArray(a)) return Array.from({ length: a.length * Math.max(0, b) }, (_, i) => a[i % a.length]);
  return typeof a === "string" ? a.repeat(b) : a * b;
}
function $sub(a, b) {
  if (typeof a === "number") return a - b;
  return set([...a].filter((key) => !b.has(key)));
}
function $or(a, b) {
  if (a instanceof Dict) return dict([...a.items(), ...b.items()]);
  return set([...a, ...b]);
}
function $div(a, b) {
  if (b === 0) throw new ZeroDivisionError("division by zero");
  return a / b;
}
function $mod(a, b) {
  if (b === 0) throw new ZeroDivisionError("integer modulo by zero");
  const rest = a % b;
  return rest && rest < 0 !== b < 0 ? rest + b : rest;
}
const $floordiv = (a, b) => Math.floor((a - $mod(a, b)) / b);

function $equal(a, b) {
  if (a === b || typeof a !== "object" || typeof b !== "object" || a === null || b === null) return a === b;
  if (Array.isArray(a)) return Array.isArray(b) && a.length === b.length && a.every((x, i) => $equal(x, b[i]));
  if (a instanceof $Set) return b instanceof $Set && a.size === b.size && [...a].every((x) => b.has(x));
  if (a instanceof Dict) return b instanceof Dict && a.size === b.size && [...a.items()].every(([k, v]) => b.has(k) && $equal(v, b.item(k)));
  return false;
}
function $in(x, where) {
  if (typeof where === "string") return where.includes(x);
  return Array.isArray(where) ? where.some((y) => $equal(x, y)) : where.has(x);
}
function $item(of, at) {
  if (of instanceof Dict) return of.item(at);
  const value = of[at < 0 ? of.length + at : at];
  if (value === undefined) throw new IndexError(`index ${at} is out of range`);
  return value;
}
function $put(into, at, value) {
  if (into instanceof Dict) into.put(at, value);
  else into[at < 0 ? into.length + at : at] = value;
}
const $slice = (of, from, to) => of.slice(from ?? 0, to ?? of.length);

/** Order of numbers, strings, and tuples of them. */
function $compare(a, b) {
  if (!Array.isArray(a)) return a < b ? -1 : a > b ? 1 : 0;
  for (let i = 0; i < Math.min(a.length, b.length); i++) {
    const order = $compare(a[i], b[i]);
    if (order) return order;
  }
  return a.length - b.length;
}
function $sorted(list, key, reverse) {
  const keyed = list.map((value) => [key ? key(value) : value, value]);
  keyed.sort((a, b) => (reverse ? $compare(b[0], a[0]) : $compare(a[0], b[0])));
  keyed.forEach((pair, i) => { list[i] = pair[1]; });
  return list;
}

// --- built-in functions ---

const None = null;
const dict = (from = []) => new Dict(from instanceof Dict ? from.items() : from);
$hidden(dict, "fromkeys", (keys, value = null) => dict([...keys].map((key) => [key, value])));
const list = (from = []) => [...from];
const tuple = list;
const set = (from = []) => new $Set(from);
const frozenset = set;
const bool = $true;
const float = Number;
const int = (x) => {
  const value = Math.trunc(Number(x));
  if (Number.isNaN(value)) throw new ValueError(`invalid literal for int() with base 10: ${repr(x)}`);
  return value;
};
const str = (x) => (typeof x === "string" ? x : repr(x));
const $is = new Map([
  [int, (x) => Number.isInteger(x)], [float, (x) => typeof x === "number"], [str, (x) => typeof x === "string"],
  [bool, (x) => typeof x === "boolean"], [list, Array.isArray], [tuple, Array.isArray], [dict, (x) => x instanceof Dict],
]);
function isinstance(x, types) {
  return (Array.isArray(types) ? types : [types]).some((type) => ($is.has(type) ? $is.get(type)(x) : x instanceof type));
}
const len = (x) => x.length ?? x.size;
const abs = Math.abs;
/** Halves go to the even neighbour. */
function round(x) {
  const low = Math.floor(x), rest = x - low;
  return rest > 0.5 || (rest === 0.5 && low % 2 !== 0) ? low + 1 : low;
}
function range(from, to, step = 1) {
  if (to === undefined) [from, to] = [0, from];
  return Array.from({ length: Math.max(0, Math.ceil((to - from) / step)) }, (_, i) => from + i * step);
}
const reversed = (x) => [...x].reverse().values();
function next(from, otherwise) {
  const { done, value } = from.next();
  if (done && otherwise === undefined) throw new Exception("StopIteration");
  return done ? otherwise : value;
}
function* enumerate(values, start = 0) { for (const value of values) yield [start++, value]; }
enumerate.$signature = [["values", "start"], false];
function* zip(...lists) {
  const all = lists.map((values) => values[Symbol.iterator]());
  for (;;) {
    const row = all.map((values) => values.next());
    if (row.some((found) => found.done)) return;
    yield row.map((found) => found.value);
  }
}
const sorted = $function((values, key = null, reverse = false) => $sorted([...values], key, reverse), [["values", "key", "reverse"], false]);
function sum(values, start = 0) { for (const value of values) start += value; return start; }
function any(values) { for (const value of values) if ($true(value)) return true; return false; }
function all(values) { for (const value of values) if (!$true(value)) return false; return true; }
/** max and min: of several arguments or of one iterable; the first of equals wins. */
const $extreme = (sign) => Object.assign((...args) => {
  if (args.length === 2 && typeof args[0] === "number" && typeof args[1] === "number") return sign * (args[1] - args[0]) > 0 ? args[1] : args[0];
  const words = args.length && args.at(-1) instanceof $Words ? args.pop() : {};
  const values = args.length === 1 ? args[0] : args;
  let best, rank;
  for (const value of values) {
    const now = words.key ? words.key(value) : value;
    if (rank === undefined || sign * $compare(now, rank) > 0) [best, rank] = [value, now];
  }
  if (best === undefined && words.default === undefined) throw new ValueError("of nothing");
  return best === undefined ? words.default : best;
}, { $words: true });
const max = $extreme(1), min = $extreme(-1);
const vars = (object) => dict(Object.entries(object));
const asdict = (x) => {
  if (Array.isArray(x)) return x.map(asdict);
  if (x instanceof Dict) return dict([...x.items()].map(([k, v]) => [k, asdict(v)]));
  return x instanceof $Object ? asdict(vars(x)) : x;
};

function repr(x) {
  if (x === null) return "None";
  if (typeof x === "boolean") return x ? "True" : "False";
  if (typeof x === "string") return x.includes("'") && !x.includes('"') ? `"${x}"` : `'${x.replaceAll("'", "\\'")}'`;
  if (Array.isArray(x)) return `[${x.map(repr).join(", ")}]`;
  if (x instanceof Dict) return `{${[...x.items()].map(([k, v]) => `${repr(k)}: ${repr(v)}`).join(", ")}}`;
  return String(x);
}
/** The part of the format language that the library uses: width, sign, thousands, precision. */
function $format(x, spec, quoted) {
  if (!spec) return quoted ? repr(x) : str(x instanceof Error ? x.message : x);
  const [, align, sign, width, comma, precision, type] = /^([<>])?(\+)?(\d+)?(,)?(?:\.(\d+))?([dfg])?$/.exec(spec);
  let text = str(x);
  if (type === "f") text = x.toFixed(precision ?? 6);
  if (type === "g") text = String(Number(x.toPrecision(precision ?? 6)));
  if (comma) text = text.replace(/\B(?=(\d{3})+(?!\d))/g, ",");
  if (sign && x >= 0) text = "+" + text;
  const left = align ? align === "<" : typeof x === "string";
  return left ? text.padEnd(width ?? 0) : text.padStart(width ?? 0);
}

// --- the standard library ---

/** JavaScript's plain objects as dicts, and back. */
function $python(x) {
  if (Array.isArray(x)) return x.map($python);
  if (x === undefined) return null;
  return typeof x === "object" && x !== null ? dict(Object.entries(x).map(([k, v]) => [k, $python(v)])) : x;
}
function $plain(x) {
  if (Array.isArray(x)) return Array.from(x, $plain);
  return x instanceof Dict ? Object.fromEntries([...x.items()].map(([k, v]) => [k, $plain(v)])) : x;
}
const $std = {
  bisect: {
    bisect_left(values, x) {
      let low = 0, high = values.length;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (values[middle] < x) low = middle + 1;
        else high = middle;
      }
      return low;
    },
  },
  collections: {
    Counter,
    deque: (of) => new Deque(of),
    defaultdict(make, from = dict()) { const made = new DefaultDict(from.items()); $hidden(made, "make", make); return made; },
  },
  "collections.abc": { Mapping: Dict },
  dataclasses: {
    asdict,
    replace: $function((object, changes) => $make(object.constructor, [], [...vars(object).items(), ...changes.items()]), [["object"], true]),
  },
  itertools: {
    *accumulate(values) { let total = 0; for (const value of values) yield (total += value); },
  },
  json: {
    dumps: $function((x) => JSON.stringify($plain(x)), [["x", "separators"], false]),
    loads: (text) => $python(JSON.parse(text)),
  },
  re: {
    compile(pattern) {
      const once = new RegExp(pattern);
      return { search: (text) => once.exec(text), sub: $function((fresh, text) => text.replace(once, fresh), [["fresh", "text", "count"], false]) };
    },
  },
};
