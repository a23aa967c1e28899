// Puts the page together: asks once a second, gives each part its share, and says how that goes.

import { beginChat, followStopped, showModel } from "./chat.js";
import { find, say } from "./dom.js";
import { showFailures } from "./failures.js";
import { Gateways } from "./gateways.js";
import { History, parse } from "./metrics.js";
import { showNodes } from "./nodes.js";
import { KEEP_MS, showPlots } from "./plots.js";
import { Poller } from "./poller.js";
import { KeyNeeded, read, rememberKey } from "./server.js";
import { beginWaterfall, showRequests } from "./waterfall.js";

const PATIENCE_MS = 8000;
const gateways = new Gateways();
const history = new History(KEEP_MS);
let hasModel = false;

function tell(state, text) {
  find("#status").dataset.state = state;
  say(find("#status"), text);
}

async function round() {
  const get = (path, kind, others) => read(path, kind, { signal: AbortSignal.timeout(PATIENCE_MS) }, others);
  const [ledgers, requests, metrics, health, models] = await Promise.all([
    get("debug/kv", "json"), get("debug/requests", "json"), get("metrics", "text"), get("health", "json", [503]),
    hasModel ? null : get("v1/models", "json"),
  ]);
  if (models) showModel(models.data[0].id);
  hasModel = true;
  gateways.add(requests);
  const [all, families] = [gateways.requests(), parse(metrics)];
  const live = all.filter(({ isLive }) => isLive);
  const decoding = live.filter(({ state }) => state === "decoding").length;
  history.add(families, { decoding, waiting: live.length - decoding });
  showNodes(ledgers, health, families);
  showPlots(history.points);
  showRequests(all);
  showFailures(families);
  followStopped(all);
  tell("live", `live from ${gateways.names().join(", ")}`);
}

function askForKey(words) {
  poller.pause();
  tell("key", "waiting for an API key");
  find("#key").hidden = false;
  say(find("#key-message"), words);
  find("#key-field").focus();
}

const poller = new Poller(round, (error, waitMs) => {
  hasModel = false; // it may come back with another
  if (error instanceof KeyNeeded) askForKey(error.message);
  else tell("silent", `${error.message.replace(/\.?$/, ".")} Next try in ${Math.round(waitMs / 1000)} s.`);
});

find("#key").addEventListener("submit", (event) => {
  event.preventDefault();
  rememberKey(find("#key-field").value.trim());
  find("#key").hidden = true;
  tell("asking", "asking the server");
  poller.resume();
});
document.addEventListener("key-needed", ({ detail }) => askForKey(detail));
beginWaterfall();
beginChat();
poller.wake();
