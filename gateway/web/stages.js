// The stages of a request: what they are, and how they are drawn and read out. Times are ms since it was received.

import { duration, el, svg } from "./dom.js";

export const STAGES = new Map([
  ["tokenize", "received, rendered and tokenized"],
  ["submit", "on the way to the decode node"],
  ["queue", "waiting for pages and a prefill node"],
  ["prefill", "the prompt is computed, chunk by chunk"],
  ["transfer", "KV pages and first token to the decode node"],
  ["send", "the first token to the client"],
  ["decode", "all other tokens"],
]);

const LEAST_CHUNK = 0.01; // of the width: narrower ones are not told apart

/** Return the stages so far as {stage, from, to, isOpen}; the one that did not end goes on until `until`. */
export function segments(timings, until) {
  const found = [];
  let at = 0;
  for (const stage of STAGES.keys()) {
    const ms = timings[`${stage}_ms`];
    if (ms === null || ms === undefined) {
      const { granted } = timings.stamps_ms;
      if (stage === "queue" && granted !== null && granted < until) {
        // Nodes say with the first token when its prefill began. Until then: it was with a prefill node.
        found.push({ stage, from: at, to: Math.max(at, granted), isOpen: false });
        found.push({ stage: "prefill", from: Math.max(at, granted), to: until, isOpen: true });
      } else if (until > at) {
        found.push({ stage, from: at, to: until, isOpen: true });
      }
      break;
    }
    found.push({ stage, from: at, to: at + ms, isOpen: false });
    at += ms;
  }
  return found;
}

/** Draw stages into an <svg>, where `place(ms)` is a part of its width; ticks are where chunks of the prompt ended. */
export function drawBar(picture, parts, chunks, place) {
  const percent = (value) => `${(100 * value).toFixed(3)}%`;
  const inside = (ms) => Math.min(1, Math.max(0, place(ms)));
  const rects = parts.map(({ stage, from, to, isOpen }) => {
    const left = inside(from);
    return svg("rect", {
      class: `stage ${stage}`, x: percent(left), width: percent(inside(to) - left),
      "data-stage": stage, "data-ms": (to - from).toFixed(3), "data-open": isOpen || null,
    });
  });
  const ticks = [];
  let last = -1;
  for (const at of chunks.slice(0, -1).map(place)) {
    if (at - last < LEAST_CHUNK) continue;
    last = at;
    ticks.push(svg("line", { class: "tick", x1: percent(at), x2: percent(at), y1: "15%", y2: "85%" }));
  }
  picture.replaceChildren(...rects, ...ticks);
}

/** Return a picture of the time until the first token, for its own scale. */
export function ttftBar(timings, parts) {
  const before = parts.filter(({ stage }) => stage !== "decode");
  const end = before.at(-1)?.to || 1;
  const picture = svg("svg", { class: "bars", "aria-hidden": "true" });
  drawBar(picture, before, timings.stamps_ms.chunks ?? [], (ms) => ms / end);
  return picture;
}

/** Return the stages as a list of names and numbers. */
export function numbers(parts) {
  const list = el("dl", { class: "numbers" });
  for (const { stage, from, to, isOpen } of parts) {
    const name = el("dt", {}, el("i", { class: `swatch ${stage}` }), stage);
    list.append(el("div", {}, name, el("dd", {}, duration(to - from) + (isOpen ? " …" : ""))));
  }
  return list;
}

export const inWords = (parts) =>
  parts.map(({ stage, from, to, isOpen }) => `${stage} ${duration(to - from)}${isOpen ? " so far" : ""}`).join(", ");

/** Return where a request was computed. */
export function route({ prefill_node: prefill, decode_node: decode }) {
  if (!decode) return "no node yet";
  return prefill ? `${prefill} → ${decode}` : decode;
}
