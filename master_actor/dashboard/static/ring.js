// The panel of the ring: the canvas, its legend, and who is pointed at or chosen.

import { Classes, edgeText } from "./classes.js";
import { byId, colour, make, prepare, setAttribute, setText } from "./elements.js";
import { seconds, shorten } from "./format.js";
import { drawRing, measure, palette } from "./ring_drawing.js";
import { RingLayout } from "./ring_layout.js";
import { slowestEdge } from "./state.js";

const LEAPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, PageDown: 10, PageUp: -10 };

export class Ring {
  #canvas = byId("ring");
  #tooltip = byId("ring-tooltip");
  #layout = new RingLayout([]);
  #classes = new Classes([]);
  #size = null;
  #colours = null;
  #font = "sans-serif";
  #pointed = -1;
  #legend = "";
  #drawn = "";

  /** `choose(peer_id)` is called when somebody chooses a member; `frames` does the drawing. */
  constructor(frames, choose) {
    this.frames = frames;
    this.choose = choose;
    this.selected = "";
    new ResizeObserver(() => this.redraw()).observe(byId("ring-stage"));
    this.#canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.#canvas.addEventListener("pointerleave", () => this.#pointAt(-1));
    this.#canvas.addEventListener("click", (event) => {
      this.#point(event);
      if (this.#pointed >= 0) this.choose(this.#layout.members[this.#pointed].peer_id);
    });
    this.#canvas.addEventListener("keydown", (event) => this.#key(event));
    this.#canvas.addEventListener("blur", () => this.#pointAt(-1));
    this.#canvas.addEventListener("focus", () => {
      if (this.#place() < 0 && this.#layout.members.length > 0) this.choose(this.#layout.members[0].peer_id);
    });
  }

  get classes() {
    return this.#classes;
  }

  /** The colours have changed. */
  recolour() {
    this.#colours = null;
    this.redraw();
  }

  update(group) {
    this.#layout = new RingLayout(group.members);
    this.#classes = new Classes(group.members);
    if (this.#pointed >= group.members.length) this.#pointed = -1;
    this.#drawLegend();
    // What is drawn follows from little: a ring that stays as it is is left alone.
    const looks = group.members.map((member) => `${member.peer_id} ${member.host} ${member.rate_to_next} ${member.silent_s > 1}`).join();
    if (looks !== this.#drawn) {
      this.#drawn = looks;
      this.redraw();
    }
    this.#describe();
  }

  select(peer) {
    if (this.selected === peer) return;
    this.selected = peer;
    this.redraw();
    this.#describe();
  }

  redraw() {
    this.frames.ask("ring", () => this.#draw());
  }

  #place() {
    return this.#layout.members.findIndex((member) => member.peer_id === this.selected);
  }

  #draw() {
    if (this.#canvas.clientWidth === 0) return;
    if (this.#colours === null) {
      this.#colours = palette(colour);
      this.#font = getComputedStyle(document.body).fontFamily;
    }
    const { context, width, height } = prepare(this.#canvas);
    this.#size = measure(this.#layout, width, height);
    drawRing(context, this.#size, this.#layout, this.#classes, {
      selected: this.#place(),
      pointed: this.#pointed,
      slowest: slowestEdge(this.#layout.members),
      colours: this.#colours,
      font: this.#font,
    });
  }

  #drawLegend() {
    const lines = this.#classes.legend();
    const looks = JSON.stringify(lines);
    if (looks === this.#legend) return;
    this.#legend = looks;
    byId("legend").replaceChildren(
      ...lines.map(([found, text]) => {
        const sample = make("i");
        sample.dataset.class = found;
        return make("li", "", sample, text);
      }),
    );
    if (lines.length === 0) byId("legend").append(make("li", "", "nothing measured yet"));
  }

  /** What a screen reader tells of the chosen member. */
  #describe() {
    const { members } = this.#layout;
    const place = this.#place();
    setAttribute(this.#canvas, "aria-valuemax", Math.max(0, members.length - 1));
    setAttribute(this.#canvas, "aria-valuenow", Math.max(0, place));
    if (place < 0) {
      setAttribute(this.#canvas, "aria-valuetext", `${members.length} members, none chosen`);
      return;
    }
    const member = members[place];
    const next = members[(place + 1) % members.length];
    setAttribute(this.#canvas, "aria-valuetext", `rank ${place}, peer ${member.peer_id}, on ${member.host}, to the next: ${edgeText(member, next)}`);
  }

  #key(event) {
    const { members } = this.#layout;
    const total = members.length;
    if (total === 0) return;
    const place = Math.max(0, this.#place());
    let next = place;
    if (event.key in LEAPS) next = (place + LEAPS[event.key] + total * 10) % total;
    else if (event.key === "Home") next = 0;
    else if (event.key === "End") next = total - 1;
    else if (event.key === "Escape") return this.#pointAt(-1);
    else return;
    event.preventDefault();
    this.choose(members[next].peer_id);
    this.#pointAt(next);
  }

  #point(event) {
    if (this.#size === null) return;
    const box = this.#canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left - this.#size.x, event.clientY - box.top - this.#size.y];
    const away = Math.hypot(x, y) - this.#size.radius;
    const near = away > -32 && away < 36;
    this.#pointAt(near ? this.#layout.nearest(Math.atan2(y, x)) : -1);
  }

  #pointAt(place) {
    if (place === this.#pointed) return;
    this.#pointed = place;
    this.#canvas.classList.toggle("pointing", place >= 0);
    this.redraw();
    this.frames.ask("tooltip", () => this.#drawTooltip());
  }

  #drawTooltip() {
    const { members, angles } = this.#layout;
    const place = this.#pointed;
    if (place < 0 || place >= members.length || this.#size === null) {
      this.#tooltip.hidden = true;
      return;
    }
    const member = members[place];
    const nextPlace = (place + 1) % members.length;
    if (this.#tooltip.childElementCount === 0) this.#tooltip.append(make("strong"), make("span"), make("span"));
    const [name, where, edge] = this.#tooltip.children;
    setText(name, `${place} · ${shorten(member.peer_id, 24)}`);
    setText(where, `on ${shorten(member.host, 30)}, heard ${seconds(member.silent_s)} ago`);
    setText(edge, members.length > 1 ? `to ${nextPlace}: ${edgeText(member, members[nextPlace])}` : "alone");
    this.#tooltip.hidden = false;
    const stage = byId("ring-stage");
    const [width, height] = [this.#tooltip.offsetWidth, this.#tooltip.offsetHeight];
    const { x, y, radius } = this.#size;
    const [atX, atY] = [x + Math.cos(angles[place]) * (radius - 34), y + Math.sin(angles[place]) * (radius - 34)];
    const left = Math.max(0, Math.min(stage.clientWidth - width, atX - width / 2 - (Math.cos(angles[place]) * width) / 2));
    const top = Math.max(0, Math.min(stage.clientHeight - height, atY - height / 2 - (Math.sin(angles[place]) * height) / 2));
    this.#tooltip.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
  }
}
