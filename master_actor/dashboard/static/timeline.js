// The timeline: what happened, newest first, as long as the page is open, whatever becomes of the master meanwhile.

import { byId, make, setAttribute, setText } from "./elements.js";
import { count, milliseconds, plural, time } from "./format.js";

const SHOWN = 60;
const NAMED = 40;
const TOGETHER_S = 2;
const TOGETHER_FROM = 4;

const KINDS = {
  booted: { filter: "Master", title: "Master booted", many: "", tone: "accent", mark: "power" },
  returned: { filter: "Master", title: "Group returned", many: "", tone: "good", mark: "check" },
  waiting: { filter: "Joins", title: "Peer waits", many: "peers wait", tone: "", mark: "dot" },
  withdrawn: { filter: "Joins", title: "Peer withdrew", many: "peers withdrew", tone: "warn", mark: "minus" },
  joined: { filter: "Joins", title: "Peer joined", many: "peers joined", tone: "good", mark: "plus" },
  lost: { filter: "Deaths", title: "Peer lost", many: "peers lost", tone: "bad", mark: "cross" },
  left: { filter: "Deaths", title: "Peer left", many: "peers left", tone: "warn", mark: "minus" },
  emptied: { filter: "Deaths", title: "Group is empty", many: "", tone: "warn", mark: "dot" },
  epoch: { filter: "Epochs", title: "Epoch", many: "", tone: "accent", mark: "ring" },
  closed: { filter: "Epochs", title: "Group closed", many: "", tone: "warn", mark: "minus" },
  recovered: { filter: "Recoveries", title: "Recovered", many: "", tone: "good", mark: "check" },
};
const PLAIN = { filter: "Epochs", title: "", many: "", tone: "", mark: "dot" };
const FILTERS = ["Joins", "Deaths", "Epochs", "Recoveries", "Master"];
const MARKS = {
  power: "M8.5 2.5v5.5 M5 4.6a5.4 5.4 0 1 0 7 0",
  check: "M3.4 9l3.4 3.4l6.8-7.4",
  dot: "M8.5 5.6a2.9 2.9 0 1 0 .01 0z",
  minus: "M3.6 8.5h9.8",
  plus: "M8.5 3.6v9.8 M3.6 8.5h9.8",
  cross: "M4.4 4.4l8.2 8.2 M12.6 4.4l-8.2 8.2",
  ring: "M8.5 3.2a5.3 5.3 0 1 0 .01 0z",
};
const SVG = "http://www.w3.org/2000/svg";

export class Timeline {
  #list = byId("timeline");
  #older = byId("older");
  #on = new Set(FILTERS);
  #everywhere = false;
  #most = SHOWN;
  #entries = [];
  #buttons = new Map();
  #state = null;
  #group = "";

