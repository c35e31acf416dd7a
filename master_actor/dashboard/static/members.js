// The list of members: only the rows that are seen exist, so a thousand members cost as much as twenty.

import { edgeText } from "./classes.js";
import { byId, make, setAttribute, setText } from "./elements.js";
import { bytes, count, plural, seconds, shorten } from "./format.js";
import { LATE_S } from "./ring_drawing.js";

const COLUMNS = [
  { name: "Rank", of: (row) => row.place, text: (row) => count(row.place), kind: "" },
  { name: "Peer", of: (row) => row.member.peer_id, text: (row, letters) => shorten(row.member.peer_id, letters), title: (row) => row.member.peer_id, kind: "peer" },
  { name: "Host", of: (row) => row.member.host, text: (row, letters) => shorten(row.member.host, letters), title: (row) => row.member.host, kind: "" },
  { name: "To next", of: (row) => row.member.rate_to_next ?? Infinity, text: (row) => row.edge, kind: "rate-cell" },
  { name: "Operations", of: (row) => row.member.operations, text: (row) => count(row.member.operations), kind: "number wide" },
  { name: "Bytes", of: (row) => row.member.bytes, text: (row) => bytes(row.member.bytes), kind: "number wide" },
  { name: "Silent for", of: (row) => row.member.silent_s, text: (row) => seconds(row.member.silent_s), kind: "number wide" },
  { name: "Aborts", of: (row) => row.member.aborts, text: (row) => count(row.member.aborts), kind: "number wide" },
  { name: "Retries", of: (row) => row.member.retries, text: (row) => count(row.member.retries), kind: "number wide" },
];
const SILENT = COLUMNS.findIndex((column) => column.name === "Silent for");
const LETTER_WIDTH = 8;
const PAGE = 8;
const SPARE = 4;

export class Members {
  #view = make("div", "grid-view");
  #rows = make("div", "grid-rows");
  #headers = [];
  #pool = [];
  #all = [];
  #shown = [];
  #active = 0;
  #height = 32;
  #letters = COLUMNS.map(() => 20);
  #sort = { column: 0, down: false };
  #wanted = "";
  #classes = null;

