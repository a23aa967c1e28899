// What failed, by kind: in all, and since this page was opened.

import { count, el, find, keep, say } from "./dom.js";

const FRESH_MS = 60_000;
const seen = new Map(); // series -> its count at first, its count last, when it changed
let isFirst = true;

function take({ labels, value }, nowMs) {
  const by = labels.node ?? "gateway";
  const key = `${labels.kind}/${by}`;
  // What was not there before began at 0: a node that came later, a kind that counts first now.
  const known = seen.get(key) ?? { first: isFirst ? value : 0, last: isFirst ? value : 0, changedMs: -Infinity };
  if (value !== known.last) known.changedMs = nowMs;
  known.first = Math.min(known.first, value); // a process began anew
  known.last = value;
  seen.set(key, known);
  return { key, kind: labels.kind, by, value, more: value - known.first, changedMs: known.changedMs };
}

export function showFailures(families, nowMs = performance.now()) {
  const series = ["baton_failures_total", "baton_node_failures_total"].flatMap((name) => families.get(name) ?? []);
  const all = series.map((one) => take(one, nowMs)).filter(({ value }) => value > 0);
  all.sort((a, b) => b.changedMs - a.changedMs || b.value - a.value || a.key.localeCompare(b.key));
  isFirst = false;
  keep(find("#failures tbody"), all, ({ key }) => key,
    () => el("tr", {}, el("th", { scope: "row" }), el("td"), el("td"), el("td")),
    (row, { kind, by, value, more, changedMs }) => {
      [kind.replaceAll("_", " "), by, count(value), more ? `+${count(more)}` : "–"]
        .forEach((text, i) => say(row.children[i], text));
      row.classList.toggle("fresh", nowMs - changedMs < FRESH_MS);
    });
  find("#failures table").hidden = all.length === 0;
  const ended = (families.get("baton_requests_total") ?? [])
    .map(({ labels, value }) => `${count(value)} ${labels.outcome.replaceAll("_", " ")}`);
  say(find("#outcomes"), `${all.length ? "" : "No failure was counted. "}Requests that ended: ${ended.join(", ") || "–"}`);
}