  constructor(frames) {
    this.frames = frames;
    for (const name of FILTERS) this.#button(name, () => this.#toggle(name));
    this.#button("All groups", () => {
      this.#everywhere = !this.#everywhere;
      this.#again();
    });
    this.#older.addEventListener("click", () => {
      this.#most += SHOWN;
      this.#draw();
    });
  }

  /** Shows a group, from the beginning. */
  show(state, group) {
    this.#state = state;
    this.#group = group;
    this.#again();
  }

  /** Takes in what is new. */
  add(news) {
    let changed = false;
    for (const happening of news) if (this.#isShown(happening)) changed = this.#append(happening) || changed;
    if (changed) this.frames.ask("timeline", () => this.#draw());
    else this.frames.ask("timeline counts", () => this.#drawButtons());
  }

  #button(name, press) {
    const button = make("button", "", name);
    button.type = "button";
    button.addEventListener("click", press);
    byId("filters").append(button);
    this.#buttons.set(name, button);
  }

  #toggle(name) {
    if (!this.#on.delete(name)) this.#on.add(name);
    this.#again();
  }

  #again() {
    this.#entries = [];
    this.#most = SHOWN;
    for (const happening of this.#state?.happenings ?? []) if (this.#isShown(happening)) this.#append(happening);
    this.#list.replaceChildren();
    this.frames.ask("timeline", () => this.#draw());
  }

  #isOfGroup(happening) {
    return this.#everywhere || happening.group === "" || happening.group === this.#group;
  }

  #isShown(happening) {
    return this.#isOfGroup(happening) && this.#on.has((KINDS[happening.kind] ?? PLAIN).filter);
  }

  /** Adds a happening to the entries: many of a kind at once are one entry. */
  #append(happening) {
    const last = this.#entries[this.#entries.length - 1];
    const kind = KINDS[happening.kind] ?? PLAIN;
    const alike = last !== undefined && kind.many !== "" && last.kind === happening.kind && last.group === happening.group && happening.at - last.at < TOGETHER_S;
    if (alike) {
      last.happenings.push(happening);
      last.dirty = true;
    } else {
      this.#entries.push({ kind: happening.kind, group: happening.group, at: happening.at, happenings: [happening], element: null, dirty: true });
    }
    return true;
  }

  #draw() {
    // What is seen is the end of the entries; an entry of up to three happenings is as many lines.
    const from = Math.max(0, this.#entries.length - this.#most);
    const wanted = this.#entries.slice(from).reverse();
    for (const entry of wanted) {
      if (entry.dirty || entry.element === null) {
        entry.element?.forEach((line) => line.remove());
        entry.element = linesOf(entry, this.#everywhere);
        entry.dirty = false;
      }
    }
    let at = this.#list.firstChild;
    for (const line of wanted.flatMap((entry) => entry.element)) {
      if (line === at) at = at.nextSibling;
      else this.#list.insertBefore(line, at);
    }
    while (at !== null) {
      const next = at.nextSibling;
      at.remove();
      at = next;
    }
    this.#older.hidden = from === 0;
    if (this.#list.childElementCount === 0) {
      const text = this.#on.size < FILTERS.length ? "Nothing of the kinds that are chosen." : "Nothing has happened yet.";
      this.#list.append(make("li", "flight-none", text));
    }
    this.#drawButtons();
  }

  #drawButtons() {
    const counts = new Map();
    for (const happening of this.#state?.happenings ?? []) {
      const { filter } = KINDS[happening.kind] ?? PLAIN;
      if (this.#isOfGroup(happening)) counts.set(filter, (counts.get(filter) ?? 0) + 1);
    }
    for (const [name, button] of this.#buttons) {
      const all = name === "All groups";
      setAttribute(button, "aria-pressed", all ? this.#everywhere : this.#on.has(name));
      setText(button, all ? name : `${name} ${count(counts.get(name) ?? 0)}`);
    }
    setText(byId("timeline-hint"), "Newest first");
  }
}

function linesOf(entry, everywhere) {
  if (entry.happenings.length < TOGETHER_FROM) return entry.happenings.map((happening) => lineOf(happening, everywhere)).reverse();
  return [gathered(entry, everywhere)];
}

function frame(kind, title, happening) {
  const { tone, mark } = KINDS[kind] ?? PLAIN;
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 17 17");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", MARKS[mark]);
  svg.append(path);
  const line = make("div", "event-line", make("span", "event-title", title));
  if (happening.took_ms !== null && happening.took_ms !== undefined) line.append(make("span", "event-took", milliseconds(happening.took_ms)));
  const stamp = make("time", "event-time", time(happening.at));
  stamp.dateTime = new Date(happening.at * 1000).toISOString();
  line.append(stamp);
  const body = make("div", "", line);
  const element = make("li", "event", make("span", "event-mark", svg), body);
  element.dataset.tone = tone;
  element.dataset.kind = kind;
  return { element, body };
}

function lineOf(happening, everywhere) {
  const kind = KINDS[happening.kind] ?? PLAIN;
  const title = happening.kind === "epoch" ? `Epoch ${count(happening.epoch)}` : kind.title || happening.kind;
  const { element, body } = frame(happening.kind, title, happening);
  const text = make("p", "event-text");
  const parts = [];
  if (happening.peer_id !== null) parts.push(make("code", "", happening.peer_id));
  if (happening.reason !== "") parts.push(happening.reason);
  if (happening.kind === "recovered") parts.push(`epoch ${count(happening.epoch)}, ${plural(happening.members, "member")} left`);
  else if (happening.kind === "epoch") parts.push(plural(happening.members, "member"));
  if (everywhere && happening.group !== "") parts.push(`in ${happening.group}`);
  parts.forEach((part, index) => text.append(...(index > 0 ? [" · ", part] : [part])));
  if (parts.length > 0) body.append(text);
  return element;
}

function gathered(entry, everywhere) {
  const [first] = entry.happenings;
  const { element, body } = frame(entry.kind, `${count(entry.happenings.length)} ${KINDS[entry.kind].many}`, first);
  const reason = first.reason === "" ? "" : ` · ${first.reason}`;
  const where = everywhere && entry.group !== "" ? ` · in ${entry.group}` : "";
  const summary = make("summary", "", `who${reason}${where}`);
  const names = entry.happenings.slice(0, NAMED).map((happening) => happening.peer_id);
  if (entry.happenings.length > NAMED) names.push(`and ${count(entry.happenings.length - NAMED)} more`);
  body.append(make("details", "", summary, make("p", "", names.join(" "))));
  return element;
}
