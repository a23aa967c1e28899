// What several gateways said of their requests, as one list. Each poll reaches any one of them.

const FORGET_MS = 30_000;

export class Gateways {
  #answers = new Map();

  /** Take an answer of /debug/requests. */
  add(answer, nowMs = performance.now()) {
    this.#answers.set(answer.gateway, { answer, nowMs });
    for (const [name, heard] of this.#answers) {
      if (nowMs - heard.nowMs > FORGET_MS) this.#answers.delete(name);
    }
  }

  names() {
    return [...this.#answers.keys()].sort();
  }

  /** Return all requests, each with its key, its gateway and how long it has been there (ms). */
  requests() {
    const all = [...this.#answers.values()].flatMap(({ answer }) => answer.requests.map((request) => ({
      ...request,
      key: `${answer.gateway}/${request.id}/${request.choice}`,
      gateway: answer.gateway,
      isLive: request.state !== "done",
      lastedMs: request.timings.total_ms ?? 1000 * (answer.now_s - request.received_s),
    })));
    return all.sort((a, b) => b.received_s - a.received_s || a.choice - b.choice);
  }
}
