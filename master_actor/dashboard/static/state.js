// What the page knows: reports folded into one picture, that outlives a restart of the master. No element is touched here.

export const HISTORY_S = 300;
const MOST_HAPPENINGS = 5000;

export class State {
  report = null;
  /** Every happening that was ever told to this page, oldest first. */
  happenings = [];
  #histories = new Map();
  #life = "";
  #last = 0;

  /** Takes a report in, and returns the happenings that are new. */
  take(report) {
    const life = `${report.master_id}.${report.boot}`;
    if (this.#life !== life) {
      // Another master, or another life of it: it numbers its happenings from one, and begins with its boot.
      this.#life = life;
      this.#last = 0;
    }
    const news = report.happenings.filter((happening) => happening.number > this.#last);
    if (news.length > 0) this.#last = news[news.length - 1].number;
    this.happenings.push(...news);
    if (this.happenings.length > MOST_HAPPENINGS) this.happenings.splice(0, this.happenings.length - MOST_HAPPENINGS);
    for (const group of report.groups) this.#remember(group, report.at);
    this.report = report;
    return news;
  }

  #remember(group, now) {
    const history = this.#histories.get(group.name) ?? [];
    const last = history.length > 0 ? history[history.length - 1].at : -Infinity;
    for (const sample of group.history) if (sample.at > last) history.push(sample);
    const old = history.findIndex((sample) => sample.at > now - HISTORY_S);
    if (old > 0) history.splice(0, old);
    this.#histories.set(group.name, history);
  }

  /** Where a stream has to go on. */
  position() {
    return { since: this.#last, life: this.#life };
  }

  group(name) {
    return this.report?.groups.find((group) => group.name === name) ?? null;
  }

  /** The samples of the last five minutes, oldest first. */
  history(name) {
    return this.#histories.get(name) ?? [];
  }
}

/** How many hosts the members are on. */
export const hostsOf = (members) => new Set(members.map((member) => member.host)).size;

/** Which member has the slowest edge that is known; -1 if none is. */
export function slowestEdge(members) {
  let found = -1;
  members.forEach((member, place) => {
    if (member.rate_to_next !== null && (found < 0 || member.rate_to_next < members[found].rate_to_next)) found = place;
  });
  return found;
}
