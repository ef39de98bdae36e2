"use strict";
/* The page behind `dccot view`. What list, filters and sorting need is unpacked at once; texts and log-probs block by block, when looked at.

   shape of a response   [12, [30, 41, 28], 9]      director wrote 12 tokens, three workers 30, 41 and 28, the director 9 more;
                         a worker that spawned is such a list itself
   details               one {text, inserted, lengths?, logprobs, entropies?, changes?} per segment, in reading order; log-probs in hundredths of a nat */

const $ = id => document.getElementById(id);
const ROW_HEIGHT = 58, KEPT_BLOCKS = 24, FLAWS = {
  no_think: "does not begin with <think>", no_spawn: "thinks without a single block of workers", empty_director: "nothing written before a block", tasks: "a block without as many tasks before it as allowed, or tasks without a block",
  worker_order: "a block without exactly workers 1..K in order", text_between_workers: "text between two workers", tag_in_worker: "a tag inside a worker",
  open_worker: "ends inside a worker", open_spawn: "ends inside a block", stray_tag: "a tag in the director's text that means nothing there",
  open_think: "ends before </think>", no_answer: "</think> is not followed by <answer>", tag_in_answer: "a tag inside the answer",
  open_answer: "ends inside the answer", text_after_answer: "text after the answer",
};
const FINISHES = { answered: "ended by itself", budget: "cut off: the budget is used up", context: "cut off: the model's context is full", max_rounds: "stopped: spawned too often", width: "stopped: spawned without as many tasks as allowed" };
const TAG = /<\/?(?:think|answer|spawn_workers|worker_\d+|task_\d+)>|<[｜|][^<>]{1,40}[｜|]>/g;  // those of the protocol, and special tokens

/** An element with properties, attributes (where there is a dash or no such property) and children. */
function el(name, properties = {}, ...children) {
  const svg = ["svg", "rect", "path", "text", "g", "line"].includes(name);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (!svg && key in element && key !== "style") element[key] = value; else element.setAttribute(key, value);
  }
  element.append(...children.filter(child => child !== null && child !== undefined));
  return element;
}
const number = value => value.toLocaleString("en-US");
const fixed = (value, digits = 2) => value === null || value === undefined ? "–" : value.toFixed(digits).replace("-", "−");

/* ---- data ------------------------------------------------------------------------------------------------------------------ */

