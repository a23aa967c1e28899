// A chat with the model: streams answers, stops them, and shows where the time of each went.

import { count, duration, el, find, say } from "./dom.js";
import { KeyNeeded, ask, events } from "./server.js";
import { numbers, route, segments, ttftBar } from "./stages.js";

const log = find("#log");
const question = find("#question");
let said = []; // what the model is told, in the API's form
let model = null;
let running = null; // the AbortController of the answer that is on its way
let untold = null; // an answer that was stopped: its timeline is in /debug/requests soon

function bubble(who) {
  const text = el("p", { class: "text" });
  const note = el("div", { class: "timeline" });
  log.append(el("article", { class: who, "aria-label": who === "user" ? "You" : "Answer" }, text, note));
  return { text, note };
}

const toEnd = () => { log.scrollTop = log.scrollHeight; };

function showTimeline(note, timings, numTokens) {
  const parts = segments(timings, timings.total_ms);
  const rate = numTokens > 1 && timings.decode_ms ? ` · ${count((1000 * (numTokens - 1)) / timings.decode_ms)} tokens/s` : "";
  note.replaceChildren(
    el("p", { class: "quiet" }, `first token ${duration(timings.ttft_ms)} · ${count(numTokens)} tokens in ` +
      `${duration(timings.total_ms)}${rate} · ${route(timings)}`),
    ttftBar(timings, parts), numbers(parts));
  toEnd();
}

/** Return what shows an answer's text: once a frame, as laying out a long text for each token would keep us busy. */
function shower(element) {
  const text = element.appendChild(document.createTextNode(""));
  let more = "";
  return {
    add(piece) {
      if (more === "" && piece !== "") requestAnimationFrame(this.flush);
      more += piece;
    },
    flush() {
      const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      text.appendData(more);
      more = "";
      if (isAtEnd) toEnd();
    },
  };
}

/** Take an answer's events. */
async function read(response, answer) {
  const text = shower(answer.text);
  let numTokens = 0;
  try {
    for await (const event of events(response)) {
      answer.id = event.id;
      text.add(event.choices[0]?.delta.content ?? "");
      numTokens = event.usage?.completion_tokens ?? numTokens;
      if (event.timings) showTimeline(answer.note, event.timings, numTokens);
    }
  } finally {
    text.flush();
  }
}

function setRunning(controller) {
  const off = find(controller ? "#send" : "#stop");
  if (document.activeElement === off) question.focus(); // what is disabled has no keys: Esc would not stop it
  running = controller;
  find("#stop").disabled = controller === null;
  find("#send").disabled = controller !== null;
  log.setAttribute("aria-busy", String(controller !== null)); // read out once it is there, not word by word
}

async function send() {
  const content = question.value.trim();
  if (!content || running) return;
  question.value = "";
  bubble("user").text.textContent = content;
  const answer = bubble("answer");
  const conversation = said;
  conversation.push({ role: "user", content });
  toEnd();
  setRunning(new AbortController());
  try {
    model ??= (await (await ask("v1/models")).json()).data[0].id;
    const body = { model, messages: conversation, stream: true, timings: true,
      stream_options: { include_usage: true, continuous_usage_stats: true } };
    const response = await ask("v1/chat/completions", {
      method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" }, signal: running.signal,
    });
    await read(response, answer);
    conversation.push({ role: "assistant", content: answer.text.textContent });
  } catch (error) {
    if (error.name === "AbortError") {
      answer.note.append(el("p", { class: "quiet" }, "Stopped."));
      untold = answer;
      if (answer.text.textContent) conversation.push({ role: "assistant", content: answer.text.textContent });
      else conversation.pop();
    } else {
      answer.note.append(el("p", { class: "error", role: "alert" }, error.message));
      conversation.pop();
      question.value ||= content;
      if (error instanceof KeyNeeded) document.dispatchEvent(new CustomEvent("key-needed", { detail: error.message }));
    }
    toEnd();
  }
  setRunning(null);
}

const stop = () => running?.abort();

function clear() {
  stop();
  said = [];
  untold = null;
  log.replaceChildren();
  question.focus();
}

export function beginChat() {
  find("#ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  find("#stop").addEventListener("click", () => { stop(); question.focus(); });
  find("#clear").addEventListener("click", clear);
  find("#chat").addEventListener("keydown", (event) => {
    if (event.key === "Escape") stop();
    if (event.target === question && event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
}

export function showModel(name) {
  model = name;
  say(find("#model"), name);
}

/** Show the timeline of an answer that was stopped, once the server has it. */
export function followStopped(requests) {
  const ended = requests.find(({ id, isLive }) => id === untold?.id && !isLive);
  if (!ended) return;
  const timeline = untold.note.appendChild(el("div"));
  untold = null;
  showTimeline(timeline, ended.timings, ended.output_tokens);
}
