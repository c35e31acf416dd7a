// One series over the last five minutes, with what happened meanwhile.

import { colour, prepare, setAttribute } from "./elements.js";
import { shortTime, tidy } from "./format.js";
import { HISTORY_S } from "./state.js";

const LEFT = 66;
const RIGHT = 4;
const TOP = 8;
const BOTTOM = 18;
const MARKS = { lost: "--bad", booted: "--ink-3" };

/** The smallest round number that is not below the value. */
function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 7.5, 10].find((step) => step * power >= value * 0.999) * power;
}

export class Chart {
  #pointer = null;
  #last = null;

  constructor(canvas, { value, text, series, name, frames, now }) {
    Object.assign(this, { canvas, value, text, series, name, frames, now });
    canvas.addEventListener("pointermove", (event) => this.#point(event.offsetX));
    canvas.addEventListener("pointerleave", () => this.#point(null));
    new ResizeObserver(() => this.redraw()).observe(canvas);
  }

  update(history, happenings, at) {
    this.#last = { history, happenings, at };
    this.redraw();
    const latest = history.length > 0 ? history[history.length - 1] : null;
    this.now.textContent = latest === null ? "" : this.text(this.value(latest));
    const most = history.reduce((found, sample) => Math.max(found, this.value(sample)), 0);
    const words = latest === null ? "nothing yet" : `now ${this.text(this.value(latest))}, at most ${this.text(most)}`;
    setAttribute(this.canvas, "aria-label", `${this.name} over the last five minutes: ${words}`);
  }

  redraw() {
    this.frames.ask(`chart of ${this.name}`, () => this.#draw());
  }

  #point(x) {
    this.#pointer = x;
    this.redraw();
  }

  #draw() {
    if (this.#last === null || this.canvas.clientWidth === 0) return;
    const { history, happenings, at } = this.#last;
    const { context, width, height } = prepare(this.canvas);
    const [ink, line, series] = [colour("--ink-3"), colour("--line"), colour(this.series)];
    const font = getComputedStyle(document.body).fontFamily;
    const bottom = height - BOTTOM;
    const most = roundUp(history.reduce((found, sample) => Math.max(found, this.value(sample)), 0));
    const toX = (time) => width - RIGHT - ((at - time) / HISTORY_S) * (width - LEFT - RIGHT);
    const toY = (value) => bottom - (value / most) * (bottom - TOP);

    context.font = `450 11px ${font}`;
    context.strokeStyle = line;
    context.lineWidth = 1;
    context.beginPath();
    for (const part of [0, 0.5, 1]) {
      const y = Math.round(toY(most * part)) + 0.5;
      context.moveTo(LEFT, y);
      context.lineTo(width, y);
    }
    context.stroke();

    drawSeries(context, history, (sample) => toX(sample.at), (sample) => toY(this.value(sample)), bottom, series);
    this.#drawMarks(context, happenings, at, toX, bottom);

    context.fillStyle = ink;
    context.textBaseline = "alphabetic";
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const part of history.length > 0 ? [0, 0.5, 1] : []) context.fillText(tidy(this.text(most * part)), LEFT - 8, toY(most * part));
    context.textBaseline = "alphabetic";
    context.textAlign = "left";
    context.fillText("−5 min", LEFT, height - 3);
    context.textAlign = "center";
    context.fillText("−2.5", (LEFT + width - RIGHT) / 2, height - 3);
    context.textAlign = "right";
    context.fillText("now", width, height - 3);
    if (this.#pointer !== null && history.length > 0) this.#drawPointer(context, history, toX, toY, bottom, width, series);
  }

  #drawMarks(context, happenings, at, toX, bottom) {
    for (const [kind, name] of Object.entries(MARKS)) {
      const marks = happenings.filter((happening) => happening.kind === kind && happening.at > at - HISTORY_S);
      if (marks.length === 0) continue;
      context.strokeStyle = context.fillStyle = colour(name);
      context.lineWidth = 1;
      context.setLineDash(kind === "lost" ? [] : [2, 3]);
      context.beginPath();
      for (const mark of marks) {
        const x = Math.round(toX(mark.at)) + 0.5;
        context.moveTo(x, TOP);
        context.lineTo(x, bottom);
      }
      context.stroke();
      context.setLineDash([]);
      if (kind !== "lost") continue;
      context.beginPath();
      for (const mark of marks) {
        const x = toX(mark.at) + 0.5;
        context.moveTo(x - 4, TOP - 6);
        context.lineTo(x + 4, TOP - 6);
        context.lineTo(x, TOP);
      }
      context.fill();
    }
  }

  #drawPointer(context, history, toX, toY, bottom, width, series) {
    let nearest = history[0];
    for (const sample of history) if (Math.abs(toX(sample.at) - this.#pointer) < Math.abs(toX(nearest.at) - this.#pointer)) nearest = sample;
    const [x, y] = [toX(nearest.at), toY(this.value(nearest))];
    context.strokeStyle = colour("--line-strong");
    context.beginPath();
    context.moveTo(x, TOP);
    context.lineTo(x, bottom);
    context.stroke();
    context.fillStyle = series;
    context.beginPath();
    context.arc(x, y, 3.5, 0, 2 * Math.PI);
    context.fill();
    const text = `${this.text(this.value(nearest))} at ${shortTime(nearest.at)}`;
    context.fillStyle = colour("--ink");
    context.textAlign = x > width / 2 ? "right" : "left";
    label(context, text, x > width / 2 ? x - 8 : x + 8, TOP + 10);
  }
}

/** The series as a line with a tinted ground, broken where nothing was told. */
function drawSeries(context, history, toX, toY, bottom, series) {
  if (history.length < 2) return;
  const gaps = [];
  for (let index = 1; index < history.length; index += 1) gaps.push(history[index].at - history[index - 1].at);
  const usual = gaps.slice().sort((a, b) => a - b)[Math.floor(gaps.length / 2)];
  const pieces = [[history[0]]];
  for (let index = 1; index < history.length; index += 1) {
    if (gaps[index - 1] > Math.max(3.5 * usual, 3)) pieces.push([]);
    pieces[pieces.length - 1].push(history[index]);
  }
  for (const piece of pieces) {
    context.beginPath();
    piece.forEach((sample, index) => (index === 0 ? context.moveTo(toX(sample), toY(sample)) : context.lineTo(toX(sample), toY(sample))));
    context.strokeStyle = series;
    context.lineWidth = 1.75;
    context.lineJoin = "round";
    context.stroke();
    context.lineTo(toX(piece[piece.length - 1]), bottom);
    context.lineTo(toX(piece[0]), bottom);
    context.globalAlpha = 0.12;
    context.fillStyle = series;
    context.fill();
    context.globalAlpha = 1;
  }
}

/** Text with a rim, so that it can be read across a line. */
function label(context, text, x, y) {
  context.strokeStyle = colour("--surface");
  context.lineWidth = 3;
  context.lineJoin = "round";
  context.strokeText(text, x, y);
  context.fillText(text, x, y);
}
