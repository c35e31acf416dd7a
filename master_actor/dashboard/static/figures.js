// The strip of figures.

import { byId, make, setAttribute, setText } from "./elements.js";
import { byteParts, count, digits, seconds, shortTime } from "./format.js";
import { hostsOf } from "./state.js";

const PHASES = {
  empty: "Nobody is a member, nobody waits.",
  forming: "Peers gather; fewer than the minimum.",
  "last call": "The minimum is there; waiting a moment for one more.",
  steady: "An epoch is live.",
  asking: "A round is under way: members freeze and answer.",
  returning: "The master restarted; the members come back to it.",
  leased: "Every member is gone, but one may still run where the master can't see it.",
};
const NAMES = ["Phase", "Epoch", "Members", "Hosts", "Bottleneck", "Bytes", "Operations", "Recoveries", "Master"];

export class Figures {
  #shown = new Map();

  constructor() {
    for (const name of NAMES) {
      const value = make("dd");
      const text = make("span");
      const unit = make("small");
      value.append(text, unit);
      const figure = make("div", "figure", make("dt", "", name), value);
      figure.dataset.figure = name.toLowerCase();
      byId("figures").append(figure);
      this.#shown.set(name, { figure, text, unit });
    }
  }

  #set(name, text, unit = "", { tone = "", title = "" } = {}) {
    const shown = this.#shown.get(name);
    setText(shown.text, text);
    setText(shown.unit, unit);
    setAttribute(shown.figure, "data-tone", tone);
    setAttribute(shown.figure, "title", title);
  }

  draw(report, group, history) {
    const last = history.length > 0 ? history[history.length - 1] : null;
    const fresh = last !== null && report.at - last.at < 15 ? last : null;
    const most = group.max_world_size === null ? "" : ` of ${count(group.max_world_size)}`;
    const waiting = group.waiting.length > 0 ? `${most} + ${count(group.waiting.length)} waiting` : most;
    this.#set("Phase", group.phase, group.closed ? "closed" : "", {
      tone: group.phase === "steady" ? "good" : group.phase === "empty" ? "" : "warn",
      title: PHASES[group.phase] ?? "",
    });
    this.#set("Epoch", count(group.epoch));
    const few = group.members.length > 0 && group.members.length < group.min_world_size;
    this.#set("Members", count(group.members.length), few ? `below ${count(group.min_world_size)}${waiting}` : waiting, {
      tone: few ? "warn" : "",
      title: few ? `Fewer than the minimum of ${group.min_world_size}: operations wait for newcomers` : `At least ${group.min_world_size}`,
    });
    this.#set("Hosts", count(hostsOf(group.members)));
    if (group.bottleneck === null) {
      this.#set("Bottleneck", "–", "", { title: "optimize_topology() measures the edges between hosts" });
    } else {
      const [value, unit] = byteParts(group.bottleneck);
      const age = group.age_s === null ? "" : `measured ${seconds(group.age_s)} ago`;
      this.#set("Bottleneck", value, `${unit}/s`, { title: `The slowest edge of the ring between hosts. ${age}` });
    }
    const [value, unit] = fresh === null ? ["–", ""] : byteParts(fresh.bytes_per_s);
    this.#set("Bytes", value, unit && `${unit}/s`, { title: "Bytes of tensors that come out of collectives, all members" });
    this.#set("Operations", fresh === null ? "–" : digits(fresh.operations_per_s), fresh === null ? "" : "/s", {
      title: "Collectives that commit",
    });
    const evictions = group.evictions > 0 ? `${count(group.evictions)} evicted` : "";
    this.#set("Recoveries", count(group.recoveries), evictions, { title: "Since this master booted" });
    this.#set("Master", `boot ${report.boot}`, "", { title: `up since ${shortTime(report.booted_at)}` });
  }
}
