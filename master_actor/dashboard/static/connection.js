// The stream from the master, and what to do while there is none.

const SILENCE_MS = 5000; // it sends every second: one that is silent for so long is away
const RETRY_MS = [300, 500, 1000, 2000];
const HIDDEN_MS = 60_000; // a page that nobody looks at leaves its place to others

/**
 * Calls `onReport(report)` for each report and `onState(state)` whenever the state changes:
 * "connecting", "live", "away", "full" (too many pages are open), "refused" (the token is not right), "paused".
 */
export class Connection {
  state = "connecting";
  /** When this state began, by performance.now(). */
  since = performance.now();
  #source = null;
  #heard = performance.now();
  #attempts = 0;
  #retry = 0;
  #hiding = 0;

  constructor({ onReport, onState, position }) {
    this.onReport = onReport;
    this.onState = onState;
    this.position = position;
    setInterval(() => this.#watch(), 1000);
    document.addEventListener("visibilitychange", () => this.#visibility());
  }

  /** Begins to listen, and goes on for as long as the page is there. */
  dial() {
    this.#hangUp();
    const query = new URLSearchParams(this.position());
    const source = new EventSource(`api/stream?${query}`);
    this.#source = source;
    this.#heard = performance.now();
    source.onmessage = (event) => {
      if (this.#source !== source) return;
      this.#heard = performance.now();
      this.#attempts = 0;
      this.onReport(JSON.parse(event.data));
      this.#become("live");
    };
    source.onerror = () => {
      if (this.#source === source) this.#lost();
    };
  }

  #hangUp() {
    clearTimeout(this.#retry);
    this.#source?.close();
    this.#source = null;
  }

  #lost() {
    this.#hangUp();
    if (this.state === "live" || this.state === "connecting") this.#become("away");
    const pause = RETRY_MS[Math.min(this.#attempts, RETRY_MS.length - 1)];
    this.#attempts += 1;
    this.#retry = setTimeout(() => this.dial(), pause);
    this.#askWhy();
  }

  /** An EventSource does not say why it failed; an answer to a plain request does. */
  async #askWhy() {
    try {
      const answer = await fetch("api/report?since=9007199254740991", { cache: "no-store" });
      await answer.body?.cancel();
      if (this.state === "live") return;
      if (answer.status === 401 || answer.status === 403) this.#become("refused");
      else if (answer.ok && this.#attempts > 1) this.#become("full");
    } catch {
      if (this.state !== "live" && this.state !== "paused") this.#become("away");
    }
  }

  #watch() {
    if (this.#source !== null && performance.now() - this.#heard > SILENCE_MS) this.#lost();
  }

  #visibility() {
    clearTimeout(this.#hiding);
    if (document.hidden) {
      this.#hiding = setTimeout(() => {
        this.#hangUp();
        this.#become("paused");
      }, HIDDEN_MS);
    } else if (this.state === "paused") {
      this.#become("connecting");
      this.dial();
    }
  }

  #become(state) {
    if (this.state === state) return;
    this.state = state;
    this.since = performance.now();
    this.onState(state);
  }
}
