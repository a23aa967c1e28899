// Reads /metrics, and works out rates and percentiles between two readings. Knows no picture.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/gm;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
const ESCAPED = /\\(.)/g;
const HISTOGRAMS = ["baton_time_to_first_token_seconds", "baton_inter_token_latency_seconds"];
const COUNTERS = ["baton_node_tokens_sampled_total", "baton_node_tokens_computed_total"]; // as they go, not at an end

const unescaped = (text) => text.replace(ESCAPED, (_, c) => (c === "n" ? "\n" : c));

/** Return the series of Prometheus text by name: a list of {labels, value} each. */
export function parse(text) {
  const families = new Map();
  for (const [, name, inside, number] of text.matchAll(LINE)) {
    const pairs = [...(inside ?? "").matchAll(LABEL)].map(([, label, value]) => [label, unescaped(value)]);
    const series = { labels: Object.fromEntries(pairs), value: Number(number.replace("Inf", "Infinity")) };
    if (families.has(name)) families.get(name).push(series);
    else families.set(name, [series]);
  }
  return families;
}

const byNode = (series) => new Map((series ?? []).map(({ labels, value }) => [labels.node, value]));

/** Return [upper bound, how many are not above it] of a histogram, by bound, all its label sets in one. */
function buckets(families, name) {
  const sums = new Map();
  for (const { labels, value } of families.get(`${name}_bucket`) ?? []) {
    const bound = Number(labels.le.replace("Inf", "Infinity"));
    sums.set(bound, (sums.get(bound) ?? 0) + value);
  }
  return [...sums].sort(([a], [b]) => a - b);
}

/** Return the quantile `q` of what was observed between two readings, or null: even inside a bucket, as PromQL has it. */
export function quantile(q, now, before) {
  const counts = now.map(([bound, value], i) => [bound, value - (before[i]?.[1] ?? 0)]);
  const all = counts.at(-1)?.[1] ?? 0;
  if (all <= 0) return null;
  const rank = q * all;
  const i = counts.findIndex(([, value]) => value >= rank);
  const [lower, below] = i > 0 ? counts[i - 1] : [0, 0];
  const [upper, upTo] = counts[i];
  if (upper === Infinity) return lower;
  return lower + ((upper - lower) * (rank - below)) / (upTo - below || 1);
}

/** The readings of the last minutes, and what can be said of the seconds between them. */
export class History {
  #readings = [];
  points = []; // {atMs, tokensPerS, promptPerS, ttft50, ttft99, itl50, itl99 (ms)}; null: nothing happened

  constructor(keepMs) {
    this.keepMs = keepMs;
  }

  /** Take a reading; `more` is beside it in its point. */
  add(families, more, atMs = performance.now()) {
    const reading = {
      atMs,
      counters: COUNTERS.map((name) => byNode(families.get(name))),
      histograms: HISTOGRAMS.map((name) => buckets(families, name)),
    };
    this.#readings.push(reading);
    this.#readings = this.#readings.filter((one) => atMs - one.atMs < 30_000);
    const [tokensPerS, promptPerS] = this.#rates(reading, this.#atLeast(3000, atMs));
    const before = this.#atLeast(10_000, atMs);
    const [[ttft50, ttft99], [itl50, itl99]] = reading.histograms.map((now, i) =>
      [0.5, 0.99].map((q) => {
        const value = before === reading ? null : quantile(q, now, before.histograms[i]);
        return value === null ? null : 1000 * value;
      }));
    this.points.push({ atMs, tokensPerS, promptPerS, ttft50, ttft99, itl50, itl99, ...more });
    this.points = this.points.filter((point) => atMs - point.atMs <= this.keepMs);
  }

  /** Return the last reading that is so old, or the oldest. */
  #atLeast(ageMs, nowMs) {
    return this.#readings.findLast((one) => nowMs - one.atMs >= ageMs - 100) ?? this.#readings[0];
  }

  #rates(now, before) {
    const seconds = (now.atMs - before.atMs) / 1000;
    return now.counters.map((values, i) => {
      let more = 0;
      for (const [node, value] of values) {
        const old = before.counters[i].get(node) ?? value; // it was not there, or did not answer
        more += value < old ? value : value - old; // less: it began anew
      }
      return seconds === 0 ? null : more / seconds;
    });
  }
}
