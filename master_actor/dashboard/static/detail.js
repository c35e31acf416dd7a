// The chosen member, figure by figure.

import { edgeText } from "./classes.js";
import { byId, make, setText } from "./elements.js";
import { bytes, count, seconds } from "./format.js";

const ROWS = [
  ["Heard", (member) => `${seconds(member.silent_s)} ago`],
  ["From", (member, place, members) => neighbour(members, place - 1, place - 1)],
  ["To", (member, place, members) => neighbour(members, place + 1, place)],
  ["Operations", (member) => count(member.operations)],
  ["Bytes", (member) => bytes(member.bytes)],
  ["In flight", (member) => count(member.in_flight)],
  ["Aborts", (member) => count(member.aborts)],
  ["Retries", (member) => count(member.retries)],
  ["Failures", (member) => count(member.failures)],
  ["Kept for refs", (member) => bytes(member.store_bytes)],
];

/** The neighbour's rank, with the bandwidth of the edge that begins at `from`. */
function neighbour(members, place, from) {
  const total = members.length;
  if (total < 2) return "nobody";
  const at = (index) => members[(index + total) % total];
  return `${(place + total) % total}, ${edgeText(at(from), at(from + 1))}`;
}

export class Detail {
  #body = byId("detail-body");
  #member = null;
  #values = null;

  /** `step(by)` goes so many members on around the ring. */
  constructor(step) {
    this.step = step;
  }

  draw(group, peer) {
    const place = group.members.findIndex((member) => member.peer_id === peer);
    if (peer === "") {
      this.#values = null;
      this.#body.replaceChildren(make("p", "detail-none", "Choose one on the ring or in the list: its figures come here."));
      setText(byId("detail-title"), "Member");
      return;
    }
    if (this.#values === null) this.#build();
    if (place >= 0) this.#member = { ...group.members[place], place };
    const gone = place < 0;
    const member = this.#member;
    if (member === null || member.peer_id !== peer) return;
    setText(byId("detail-title"), gone ? `Was rank ${member.place}` : `Rank ${place}`);
    setText(this.#values.name, member.peer_id);
    setText(this.#values.where, `on ${member.host}`);
    this.#values.gone.hidden = !gone;
    this.#values.steps.hidden = gone;
    ROWS.forEach(([, tell], index) => {
      if (!gone) setText(this.#values.rows[index], tell(member, place, group.members));
    });
  }

  #build() {
    const name = make("p", "detail-name");
    const where = make("p", "detail-where");
    const gone = make("p", "detail-gone", "Not in the ring any more");
    const list = make("dl");
    const rows = ROWS.map(([label]) => {
      const value = make("dd");
      list.append(make("dt", "", label), value);
      return value;
    });
    const steps = make("div", "detail-steps");
    for (const [label, by] of [["← Previous", -1], ["Next →", 1]]) {
      const button = make("button", "", label);
      button.type = "button";
      button.addEventListener("click", () => this.step(by));
      steps.append(button);
    }
    this.#values = { name, where, gone, rows, steps };
    this.#body.replaceChildren(name, where, gone, list, steps);
  }
}
