// Lines over the last minutes: a card a plot, with its last values as text. Knows points, not where they are from.

import { count, duration, el, find, say, svg } from "./dom.js";

export const KEEP_MS = 300_000;
const SPANS_MS = [60_000, 120_000, KEEP_MS];
const PLOTS = [
  { title: "Tokens per second", write: count, lines: [["tokensPerS", "answers"], ["promptPerS", "prompts"]] },
  { title: "Time to first token", write: duration, lines: [["ttft50", "p50"], ["ttft99", "p99"]] },
  { title: "Between tokens", write: duration, lines: [["itl50", "p50"], ["itl99", "p99"]] },
  { title: "Requests", write: count, lines: [["decoding", "decoding"], ["waiting", "waiting"]] },
];
const [WIDTH, HEIGHT] = [300, 80];
let cards = null;

function make({ title, lines }) {
  const legend = el("ul", { class: "legend" }, ...lines.map(([, name], i) =>
    el("li", {}, el("i", { class: `swatch line${i}` }), name, el("b"))));
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("path", { class: "grid", d: `M0 .5H${WIDTH}M0 ${HEIGHT / 2}H${WIDTH}M0 ${HEIGHT - 0.5}H${WIDTH}` }),
    svg("path", { class: "under" }), ...lines.map((_, i) => svg("path", { class: `line line${i}` })).reverse());
  const foot = el("p", { class: "foot quiet" }, el("span"), el("span"));
  return el("figure", { class: "card plot" }, el("figcaption", {}, title), legend,
    el("div", { class: "frame" }, el("span", { class: "most quiet" }), picture), foot);
}

/** Return the next round number that is not below. */
function round(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 1.5, 2, 3, 4, 6, 8, 10].find((factor) => factor * power >= value * 0.999);
}

/** Return the path of a line; where there is no value, it has a gap. */
function path(points, x, y, name) {
  let isOn = false;
  const parts = points.map((point) => {
    if (point[name] === null) {
      isOn = false;
      return "";
    }
    const step = `${isOn ? "L" : "M"}${x(point.atMs).toFixed(1)} ${y(point[name]).toFixed(1)}`;
    isOn = true;
    return step;
  });
  return parts.join("");
}

function update(card, { write, lines }, points, nowMs) {
  const span = SPANS_MS.find((ms) => nowMs - points[0].atMs <= ms) ?? KEEP_MS;
  const most = round(Math.max(...points.flatMap((point) => lines.map(([name]) => point[name] ?? 0)), 0.001));
  const x = (atMs) => WIDTH * (1 - (nowMs - atMs) / span);
  const y = (value) => HEIGHT - 1 - ((HEIGHT - 2) * value) / most;
  lines.forEach(([name], i) => {
    card.querySelector(`path.line${i}`).setAttribute("d", path(points, x, y, name));
    say(card.querySelectorAll(".legend b")[i], write(points.findLast((point) => point[name] !== null)?.[name]));
  });
  say(card.querySelector(".most"), write(most));
  const [from, to] = card.querySelectorAll(".foot span");
  say(from, `${span / 60_000} min ago`);
  say(to, "now");
}

export function showPlots(points, nowMs = performance.now()) {
  cards ??= PLOTS.map((plot) => {
    const card = make(plot);
    find("#plots .cards").append(card);
    return card;
  });
  cards.forEach((card, i) => update(card, PLOTS[i], points, nowMs));
}
