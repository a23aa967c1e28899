// When to ask: once a second while somebody looks, one round at a time, less often while nobody answers.

const EVERY_MS = 1000;
const MOST_MS = 15_000;

export class Poller {
  #round;
  #onWait;
  #timer = null;
  #isBusy = false;
  #isPaused = false;
  #failed = 0;

  /** `round` asks everything once, or throws; `onWait(error, ms)` is told of a failure, and of the wait then. */
  constructor(round, onWait) {
    this.#round = round;
    this.#onWait = onWait;
    document.addEventListener("visibilitychange", () => this.wake());
  }

  pause() {
    this.#isPaused = true;
  }

  resume() {
    this.#isPaused = false;
    this.wake();
  }

  /** Ask now, unless a round is on its way. */
  wake() {
    clearTimeout(this.#timer);
    if (!this.#isBusy && !this.#isPaused && !document.hidden) this.#turn();
  }

  async #turn() {
    this.#isBusy = true;
    const begun = performance.now();
    let wait;
    try {
      await this.#round();
      this.#failed = 0;
      wait = Math.max(0, begun + EVERY_MS - performance.now());
    } catch (error) {
      this.#failed += 1;
      wait = Math.min(EVERY_MS * 2 ** this.#failed, MOST_MS);
      this.#onWait(error, wait);
    }
    this.#isBusy = false;
    this.#timer = setTimeout(() => this.wake(), wait);
  }
}
