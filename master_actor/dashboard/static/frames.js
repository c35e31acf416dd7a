// Work for the next frames: what was asked for twice is done once, and no frame is given more than it can take.

const BUDGET_MS = 6;

export class Frames {
  #jobs = new Map();
  #asked = false;

  /** Has the job done in one of the next frames; a later one of this name takes its place. True: a frame is full with it. */
  ask(name, job) {
    this.#jobs.delete(name);
    this.#jobs.set(name, job);
    this.#next();
  }

  #next() {
    if (this.#asked || this.#jobs.size === 0) return;
    this.#asked = true;
    requestAnimationFrame(() => this.#run());
  }

  #run() {
    this.#asked = false;
    const began = performance.now();
    for (const [name, job] of this.#jobs) {
      this.#jobs.delete(name);
      let enough = false;
      try {
        enough = job() === true;
      } catch (error) {
        console.error(`drawing ${name} failed`, error); // the other panels go on
      }
      if (enough || performance.now() - began > BUDGET_MS) break;
    }
    this.#next();
  }
}
