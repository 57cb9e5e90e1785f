// Asks the server for its figures once a second, while somebody looks, and shows them.

import { BlockMap } from "./blockmap.js";
import { decode, tally } from "./cells.js";
import { Chart, History, inWords } from "./chart.js";
import { ago, bytes, clock, count, duration, percent, plural, rate } from "./format.js";
import { RequestTable, setText, showBar, showEvents } from "./tables.js";

const EVERY_MS = 1000, PATIENCE_MS = 8000, STALE_MS = 4000;
const PREEMPTIONS = new Set(["swap", "recompute"]);
const $ = (id) => document.getElementById(id);

const history = new History();
const table = new RequestTable($("rows"), $("requests-note"), (label) => {
  map.select(label);
  host.select(label);
});
const map = new BlockMap($("map"), {
  height: 300,
  name: (label) => table.name(label),
  changed: (view) => showZoom(view),
});
const host = new BlockMap($("host-map"), { height: 90, name: (label) => table.name(label) });
const charts = [
  new Chart($("speed"), history, {
    series: [
      { key: "prompts", colour: "second", dashed: true },
      { key: "generated", colour: "first" },
    ],
    unit: (value) => rate(value),
    say: (points) => `Tokens a second. Generated: ${inWords(points, "generated", "tokens a second")}. ` +
      `Prompts: ${inWords(points, "prompts", "tokens a second")}.`,
  }),
  new Chart($("use"), history, {
    series: [
      { key: "kept", colour: "cached", area: "hatched" },
      { key: "used", colour: "first-area", area: "plain" },
    ],
    top: (last) => last?.total ?? 1,
    mark: (last) => last?.mark,
    ticks: true,
    unit: (value) => count(value),
    say: (points) => `Blocks over time. In use: ${inWords(points, "used", "blocks")}.`,
  }),
];

let frame = null; // the last one, with decoded cells
let lostSince = null, failures = 0, timer = null, asking = false;
let cameAt = 0; // performance.now() of the last new frame

function key() {
  return sessionStorage.getItem("tinyvllm-key");
}

async function poll() {
  clearTimeout(timer);
  if (asking || document.hidden) return;
  asking = true;
  const begun = performance.now();
  try {
    const response = await ask();
    if (response.status === 401) return demandKey();
    if (response.status === 404) return setStatus("lost", "This server shows no dashboard");
    const body = await response.json();
    if (!response.ok) throw new Error(body.error?.message ?? `status ${response.status}`);
    $("key").hidden = true;
    failures = 0;
    lostSince = null;
    take(body);
  } catch (error) {
    failures += 1;
    lostSince ??= Date.now() / 1000;
    const reason = error.name === "TypeError" ? "" : ` (${error.message})`;
    setStatus("lost", `Connection lost since ${clock(lostSince)}, trying again${reason}`);
  } finally {
    asking = false;
  }
  const wait = failures ? Math.min(5000, 500 * 2 ** failures) : EVERY_MS;
  timer = setTimeout(poll, Math.max(100, wait - (performance.now() - begun)));
}