async function unpack(id) {
  const bytes = Uint8Array.from(atob($(id).textContent), character => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

let index, columns, problems, rows, longestOfAll, mostLanes;
const blocks = new Map();                                   // number → promise; the most recently used last

function details(row) {
  const key = Math.floor(row / index.block);
  const block = blocks.get(key) ?? unpack(`block-${key}`);
  blocks.delete(key);
  blocks.set(key, block);
  if (blocks.size > KEPT_BLOCKS) blocks.delete(blocks.keys().next().value);
  return block.then(all => all[row % index.block]);
}

const judged = row => !["timed_out", "crashed", null].includes(columns.verdict[row]);
const parallelism = row => columns.total[row] / Math.max(1, columns.longest[row]);
const FILTERS = {
  all: () => true,
  correct: row => columns.verdict[row] === "correct",
  wrong: row => judged(row) && columns.verdict[row] !== "correct",
  "ill-formed": row => columns.flaw[row] !== null,
  "cut off": row => columns.finish[row] !== "answered",
  "not judged": row => !judged(row),
};
const SORTS = {                                             // largest first, unknown last
  "as in the file": null,
  "longest path": row => columns.longest[row],
  "most parallel": parallelism,
  "most tokens": row => columns.total[row],
  "highest reward": row => columns.reward[row],
  "lowest reward": row => columns.reward[row] === null ? null : -columns.reward[row],
  "highest advantage": row => columns.advantage[row],
  "lowest advantage": row => columns.advantage[row] === null ? null : -columns.advantage[row],
  "least likely": row => columns.logprob[row] === null ? null : -columns.logprob[row],
};

/* ---- what is listed -------------------------------------------------------------------------------------------------------- */

const state = { filter: "all", sort: "as in the file", flaw: "", step: "", group: null, query: "", found: null, colour: "off" };
let listed = [], at = 0;                                    // rows in order; which of them is chosen

function relist() {
  const chosen = listed[at], key = SORTS[state.sort], keep = FILTERS[state.filter];
  listed = rows.filter(row => keep(row) && (!state.flaw || columns.flaw[row] === state.flaw) && (!state.step || String(columns.step[row]) === state.step)
    && (state.group === null || columns.problem[row] === state.group) && (state.found === null || state.found.has(row)));
  if (key) {
    const keys = new Map(listed.map(row => [row, key(row) ?? -Infinity]));
    listed.sort((a, b) => keys.get(b) - keys.get(a) || a - b);
  }
  for (const button of $("filters").children) button.setAttribute("aria-pressed", button.dataset.filter === state.filter);
  $("sort").value = state.sort; $("flaw").value = state.flaw; $("step").value = state.step;
  $("group-off").hidden = state.group === null;
  $("group-off").textContent = state.group === null ? "" : `only ${problems[state.group][0]} ✕`;
  $("count").textContent = listed.length === rows.length ? `${number(rows.length)} responses` : `${number(listed.length)} of ${number(rows.length)} responses`;
  $("spacer").style.height = `${listed.length * ROW_HEIGHT}px`;
  showTotals();
  const again = listed.indexOf(chosen);
  choose(again < 0 ? 0 : again);
}

function showTotals() {
  const mean = (of, among = listed) => among.length ? among.reduce((sum, row) => sum + of(row), 0) / among.length : null;
  const percent = value => value === null ? "–" : `${(100 * value).toFixed(1)} %`;
  const rewarded = listed.filter(row => columns.reward[row] !== null);
  const facts = {
    "correct": percent(mean(row => FILTERS.correct(row), listed.filter(judged))), "well-formed": percent(mean(row => columns.flaw[row] === null)),
    "reward": fixed(mean(row => columns.reward[row], rewarded), 3), "longest path": fixed(mean(row => columns.longest[row]), 0),
    "total tokens": fixed(mean(row => columns.total[row]), 0), "parallelism": fixed(mean(parallelism)),
  };
  const overshot = overshoots(listed);
  if (overshot) facts["overshoots"] = overshot;
  $("totals").replaceChildren(...Object.entries(facts).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

let searching = 0;
async function search(query) {
  const turn = ++searching;
  state.query = query.toLowerCase();
  state.found = state.query ? new Set() : null;
  $("progress").textContent = "";
  if (!state.query) return relist();
  const hit = text => text !== null && text.toLowerCase().includes(state.query);
  const byProblem = problems.map(problem => problem.some(hit));
  for (const row of rows) if (byProblem[columns.problem[row]] || hit(columns.answer[row])) state.found.add(row);
  relist();
  const count = Math.ceil(rows.length / index.block);       // then the texts, block by block, without holding the page up
  let shown = performance.now(), added = false;
  for (let block = 0; block < count; block++) {
    const all = await (blocks.get(block) ?? unpack(`block-${block}`));
    if (turn !== searching) return;
    all.forEach((segments, place) => {
      const row = block * index.block + place;
      if (!state.found.has(row) && segments.some(segment => hit(segment.text))) { state.found.add(row); added = true; }
    });
    if (performance.now() - shown > 200) {
      $("progress").textContent = `searching texts ${Math.round(100 * block / count)} %`;
      if (added) relist();
      added = false; shown = performance.now();
      await new Promise(resolve => setTimeout(resolve));
      if (turn !== searching) return;
    }
  }
  $("progress").textContent = "";
  relist();
}

/* ---- list: only the rows in sight exist ------------------------------------------------------------------------------------- */

const pool = new Map();                                     // place in the list → element
function drawList() {
  const list = $("list"), first = Math.max(0, Math.floor(list.scrollTop / ROW_HEIGHT) - 3);
  const last = Math.min(listed.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW_HEIGHT) + 3);
  for (const [place, element] of pool) if (place < first || place >= last || Number(element.dataset.row) !== listed[place]) { element.remove(); pool.delete(place); }
  for (let place = first; place < last; place++) {
    if (!pool.has(place)) { pool.set(place, rowElement(listed[place], place)); list.append(pool.get(place)); }
    pool.get(place).setAttribute("aria-selected", place === at);
  }
}

function verdict(row) {
  const name = columns.verdict[row];
  if (name === "correct") return ["✓", "correct"];
  return name === null ? ["·", "sample"] : judged(row) ? ["✗", "wrong"] : ["!", "other"];
}

function rowElement(row, place) {
  const [mark, kind] = verdict(row);
  const element = el("div", { className: "row", role: "option", "data-row": row, onclick: () => choose(place) },
    el("div", { className: "head" }, el("span", { className: `mark ${kind}`, title: columns.verdict[row] ?? "not graded" }, mark),
      el("span", { className: "id" }, problems[columns.problem[row]][0]), el("span", { className: "sample" }, `#${columns.sample[row]}`),
      el("span", { className: "answer", title: columns.answer[row] ?? "" }, columns.answer[row] ?? ""),
      el("span", { className: "reward" }, fixed(columns.reward[row]))),
    el("div", { className: "foot" }, thumbnail(row), columns.flaw[row] ? el("span", { className: "flaw" }, columns.flaw[row]) : null,
      el("span", { className: "lengths" }, `${number(columns.longest[row])} / ${number(columns.total[row])}`)));
  element.style.top = `${place * ROW_HEIGHT}px`;
  return element;
}

function choose(place) {
  at = Math.max(0, Math.min(place, listed.length - 1));
  const list = $("list"), top = at * ROW_HEIGHT;
  if (top < list.scrollTop) list.scrollTop = top;
  else if (top + ROW_HEIGHT > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW_HEIGHT - list.clientHeight;
  drawList();
  showDetail(listed[at]);
}

/** Choose a row, listed or not: one that is hidden by a filter makes the filters go. */
function jump(row) {
  if (!listed.includes(row)) { Object.assign(state, { filter: "all", flaw: "", step: "", group: null, found: null, query: "" }); $("search").value = ""; searching++; relist(); }
  choose(listed.indexOf(row));
}

/* ---- keys and start ----------------------------------------------------------------------------------------------------------- */

function set(changes) { Object.assign(state, changes); relist(); }
function next(names, current, by = 1) { return names[(names.indexOf(current) + by + names.length) % names.length]; }
function sibling(by) { if (listed.length) jump(next(siblings(listed[at]), listed[at], by)); }
const KEYS = {
  j: () => choose(at + 1), ArrowDown: () => choose(at + 1), k: () => choose(at - 1), ArrowUp: () => choose(at - 1),
  PageDown: () => choose(at + 10), PageUp: () => choose(at - 10), Home: () => choose(0), End: () => choose(listed.length - 1),
  n: () => sibling(1), p: () => sibling(-1), g: () => listed.length && set({ group: state.group === null ? columns.problem[listed[at]] : null }),
  l: () => { set({ sort: "longest path" }); choose(0); }, m: () => { set({ sort: "most parallel" }); choose(0); }, s: () => set({ sort: next(Object.keys(SORTS), state.sort) }),
  c: async () => { if (shownRow !== null) colour(next(colourings(await details(shownRow)), state.colour)); },
  "/": () => { $("search").focus(); $("search").select(); }, "?": () => $("help").showModal(),
};
Object.keys(FILTERS).forEach((name, i) => { KEYS[String(i + 1)] = () => set({ filter: name }); });

document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
  if (event.target.id === "search") {
    if (event.key === "Escape") { $("search").value = ""; search(""); $("search").blur(); event.preventDefault(); }
    if (event.key === "Enter" || event.key === "ArrowDown") { $("list").focus(); event.preventDefault(); }
    return;
  }
  if (event.target.tagName === "SELECT" || !KEYS[event.key]) return;
  event.preventDefault();
  KEYS[event.key]();
});

async function start() {
  index = await unpack("index");
  ({ columns, problems } = index);
  rows = columns.problem.map((_, row) => row);
  longestOfAll = Math.max(1, columns.longest.reduce((a, b) => Math.max(a, b), 0));
  mostLanes = columns.shape.reduce((most, shape) => Math.max(most, ...boxes(shape).map(box => box.lane + 1)), 1);
  document.head.append(el("style", {}, highlightRules()));
  const option = (value, label = value) => el("option", { value }, label);
  const counted = (column, name = value => value) => {
    const counts = new Map();
    for (const value of columns[column]) if (value !== null) counts.set(value, (counts.get(value) ?? 0) + 1);
    return [...counts].sort((a, b) => column === "step" ? a[0] - b[0] : b[1] - a[1]).map(([value, count]) => option(String(value), `${name(value)} (${number(count)})`));
  };
  $("filters").append(...Object.entries(FILTERS).map(([name, keep], i) => el("button", { "data-filter": name, title: `key ${i + 1}`, onclick: () => set({ filter: name }) },
    name, " ", el("span", {}, number(rows.filter(keep).length)))));
  $("sort").append(...Object.keys(SORTS).map(name => option(name)));
  $("flaw").append(option("", "any"), ...counted("flaw"));
  $("step").append(option("", "any"), ...counted("step"));
  $("flaw-label").hidden = $("flaw").length < 2;
  $("step-label").hidden = $("step").length < 3;
  for (const name of ["sort", "flaw", "step"]) $(name).addEventListener("change", event => { set({ [name]: event.target.value }); $("list").focus(); });
  let typing;
  $("search").addEventListener("input", event => { clearTimeout(typing); typing = setTimeout(() => search(event.target.value.trim()), 150); });
  $("group-off").addEventListener("click", () => set({ group: null }));
  $("help-button").addEventListener("click", () => $("help").showModal());
  $("help").addEventListener("click", () => $("help").close());
  $("list").addEventListener("scroll", () => requestAnimationFrame(drawList), { passive: true });
  addEventListener("resize", () => { drawList(); showDetail(listed[at]); });
  relist();
  const wanted = Number(location.hash.slice(1) || 0);
  if (wanted > 0 && wanted < rows.length) choose(wanted);
  $("list").focus();
}
start();
