// Requests as bars under each other, newest first: by the clock, or each from its own start.

import { count, duration, el, find, keep, say, svg } from "./dom.js";
import { STAGES, drawBar, inWords, numbers, route, segments, ttftBar } from "./stages.js";

const MOST_ROWS = 100;
const FIT_ROWS = 26; // so many of the newest are on the axis from their start
const SPANS_MS = [100, 200, 400, 600, 1e3, 2e3, 3e3, 4e3, 6e3, 8e3, 12e3, 20e3, 30e3, 40e3, 60e3, 80e3, 120e3, 240e3]; // then whole multiples of the last
const TICKS = 4;

const list = find("#rows");
let requests = [];
let lastSpanMs = SPANS_MS[0];
let pointed = null; // the key of the row under the pointer, or with the focus

const chosen = (name) => find(`input[name=${name}]:checked`).value;

function make() {
  return el("li", {}, el("button", { type: "button", class: "row", tabindex: "-1" },
    el("span", { class: "mono id" }), el("span", { class: "what" }), svg("svg", { class: "bars", "aria-hidden": "true" }),
    el("span", { class: "ttft" }), el("span", { class: "tokens" }), el("span", { class: "spoken" })));
}

const what = (request) =>
  request.isLive ? request.state : { success: request.finish_reason, client_gone: "client gone" }[request.outcome] ?? request.outcome;

function update(item, request, axis) {
  const row = item.firstChild;
  const parts = segments(request.timings, request.lastedMs);
  row.dataset.state = request.isLive ? "live" : request.outcome;
  say(row.querySelector(".id"), request.id.slice(-6) + (request.choice ? `#${request.choice}` : ""));
  say(row.querySelector(".what"), what(request));
  say(row.querySelector(".ttft"), duration(request.timings.ttft_ms));
  say(row.querySelector(".tokens"), `${count(request.output_tokens)} tok`);
  say(row.querySelector(".spoken"), `, ${inWords(parts)}`);
  const beginMs = axis.isClock ? 1000 * request.received_s - axis.beginMs : 0;
  drawBar(row.querySelector("svg"), parts, request.timings.stamps_ms.chunks ?? [], (ms) => (beginMs + ms) / axis.spanMs);
}

/** Return what the bars' width is to mean, if it must hold `ms`; what it meant before, if that will do. */
function fit(ms) {
  if (ms > lastSpanMs || ms < 0.45 * lastSpanMs) lastSpanMs = SPANS_MS.find((span) => span >= ms) ?? 240e3 * Math.ceil(ms / 240e3);
  return lastSpanMs;
}

function axisOf(shown) {
  if (chosen("from") === "start") {
    return { isClock: false, spanMs: fit(Math.max(...shown.map(({ lastedMs }) => lastedMs))) };
  }
  const newest = shown.slice(0, FIT_ROWS);
  const endMs = Math.max(...shown.map((request) => 1000 * request.received_s + request.lastedMs));
  const spanMs = fit(endMs - Math.min(...newest.map(({ received_s }) => 1000 * received_s)));
  return { isClock: true, spanMs, beginMs: endMs - spanMs };
}

function showAxis({ isClock, spanMs }) {
  const labels = [...Array(TICKS + 1).keys()].map((i) => {
    const ms = (spanMs * i) / TICKS;
    if (!isClock) return i === 0 ? "0" : duration(ms);
    return i === TICKS ? "last" : `−${duration(spanMs - ms)}`;
  });
  keep(find("#requests .axis"), labels.map((text, i) => ({ text, i })), ({ i }) => String(i),
    () => el("span"), (label, { text }) => say(label, text));
}

function showDetail() {
  const request = requests.find(({ key }) => key === pointed);
  if (!request) return;
  const { timings } = request;
  const parts = segments(timings, request.lastedMs);
  const facts = [request.endpoint, route(timings), `${count(request.prompt_tokens)} prompt tokens`,
    `${count(request.output_tokens)} answer tokens`, request.gateway];
  const chunks = timings.stamps_ms.chunks ?? [];
  if (chunks.length > 1) facts[2] += ` in ${chunks.length} chunks`;
  const head = el("p", {}, el("b", { class: "mono" }, request.id), ` ${what(request)} · first token after ${duration(timings.ttft_ms)}`);
  if (request.error) head.append(el("span", { class: "error" }, ` ${request.error}`));
  find("#detail").replaceChildren(head, el("p", { class: "quiet" }, facts.join(" · ")), ttftBar(timings, parts), numbers(parts));
}

function show() {
  const wanted = chosen("show");
  const matching = requests.filter(({ isLive }) => wanted === "all" || isLive === (wanted === "live"));
  let left = MOST_ROWS;
  const shown = matching.filter(() => left-- > 0);
  const axis = shown.length ? axisOf(shown) : { isClock: false, spanMs: 1000 };
  showAxis(axis);
  keep(list, shown, ({ key }) => key, make, (item, request) => update(item, request, axis));
  const rows = [...list.querySelectorAll(".row")];
  const stop = rows.find((row) => row === document.activeElement) ?? rows[0]; // where Tab goes
  rows.forEach((row) => { row.tabIndex = row === stop ? 0 : -1; });
  const hidden = matching.length - shown.length;
  say(find("#more"), shown.length ? (hidden ? `and ${hidden} that came earlier` : "") : "No requests yet.");
  showDetail();
}

function point(event) {
  const item = event.target.closest("li");
  if (!item) return;
  pointed = item.dataset.key;
  showDetail();
}

function move(event) {
  const rows = [...list.querySelectorAll(".row")];
  const at = rows.indexOf(document.activeElement);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: rows.length - 1 }[event.key];
  if (at < 0 || !rows[to]) return;
  event.preventDefault();
  rows[at].tabIndex = -1;
  rows[to].tabIndex = 0;
  rows[to].focus();
}

export function beginWaterfall() {
  find("#stages").append(...[...STAGES].map(([stage, meaning]) =>
    el("li", { title: meaning }, el("i", { class: `swatch ${stage}` }), stage)));
  list.addEventListener("pointerover", point);
  list.addEventListener("focusin", point);
  list.addEventListener("keydown", move);
  document.querySelectorAll("#requests fieldset").forEach((choice) => choice.addEventListener("change", show));
}

export function showRequests(all) {
  requests = all;
  const numLive = all.filter(({ isLive }) => isLive).length;
  say(find("#num-live"), count(numLive));
  say(find("#num-ended"), count(all.length - numLive));
  show();
}
