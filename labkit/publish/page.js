// The page of `labkit.publish.page`: selects over the cells, a chart that Altair made, a table, and a place to drop a file.
"use strict";
const NUMBERS = ["context_len", "batch_size", "num_speculative_tokens", "temperature", "relative_step_cost",
  "relative_step_cost_low", "relative_step_cost_high", "mean_acceptance_length", "mean_acceptance_length_low",
  "mean_acceptance_length_high", "speedup", "speedup_low", "speedup_high", "breakeven_ceiling"];
const NEEDED = ["context_len", "num_speculative_tokens", "verify_backend", "relative_step_cost"];
const SELECTS = {gpu: "GPU", target: "target", drafter: "drafter", weight_dtype: "weights", kv_dtype: "KV cache",
  batch_size: "batch", num_speculative_tokens: "k", workload: "text"};
const $ = (id) => document.getElementById(id);

// --- files

function parseCsv(text) {
  const rows = [[""]];
  let quoted = false;
  for (let i = 0; i < text.length; i++) {
    const line = rows[rows.length - 1], c = text[i];
    if (quoted) {
      if (c === '"' && text[i + 1] === '"') { line[line.length - 1] += '"'; i++; }
      else if (c === '"') quoted = false;
      else line[line.length - 1] += c;
    } else if (c === '"') quoted = true;
    else if (c === ",") line.push("");
    else if (c === "\n") rows.push([""]);
    else if (c !== "\r") line[line.length - 1] += c;
  }
  const [names, ...lines] = rows.filter((line) => line.length > 1 || line[0]);
  return lines.map((line) => Object.fromEntries(names.map((name, i) => [name, line[i] === "" ? null : line[i]])));
}

// Thrift's compact protocol: a struct becomes {field id: value}.
function thrift(bytes, at) {
  const varint = () => {
    let value = 0, scale = 1, byte;
    do { byte = bytes[at++]; value += (byte & 127) * scale; scale *= 128; } while (byte & 128);
    return value;
  };
  const zigzag = () => { const n = varint(); return n % 2 ? -(n + 1) / 2 : n / 2; };
  const read = (type) => {
    if (type === 1 || type === 2) return type === 1;
    if (type === 3) return bytes[at++];
    if (type <= 6) return zigzag();
    if (type === 7) { at += 8; return null; }
    if (type === 8) { const length = varint(); at += length; return bytes.subarray(at - length, at); }
    if (type === 9 || type === 10) {
      const head = bytes[at++], length = head >> 4 === 15 ? varint() : head >> 4;
      return Array.from({length}, () => (head & 15) <= 2 ? bytes[at++] === 1 : read(head & 15));
    }
    if (type !== 12) throw new Error("this Parquet file uses a structure that this page does not read");
    const struct = {};
    for (let id = 0; ;) {
      const head = bytes[at++];
      if (head === 0 || head === undefined) return struct;
      id = head >> 4 ? id + (head >> 4) : zigzag();
      struct[id] = read(head & 15);
    }
  };
  return {value: read(12), end: at};
}

function snappy(input, size) {
  const out = new Uint8Array(size);
  let at = 0, to = 0;
  while (input[at++] & 128);  // the length again
  while (at < input.length) {
    const tag = input[at++];
    let length, offset = 0;
    if ((tag & 3) === 0) {
      length = (tag >> 2) + 1;
      if (length > 60) {
        const bytes = length - 60;
        length = 1;
        for (let i = 0; i < bytes; i++) length += input[at++] * 256 ** i;
      }
      out.set(input.subarray(at, at + length), to);
      at += length; to += length;
      continue;
    }
    if ((tag & 3) === 1) { length = ((tag >> 2) & 7) + 4; offset = ((tag >> 5) << 8) | input[at++]; }
    else {
      length = (tag >> 2) + 1;
      for (let i = 0; i < ((tag & 3) === 2 ? 2 : 4); i++) offset += input[at++] * 256 ** i;
    }
    for (let i = 0; i < length; i++, to++) out[to] = out[to - offset];
  }
  return out;
}

async function inflate(bytes, codec, size) {
  if (codec === 0) return bytes;
  if (codec === 1) return snappy(bytes, size);
  if (codec === 2) {
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }
  const name = {4: "brotli", 5: "lz4", 6: "zstd", 7: "lz4"}[codec] || `codec ${codec}`;
  throw new Error(`it is compressed with ${name}, which a browser cannot read; write it with compression="snappy"`);
}