function ask() {
  const address = new URL("dashboard/data", document.baseURI);
  if (frame) address.searchParams.set("since", frame.id);
  const headers = key() ? { Authorization: `Bearer ${key()}` } : {};
  return fetch(address, { headers, cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
}

function demandKey() {
  setStatus("wait", key() ? "The key is not right" : "A key is needed");
  sessionStorage.removeItem("tinyvllm-key");
  $("key").hidden = false;
  $("key-text").focus();
}

$("key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("tinyvllm-key", $("key-text").value.trim());
  $("key-text").value = "";
  poll();
});

function take(news) {
  if (frame?.id === news.id) {
    const stale = performance.now() - cameAt > STALE_MS;
    if (!stale) return setStatus("live", "Live");
    return setStatus("busy", `The engine is in a long step: figures of ${clock(news.time)}`);
  }
  cameAt = performance.now();
  const base = frame && news.base === frame.id ? frame : null;
  if (frame && frame.started !== news.started) map.zoom(0);
  news.cells = decode(news.cells, base?.cells);
  news.host_cells = decode(news.host_cells, base?.host_cells);
  frame = news;
  setStatus("live", "Live");
  document.querySelector("main").hidden = false;
  show(news);
}

function setStatus(state, text) {
  $("status").dataset.state = state;
  setText($("status"), text);
  document.body.dataset.state = state;
}

function show({ stats, rates, ...news }) {
  document.title = `${news.model} – tinyvllm`;
  setText($("model"), `${news.model} on ${news.device}`);
  const cost = rates && `Watching costs the engine ${percent(rates.view_seconds)} of its time. `;
  setText($("about"),
    `tinyvllm ${news.version}, started ${ago(news.time - news.started)} ago. ${cost ?? ""}`);
  showFigures(stats, rates, news);
  remember(stats, rates, news);
  table.update(news.requests, news.requests_left_out);
  showBlocks(stats, news);
  showMemory(stats);
  showEvents($("events"), news.events, news.started);
  charts.forEach((chart) => chart.draw());
}

function showFigures(stats, rates, { config, first_token: first, next_token: next }) {
  const figure = (name, text, more) => {
    setText($(name), text);
    setText($(`${name}-more`), more);
  };
  const step = rates && rates.loop_steps > 0 ?
    `${duration(rates.loop_seconds / rates.loop_steps)} a step` : "no steps now";
  figure("generated", rate(rates?.generation_tokens), step);
  const hits = stats.prefix_cache_queries ?
    stats.prefix_cache_hits / stats.prefix_cache_queries : 0;
  figure("prompts", rate(rates?.prefill_tokens), `computed; ${percent(hits)} of all were cached`);
  const most = (times) => times.count ?
    `median; p99 ${duration(times.p99)}` : "none in the last minute";
  figure("first", duration(first.p50), most(first));
  figure("next", duration(next.p50), most(next));
  figure("running", count(stats.num_requests_running),
    `${count(stats.num_requests_waiting)} waiting, ${count(stats.num_requests_swapped)} swapped`);
  figure("usage", percent(stats.kv_cache_usage),
    `${count(stats.kv_blocks_used)} of ${count(stats.kv_blocks_total)}; ` +
    `watermark ${percent(config.preemption_threshold)}`);
  const empty = stats.kv_slots_used ? stats.kv_slots_empty / stats.kv_slots_used : 0;
  figure("fragmentation", percent(empty),
    `${count(stats.kv_slots_empty)} of ${plural(stats.kv_slots_used, "token place")} empty`);
  figure("preemptions", count(stats.num_preemptions),
    `${count(stats.num_preemptions_swap)} swapped, ` +
    `${count(stats.num_preemptions_recompute)} computed again`);
}

function remember(stats, rates, { time, config, events }) {
  history.add({
    time,
    generated: rates?.generation_tokens,
    prompts: rates?.prefill_tokens,
    used: stats.kv_blocks_used,
    kept: stats.kv_blocks_used + stats.kv_blocks_cached,
    total: stats.kv_blocks_total,
    mark: config.preemption_threshold * stats.kv_blocks_total,
  });
  history.ticks = events.filter((one) => PREEMPTIONS.has(one.kind)).map((one) => one.time);
}

function showBlocks(stats, { cells, host_cells: swapped }) {
  map.update(cells);
  const kinds = tally(cells);
  kinds.host = swapped.length - tally(swapped).free;
  for (const entry of $("legend").children) {
    const number = kinds[entry.dataset.kind];
    const share = entry.dataset.kind === "host" || !cells.length ? "" :
      ` (${percent(number / cells.length)})`;
    setText(entry.lastElementChild, count(number) + share);
  }
  $("host").hidden = kinds.host === 0;
  if (kinds.host) {
    host.update(swapped);
    setText($("host-scale"), `${host.scale().text}; ${count(kinds.host)} in use`);
    $("host-map").setAttribute("aria-label", `Map of the swap space, ${count(kinds.host)} of ` +
      `${plural(swapped.length, "block")} in use`);
  }
  $("map").setAttribute("aria-label", `Map of the KV blocks: ${count(stats.kv_blocks_used)} in use, ` +
    `${count(stats.kv_blocks_cached)} cached, ${count(stats.kv_blocks_free)} free`);
}

function showZoom({ deepest, line, last }) {
  setText($("scale"), map.scale().text);
  const told = map.describe();
  $("readout").toggleAttribute("data-some", told !== "");
  setText($("readout"), told || "Point at a cell, or go to the map and use the arrow keys.");
  $("zoom-out").disabled = map.level === 0;
  $("zoom-fit").disabled = map.level === 0;
  $("zoom-in").disabled = map.level === deepest;
  const position = $("position");
  position.hidden = last === 0;
  position.max = last;
  position.step = line;
  position.value = map.first;
  position.setAttribute("aria-valuetext", `from block ${count(map.first)}`);
}

function showMemory(stats) {
  showBar($("pool"), "Device pool", stats.pool_budget, [
    ["used", stats.pool_used, "used"],
    ["reserved", stats.pool_reserved, "reserved"],
    ["peak reserved", stats.pool_reserved_high, "peak"],
  ], [["budget", bytes(stats.pool_budget)]]);
  showBar($("swap"), "Swap space on the host", stats.swap_total_bytes, [
    ["used", stats.swap_used_bytes, "used"],
    ["pinned", stats.swap_pinned_bytes, "reserved"],
  ], [
    ["in all", bytes(stats.swap_total_bytes)],
    ["copied out", bytes(stats.swap_out_bytes)],
    ["copied back", bytes(stats.swap_in_bytes)],
    ["stalls to pin", `${count(stats.swap_num_stalls)}, ${duration(stats.swap_stall_seconds)}`],
  ]);
}

$("zoom-in").addEventListener("click", () => map.zoom(1));
$("zoom-out").addEventListener("click", () => map.zoom(-1));
$("zoom-fit").addEventListener("click", () => map.zoom(0));
$("position").addEventListener("input", (event) => map.scrollTo(Number(event.target.value)));
document.addEventListener("visibilitychange", poll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => frame && show(frame));
poll();
