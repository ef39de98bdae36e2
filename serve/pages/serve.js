"use strict";
/* Ask, and watch director and workers side by side as they write. Talks to this server only. */

const $ = id => document.getElementById(id);
const HUES = [168, 32, 318, 262, 88, 4];
const hue = worker => worker ? `light-dark(hsl(${HUES[(worker - 1) % 6]} 72% 36%), hsl(${HUES[(worker - 1) % 6]} 58% 62%))` : "var(--director)";
const number = value => value.toLocaleString("en");

function el(tag, attributes = {}, ...children) {
  const svg = ["svg", "rect", "text", "path", "title"].includes(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) name === "className" && !svg ? made.className = value : made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function pairs(list, entries) {
  list.replaceChildren(...entries.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function say(text, bad = false) { $("status").textContent = text; $("status").className = bad ? "bad" : ""; }

const headers = () => ({ "Content-Type": "application/json", ...($("key").value ? { Authorization: `Bearer ${$("key").value}` } : {}) });

async function about() {
  const answer = await fetch("v1/models", { headers: headers() });
  if (answer.status === 401) { $("key-label").hidden = false; say("This server wants an API key.", true); return; }
  const card = (await answer.json()).data[0], settings = card.dccot;
  $("model").textContent = card.id;
  document.title = `${card.id} · dccot serve`;
  $("budget").max = settings.budget;
  $("budget").placeholder = settings.budget;
  $("temperature").placeholder = settings.temperature;
  pairs($("totals"), [["workers", settings.workers], ["longest path, at most", number(settings.budget)], ["context", number(card.max_model_len)]]);
}

/* ---- one response in the making ---- */
let lanes, seconds, began, running = null, dirty = false;

function start() {
  lanes = new Map();                                        // "round.worker" → {round, worker, text, tokens, card, body, count}
  began = performance.now();
  $("answer").textContent = "";
  $("texts").replaceChildren();
  $("result").hidden = false;
}

function lane(round, worker) {
  const key = `${round}.${worker}`;
  if (!lanes.has(key)) {
    const count = el("span", {}), body = el("pre", { tabindex: "0" });
    const name = worker ? `worker ${worker}` : round === 1 ? "director" : "director, having read the workers";
    const card = el("article", { className: "card writing", style: `--hue:${hue(worker)}`, "aria-label": name }, el("h3", {}, name, count), body);
    lanes.set(key, { round, worker, text: "", tokens: 0, card, body, count });
    place(card, round, worker);
    if (worker === 1) say(`Round ${round}: workers are writing side by side.`);
    if (worker === 0) for (const other of lanes.values()) if (other.card !== card) other.card.classList.remove("writing");
    if (worker) lanes.get(`${round}.0`).card.classList.remove("writing");
  }
  return lanes.get(key);
}

function place(card, round, worker) {
  if (!worker) { $("texts").append(card); return; }
  let grid = $(`round-${round}`);
  if (!grid) {
    grid = el("div", { className: "workers", id: `round-${round}`, role: "group", "aria-label": `workers of round ${round}` });
    $("texts").append(grid);
  }
  grid.append(card);
  grid.style.setProperty("--across", grid.children.length);
}

function hear(delta) {
  if (delta.content) $("answer").textContent += delta.content;
  if (delta.worker === undefined) return;                   // in reading order, for clients without lanes
  const mine = lane(delta.round, delta.worker);
  mine.text += delta.text;
  mine.tokens += delta.tokens;
  if (delta.worker && delta.text.includes(`</worker_${delta.worker}>`)) mine.card.classList.remove("writing");
  if (!dirty) { dirty = true; requestAnimationFrame(draw); }
}

/** Boxes in tokens along the longest path; workers of a round start together. */
function boxes() {
  const found = [];
  let x = 0;
  for (let round = 1; lanes.has(`${round}.0`); round++) {
    const director = lanes.get(`${round}.0`), workers = [...lanes.values()].filter(other => other.round === round && other.worker);
    found.push({ ...director, x });
    x += director.tokens;
    for (const worker of workers) found.push({ ...worker, x });
    x += Math.max(0, ...workers.map(worker => worker.tokens));
  }
  return { found, longest: x, total: found.reduce((sum, box) => sum + box.tokens, 0) };
}

function draw() {
  dirty = false;
  for (const one of lanes.values()) {
    const end = one.body.scrollTop + one.body.clientHeight >= one.body.scrollHeight - 4;
    if (one.body.textContent.length !== one.text.length) one.body.textContent = one.text;
    one.count.textContent = `${number(one.tokens)} tokens`;
    if (end) one.body.scrollTop = one.body.scrollHeight;
  }
  const { found, longest, total } = boxes();
  seconds = (performance.now() - began) / 1000;
  pairs($("facts"), [["longest path", number(longest)], ["total tokens", number(total)], ["parallelism", (total / Math.max(1, longest)).toFixed(2)],
    ["seconds", seconds.toFixed(2)]]);
  $("tree").replaceChildren(tree(found, longest));
}

function tree(found, longest) {
  const workers = Math.max(0, ...found.map(box => box.worker)), left = 68, row = 22, gap = 8;
  const width = Math.max(300, $("tree").clientWidth - 24 - left), scale = width / Math.max(1, longest), y = worker => worker * (row + gap);
  const height = y(workers) + row + 20;
  const label = `director and ${workers} workers to scale: longest path ${longest} tokens`;
  const svg = el("svg", { viewBox: `0 0 ${left + width} ${height}`, height, role: "img", "aria-label": label });
  for (let worker = 0; worker <= workers; worker++) svg.append(el("text", { x: 0, y: y(worker) + 15 }, worker ? `worker ${worker}` : "director"));
  for (const box of found) {
    const rect = el("rect", { x: left + box.x * scale, y: y(box.worker), width: Math.max(1, box.tokens * scale), height: row, rx: 3, style: `fill:${hue(box.worker)}` });
    rect.append(el("title", {}, `${box.worker ? `worker ${box.worker}` : "director"}: ${box.tokens} tokens`));
    svg.append(rect);
  }
  svg.append(el("text", { x: left, y: height - 3 }, "0"), el("text", { x: left + width, y: height - 3, "text-anchor": "end" }, `${number(longest)} tokens on the longest path`));
  return svg;
}

/* ---- asking ---- */
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
  }
}

function request() {
  const body = { messages: [{ role: "user", content: $("question").value }], stream: true, stream_options: { include_usage: true } };
  if ($("seed").value !== "") body.seed = Number($("seed").value);
  if ($("temperature").value !== "") body.temperature = Number($("temperature").value);
  if ($("budget").value !== "") body.max_completion_tokens = Number($("budget").value);
  if ($("sequential").checked) body.reasoning_effort = "none";
  return JSON.stringify(body);
}

async function refusal(answer) {
  if (answer.status === 401) { $("key-label").hidden = false; $("key").focus(); return "This server wants an API key."; }
  const error = (await answer.json().catch(() => ({}))).error;
  return error?.message ?? `The server answered ${answer.status}.`;
}

async function ask() {
  if (running || !$("question").value.trim()) return;
  running = new AbortController();
  $("ask").disabled = true;
  $("stop").hidden = false;
  say("The director is writing.");
  try {
    const answer = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body: request(), signal: running.signal });
    if (!answer.ok) { say(await refusal(answer), true); return; }
    start();
    await read(answer);
  } catch (error) {
    say(error.name === "AbortError" ? "Stopped." : `The connection to the server was lost (${error.message}).`, true);
  } finally {
    running = null;
    $("ask").disabled = false;
    $("stop").hidden = true;
    for (const one of lanes?.values() ?? []) one.card.classList.remove("writing");
  }
}

async function read(answer) {
  let finish = null, usage = null;
  for await (const event of events(answer)) {
    if (event.error) { say(event.error.message, true); return; }
    usage = event.usage ?? usage;
    for (const choice of event.choices) { hear(choice.delta); finish = choice.finish_reason ?? finish; }
  }
  draw();
  const details = usage.completion_tokens_details, cut = finish === "length" ? " The budget ended it." : "";
  if (!$("answer").textContent) $("answer").textContent = "none: the director wrote no answer";
  say(`${cut ? "Ended" : "Answered"} after ${seconds.toFixed(2)} s: ${number(details.longest_path_tokens)} tokens on the longest path, ${number(usage.completion_tokens)} sampled by director and ${details.workers} workers.${cut}`);
}

$("form").addEventListener("submit", event => { event.preventDefault(); ask(); });
$("stop").addEventListener("click", () => running?.abort());
$("key").addEventListener("change", about);
document.addEventListener("keydown", event => {
  if (event.key === "Escape") running?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); ask(); }
});
addEventListener("resize", () => { if (lanes?.size) draw(); });
about();