// Run lengths and bit packing: `count` whole numbers of `width` bits.
function runs(bytes, width, count) {
  const values = [];
  for (let at = 0; values.length < count && at < bytes.length;) {
    let head = 0, scale = 1, byte;
    do { byte = bytes[at++]; head += (byte & 127) * scale; scale *= 128; } while (byte & 128);
    if (head & 1) {
      const groups = head >> 1;
      for (let i = 0; i < groups * 8 && values.length < count; i++) {
        let value = 0;
        for (let bit = 0; bit < width; bit++) {
          const place = i * width + bit;
          value += ((bytes[at + (place >> 3)] >> (place & 7)) & 1) * 2 ** bit;
        }
        values.push(value);
      }
      at += groups * width;
    } else {
      let value = 0;
      for (let i = 0; i < Math.ceil(width / 8); i++) value += bytes[at++] * 256 ** i;
      for (let i = 0; i < head >> 1 && values.length < count; i++) values.push(value);
    }
  }
  return values;
}

function plain(bytes, type, count) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength), text = new TextDecoder();
  const values = [];
  for (let i = 0, at = 0; i < count; i++) {
    if (type === 0) values.push(((bytes[i >> 3] >> (i & 7)) & 1) === 1);
    else if (type === 1) { values.push(view.getInt32(at, true)); at += 4; }
    else if (type === 2) { values.push(Number(view.getBigInt64(at, true))); at += 8; }
    else if (type === 4) { values.push(view.getFloat32(at, true)); at += 4; }
    else if (type === 5) { values.push(view.getFloat64(at, true)); at += 8; }
    else if (type === 6) {
      const length = view.getInt32(at, true);
      values.push(text.decode(bytes.subarray(at + 4, at + 4 + length)));
      at += 4 + length;
    } else throw new Error(`it has a column of Parquet type ${type}, which this page does not read`);
  }
  return values;
}

async function readColumn(bytes, meta, optional) {
  let at = meta[11] || meta[9], dictionary = [];
  const values = [], [type, codec, total] = [meta[1], meta[4], meta[5]];
  while (values.length < total) {
    const {value: page, end} = thrift(bytes, at), body = bytes.subarray(end, end + page[3]);
    at = end + page[3];
    if (page[1] === 2) { dictionary = plain(await inflate(body, codec, page[2]), type, page[7][1]); continue; }
    const second = page[1] === 3, head = second ? page[8] : page[5], count = head[1];
    let levels, data;
    if (second) {
      const [defined, repeated] = [head[5], head[6]];
      levels = body.subarray(repeated, repeated + defined);
      data = body.subarray(repeated + defined);
      if (head[7] !== false) data = await inflate(data, codec, page[2] - defined - repeated);
    } else {
      data = await inflate(body, codec, page[2]);
      if (optional) {
        const length = new DataView(data.buffer, data.byteOffset).getInt32(0, true);
        levels = data.subarray(4, 4 + length);
        data = data.subarray(4 + length);
      }
    }
    const there = optional ? runs(levels, 1, count) : Array(count).fill(1);
    const number = there.reduce((sum, one) => sum + one, 0), encoding = second ? head[4] : head[2];
    let found;
    if (encoding === 0) found = plain(data, type, number);
    else if (encoding === 2 || encoding === 8)
      found = runs(data.subarray(1), data[0], number).map((index) => dictionary[index]);
    else throw new Error("it uses an encoding that this page does not read; write it with pandas' to_parquet");
    let next = 0;
    for (const one of there) values.push(one ? found[next++] : null);
  }
  return values;
}

async function parseParquet(buffer) {
  const bytes = new Uint8Array(buffer), view = new DataView(buffer);
  const length = view.getUint32(bytes.length - 8, true), text = new TextDecoder();
  const footer = thrift(bytes, bytes.length - 8 - length).value;
  const optional = Object.fromEntries(footer[2].slice(1).map((field) => [text.decode(field[4]), field[3] === 1]));
  const rows = [];
  for (const group of footer[4]) {
    const first = rows.length;
    for (let i = 0; i < group[3]; i++) rows.push({});
    for (const chunk of group[1]) {
      const path = chunk[3][3].map((part) => text.decode(part));
      if (path.length > 1) continue;  // lists are no part of a table of cells
      const values = await readColumn(bytes, chunk[3], optional[path[0]]);
      values.forEach((value, i) => { rows[first + i][path[0]] = value; });
    }
  }
  return rows;
}

async function readFile(file) {
  const buffer = await file.arrayBuffer(), start = new TextDecoder().decode(buffer.slice(0, 4));
  let rows;
  if (start === "PAR1") rows = await parseParquet(buffer);
  else {
    const text = new TextDecoder().decode(buffer);
    if (text.trimStart().startsWith("{")) rows = JSON.parse(text).cells;
    else rows = text.trimStart().startsWith("[") ? JSON.parse(text) : parseCsv(text);
  }
  if (!Array.isArray(rows) || !rows.length) throw new Error("it holds no rows");
  const missing = NEEDED.filter((name) => !(name in rows[0]));
  if (missing.length) throw new Error(`it lacks the column ${missing.join(", ")}; \`labkit breakeven ... --out cells.csv\` ` +
    "(or .parquet) writes the table that this page draws");
  return rows.map(clean);
}