  constructor(frames, choose) {
    this.frames = frames;
    this.choose = choose;
    this.selected = "";
    const head = make("div", "grid-row grid-head");
    setAttribute(head, "role", "row");
    COLUMNS.forEach((column, index) => {
      const button = make("button", "", column.name);
      button.type = "button";
      button.addEventListener("click", () => this.#sortBy(index));
      const cell = make("div", column.kind.replace("rate-cell", "").replace("peer", ""), button);
      setAttribute(cell, "role", "columnheader");
      this.#headers.push(cell);
      head.append(cell);
    });
    setAttribute(this.#rows, "role", "rowgroup");
    this.#view.tabIndex = 0;
    setAttribute(this.#view, "aria-label", "Members: arrow keys go through them, Enter chooses");
    setAttribute(this.#view, "role", "presentation");
    this.#view.append(this.#rows);
    byId("members").append(head, this.#view);
    this.#view.addEventListener("scroll", () => this.frames.ask("members", () => this.#draw()), { passive: true });
    this.#view.addEventListener("keydown", (event) => this.#key(event));
    this.#view.addEventListener("focus", () => this.frames.ask("members", () => this.#draw()));
    byId("find").addEventListener("input", (event) => {
      this.#wanted = event.target.value.trim().toLowerCase();
      this.#active = 0;
      this.#view.scrollTop = 0;
      this.#arrange();
    });
    new ResizeObserver(() => this.frames.ask("members", () => this.#draw())).observe(this.#view);
  }

  update(group, classes) {
    const { members } = group;
    this.#classes = classes;
    this.#all = members.map((member, place) => {
      const next = members[(place + 1) % members.length];
      return { member, place, edge: edgeText(member, next), class: classes.of(member, next) };
    });
    this.#arrange();
  }

  select(peer, { show = true } = {}) {
    this.selected = peer;
    const index = this.#shown.findIndex((row) => row.member.peer_id === peer);
    if (index >= 0) {
      this.#active = index;
      if (show) this.#reveal(index);
    }
    this.frames.ask("members", () => this.#draw());
  }

  #sortBy(column) {
    this.#sort = { column, down: this.#sort.column === column ? !this.#sort.down : column > 3 };
    this.#arrange();
  }

  #arrange() {
    const { column, down } = this.#sort;
    const { of } = COLUMNS[column];
    const wanted = this.#wanted;
    const found = wanted === "" ? this.#all.slice() : this.#all.filter(({ member }) => member.peer_id.toLowerCase().includes(wanted) || member.host.toLowerCase().includes(wanted));
    if (column !== 0 || down) {
      const sign = down ? -1 : 1;
      found.sort((one, other) => {
        const [a, b] = [of(one), of(other)];
        return a < b ? -sign : a > b ? sign : one.place - other.place;
      });
    }
    this.#shown = found;
    this.#active = Math.max(0, Math.min(this.#active, found.length - 1));
    this.frames.ask("members", () => this.#draw());
  }

  #draw() {
    const total = this.#shown.length;
    this.#headers.forEach((cell, index) => {
      const sorted = index === this.#sort.column ? (this.#sort.down ? "descending" : "ascending") : "none";
      setAttribute(cell, "aria-sort", sorted);
    });
    setText(byId("members-hint"), this.#wanted === "" ? "In the order of the ring" : `${plural(total, "member")} found`);
    setAttribute(byId("members"), "aria-rowcount", total + 1);
    if (this.#pool.length > 0 && this.#pool[0].element.offsetHeight > 0) {
      this.#height = this.#pool[0].element.offsetHeight;
      // Names are cut in their middle, since their ends tell them apart.
      this.#letters = this.#pool[0].cells.map(({ cell }) => Math.max(5, Math.floor(cell.clientWidth / LETTER_WIDTH)));
    }
    const tall = `${Math.max(this.#height, total * this.#height)}px`;
    if (this.#rows.style.height !== tall) this.#rows.style.height = tall;
    const first = Math.max(0, Math.floor(this.#view.scrollTop / this.#height) - SPARE);
    const room = Math.ceil(this.#view.clientHeight / this.#height) + 2 * SPARE;
    const last = Math.min(total, first + room);
    while (this.#pool.length < last - first) this.#pool.push(this.#newRow());
    this.#pool.forEach((line, index) => {
      const at = first + index;
      line.element.hidden = at >= last;
      if (at < last) this.#fill(line, this.#shown[at], at);
    });
    const active = this.#pool.find((line) => !line.element.hidden && line.at === this.#active);
    setAttribute(this.#view, "aria-activedescendant", active === undefined ? "" : active.element.id);
  }

  #newRow() {
    const element = make("div", "grid-row");
    element.id = `member-${this.#pool.length}`;
    setAttribute(element, "role", "row");
    const line = { element, at: -1, cells: [] };
    COLUMNS.forEach((column) => {
      const text = make("span");
      const cell = make("div", column.kind);
      if (column.kind === "rate-cell") cell.append(make("i"));
      cell.append(text);
      setAttribute(cell, "role", "gridcell");
      line.cells.push({ cell, text });
      element.append(cell);
    });
    element.addEventListener("click", () => {
      this.#active = line.at;
      this.choose(this.#shown[line.at].member.peer_id);
    });
    this.#rows.append(element);
    return line;
  }

  #fill(line, row, at) {
    if (line.at !== at) {
      line.at = at;
      setAttribute(line.element, "aria-rowindex", at + 2);
    }
    const where = `translateY(${at * this.#height}px)`;
    if (line.element.style.transform !== where) line.element.style.transform = where;
    setAttribute(line.element, "aria-selected", row.member.peer_id === this.selected);
    line.element.classList.toggle("active", at === this.#active);
    COLUMNS.forEach((column, index) => {
      setText(line.cells[index].text, column.text(row, this.#letters[index]));
      if (column.title !== undefined) setAttribute(line.cells[index].cell, "title", column.title(row));
    });
    const edge = line.cells[3].cell;
    setAttribute(edge.firstChild, "data-class", row.class);
    edge.classList.toggle("quiet", typeof row.class === "string");
    line.cells[SILENT].cell.classList.toggle("late", row.member.silent_s > LATE_S);
  }

  #reveal(index) {
    const top = index * this.#height;
    const { scrollTop, clientHeight } = this.#view;
    if (top < scrollTop) this.#view.scrollTop = top;
    else if (top + this.#height > scrollTop + clientHeight) this.#view.scrollTop = top + this.#height - clientHeight;
  }

  #key(event) {
    const total = this.#shown.length;
    const leaps = { ArrowDown: 1, ArrowUp: -1, PageDown: PAGE, PageUp: -PAGE, Home: -total, End: total };
    if (total === 0) return;
    if (event.key in leaps) {
      this.#active = Math.max(0, Math.min(total - 1, this.#active + leaps[event.key]));
      this.#reveal(this.#active);
      this.frames.ask("members", () => this.#draw());
    } else if (event.key === "Enter" || event.key === " ") {
      this.choose(this.#shown[this.#active].member.peer_id);
    } else {
      return;
    }
    event.preventDefault();
  }
}
