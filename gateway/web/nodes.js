// The nodes: who is there, what each does, and its KV pages by state.

import { count, el, find, keep, say, svg } from "./dom.js";

const STATES = ["active", "incoming", "outgoing", "cached", "quarantined", "free"];

/** Return what there is of each node: of its ledger, of /health and of the metrics. */
function joined(ledgers, health, families) {
  const gauge = (name, id) => families.get(name)?.find(({ labels }) => labels.node === id)?.value ?? null;
  const stalled = health.nodes ?? [];
  const there = ledgers.nodes.map((node) => ({
    ...node,
    state: stalled.includes(node.id) ? "stalled" : "up",
    running: gauge("baton_node_requests_running", node.id),
    queued: gauge("baton_node_requests_queued", node.id),
  }));
  const missing = ledgers.missing.map((id) => ({ id, role: "", state: "missing", pages: null }));
  return [...there, ...missing].sort((a, b) => a.id.localeCompare(b.id, "en", { numeric: true }));
}

function make() {
  return el("li", { class: "card node" },
    el("h3", {}, el("b", { class: "mono" }), " ", el("span", { class: "role" }), " ", el("span", { class: "state" })),
    el("p", { class: "work" }), svg("svg", { class: "bars", role: "img" }), el("ul", { class: "legend" }));
}

function update(card, node) {
  card.dataset.state = node.state;
  say(card.querySelector("b"), node.id);
  say(card.querySelector(".role"), node.role);
  say(card.querySelector(".state"), node.state);
  const work = node.running === null || node.running === undefined ? [] : [`${count(node.running)} running`];
  if (node.queued !== null && node.queued !== undefined) work.push(`${count(node.queued)} queued`);
  const { pages } = node;
  if (pages) work.push(`${count(pages.total)} pages`);
  say(card.querySelector(".work"), pages ? work.join(" · ") : "It did not answer when it was asked.");
  card.querySelector("svg").toggleAttribute("hidden", !pages);
  drawPages(card, pages ?? {});
}

function drawPages(card, pages) {
  const shown = STATES.filter((state) => state in pages);
  const picture = card.querySelector("svg");
  let before = 0;
  picture.replaceChildren(...shown.map((state) => {
    const share = (100 * pages[state]) / (pages.total || 1);
    const rect = svg("rect", { class: `page ${state}`, x: `${before}%`, width: `${share}%`, "data-pages": pages[state] });
    before += share;
    return rect;
  }));
  picture.setAttribute("aria-label", shown.map((state) => `${pages[state]} ${state}`).join(", "));
  keep(card.querySelector("ul"), shown.map((state) => [state, pages[state]]), ([state]) => state,
    ([state]) => el("li", {}, el("i", { class: `swatch page ${state}` }), `${state} `, el("b")),
    (item, [, number]) => {
      say(item.querySelector("b"), count(number));
      item.classList.toggle("none", number === 0);
    });
}

export function showNodes(ledgers, health, families) {
  keep(find("#nodes .cards"), joined(ledgers, health, families), (node) => node.id, make, update);
}