function clean(row) {
  const kept = {...row};
  for (const name of NUMBERS) {
    const value = row[name] === null || row[name] === undefined || row[name] === "" ? NaN : Number(row[name]);
    kept[name] = Number.isFinite(value) ? value : null;
  }
  Object.assign(kept, look(kept.verify_backend));
  kept.breakeven_ceiling = kept.num_speculative_tokens + 1;
  return kept;
}

// --- page

function values(rows, name) {
  const found = [...new Set(rows.map((row) => row[name] ?? null))];
  return found.sort((a, b) => typeof a === "number" ? a - b : String(a).localeCompare(String(b)));
}

function makeSelects(state) {
  $("controls").replaceChildren();
  // Begin at a combination that was measured, with an acceptance length if there is any: that of the longest drafts.
  const judged = state.rows.filter((row) => row.mean_acceptance_length !== null);
  const first = (judged.length ? judged : state.rows).reduce(
    (a, b) => b.num_speculative_tokens > a.num_speculative_tokens ? b : a);
  for (const [name, title] of Object.entries(SELECTS)) {
    const options = values(state.rows, name);
    if (options.length < 2) continue;
    const label = document.createElement("label"), select = document.createElement("select");
    select.id = `select-${name}`;
    options.forEach((value, i) => select.add(new Option(value === null ? "none" : value, i)));
    select.selectedIndex = options.indexOf(first[name] ?? null);
    select.addEventListener("change", () => draw(state));
    label.append(`${title} `, select);
    $("controls").append(label);
  }
}

function chosen(state) {
  return state.rows.filter((row) => Object.keys(SELECTS).every((name) => {
    const select = $(`select-${name}`);
    return !select || (row[name] ?? null) === values(state.rows, name)[select.value];
  }));
}

const number = (value) => value === null ? "\u2013" : value.toFixed(2);
const ranged = (row, name) => row[name] === null ? "\u2013" :
  `${number(row[name])} [${number(row[name + "_low"])}, ${number(row[name + "_high"])}]`;

function draw(state) {
  const rows = chosen(state);
  state.view.data("cells", rows).run();
  const judged = rows.some((row) => row.speedup !== null);
  const said = `${rows.length} cells${judged ? "" : "; no acceptance length joins them, so there is no speed-up"}`;
  $("message").textContent = rows.length ? said : "This combination was not measured.";
  const head = ["backend", "context", "break-even length", "acceptance length", "speed-up", "verdict", "origin"];
  const table = document.createElement("table"), body = [head, ...rows.map((row) => [row.verify_backend,
    row.context_len, ranged(row, "relative_step_cost"), ranged(row, "mean_acceptance_length"), ranged(row, "speedup"),
    row.verdict ?? "", row.origin ?? ""])];
  body.forEach((cells, i) => {
    const line = table.insertRow();
    for (const cell of cells) line.append(Object.assign(document.createElement(i ? "td" : "th"), {textContent: cell}));
  });
  $("table").replaceChildren(table);
  const names = values(rows, "verify_backend").map((name) => Object.assign(document.createElement("span"),
    {textContent: `${look(name).sign} ${name}`, style: `color: ${look(name).color}; margin-right: 1.2em`}));
  $("legend").replaceChildren(...names, "\u25c6 acceptance length");
}

// A backend keeps the colour and shape that it has in every figure; others share what is left.
const strangers = [];
function look(name) {
  if (!PALETTE[name] && !strangers.includes(name)) strangers.push(name);
  const looks = Object.values(PALETTE);
  return PALETTE[name] || looks[(looks.length - 1 - strangers.indexOf(name) % looks.length)];
}

async function start(spec, rows) {
  const state = {rows: rows.map(clean)};
  makeSelects(state);
  spec.datasets.cells = chosen(state);
  for (const part of spec.vconcat) part.width = Math.min(part.width, $("chart").clientWidth - 75);  // beside the axis
  state.view = (await vegaEmbed("#chart", spec, {actions: false, renderer: "svg"})).view;
  draw(state);
  const take = async (file) => {
    try {
      state.rows = await readFile(file);
      makeSelects(state);
      draw(state);
      const said = ["gpu", "target", "weight_dtype", "drafter"].map((name) => values(state.rows, name).join(", "));
      $("setting").textContent = said.filter((text) => text).join(" \u00b7 ");
      $("source").textContent = `from ${file.name}`;
    } catch (error) {
      $("message").textContent = `${file.name}: ${error.message}`;
    }
  };
  $("file").addEventListener("change", (event) => event.target.files.length && take(event.target.files[0]));
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    if (event.dataTransfer.files.length) take(event.dataTransfer.files[0]);
  });
}
