// The ring on a canvas. Strokes of one colour are drawn as one path: a thousand members cost a dozen strokes.

import { count, plural, rate, shorten } from "./format.js";

const TURN = 2 * Math.PI;
const LABELS_UP_TO = 18;
const COMPACT = 380; // below this width the texts go inside of the ring, and are fewer
const RATES_UP_TO = 10;
const CENTRE = { wide: 72, tall: 24 };
const LETTER_WIDTH = 6.8;
const RATE_LETTERS = 9;
export const LATE_S = 1;

/** What it is drawn with, from the style sheet. */
export function palette(colour) {
  const names = ["surface", "ink", "ink-2", "ink-3", "accent", "warn", "host-a", "host-b", "same-host", "unknown", "line-strong"];
  const found = Object.fromEntries(names.map((name) => [name, colour(`--${name}`)]));
  found.rates = [0, 1, 2, 3, 4].map((number) => colour(`--rate-${number}`));
  return found;
}

/** Radii that fit: of the circle of members, and of a member. */
export function measure(layout, width, height) {
  const around = layout.kind === "band" ? 30 : 34;
  const compact = width < COMPACT;
  if (compact) return sized(layout, width, height, Math.max(40, Math.min(width, height) / 2 - 28), compact);
  let radius = Math.min(width, height) / 2 - around - 14;
  // A label needs its width beside the ring, less where it stands above or below.
  for (const [angle, letters] of labelsOf(layout)) {
    const lean = Math.abs(Math.cos(angle));
    const text = Math.min(letters * LETTER_WIDTH, width * 0.2) / (lean > 0.3 ? 1 : 2);
    radius = Math.min(radius, (width / 2 - text) / Math.max(lean, 0.01) - around);
  }
  return sized(layout, width, height, Math.max(40, radius), compact);
}

function sized(layout, width, height, radius, compact) {
  const node = layout.kind === "nodes" ? Math.max(6, Math.min(15, radius * layout.unit * 0.36)) : Math.max(2, Math.min(4.5, radius * layout.unit * 0.3));
  return { x: width / 2, y: height / 2, radius, node, compact };
}

/** [angle, letters] of each text that stands around the ring. */
function labelsOf(layout) {
  const labels = [];
  if (layout.runs.length <= LABELS_UP_TO) for (const run of layout.runs) labels.push([labelAngle(layout, run), run.host.length]);
  if (layout.kind === "band" || layout.runs.length > RATES_UP_TO) return labels;
  layout.members.forEach((member, place) => {
    if (member.rate_to_next !== null) labels.push([middle(layout.edge(place)), RATE_LETTERS]);
  });
  return labels;
}

const middle = ([from, to]) => (from + to) / 2;
const labelAngle = (layout, run) => (layout.runs.length === 1 ? Math.PI / 2 : (run.from + run.to) / 2);

export function drawRing(context, size, layout, classes, { selected, pointed, slowest, colours, font }) {
  const { x, y, radius, node, compact } = size;
  const { members, kind } = layout;
  const pen = { context, x, y, colours, font, compact };
  context.textBaseline = "middle";
  if (members.length === 0) return;
  if (kind === "band") {
    drawBand(pen, layout, classes, radius, selected, pointed);
  } else {
    drawHosts(pen, layout, radius, 2 * node + (kind === "nodes" ? 14 : 9));
    drawEdges(pen, layout, classes, radius, kind === "nodes" ? 5 : 4);
    drawNodes(pen, layout, radius, node, selected, pointed);
  }
  const aside = kind === "band" ? 28 : node + 14;
  drawLabels(pen, layout, compact ? radius - aside - 2 : radius + aside, selected, pointed, slowest);
  if (!compact) drawRates(pen, layout, radius + aside, slowest);
  drawSlowest(pen, layout, classes, radius - (kind === "band" ? 36 : node + 16), slowest);
  drawCentre(pen, layout, slowest >= 0 ? Math.sin(middle(layout.edge(slowest))) : null);
}

const point = (pen, angle, radius) => [pen.x + Math.cos(angle) * radius, pen.y + Math.sin(angle) * radius];

function arc(pen, from, to, radius) {
  pen.context.moveTo(...point(pen, from, radius));
  pen.context.arc(pen.x, pen.y, radius, from, to);
}

function stroke(pen, colour, width, draw, cap = "butt") {
  const { context } = pen;
  context.beginPath();
  draw();
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.lineCap = cap;
  context.stroke();
}

function drawHosts(pen, layout, radius, width) {
  const whole = layout.runs.length === 1;
  stroke(pen, pen.colours["host-a"], width, () => {
    for (const run of layout.runs) {
      const inset = whole ? 0 : Math.min((run.to - run.from) * 0.5, layout.unit * 0.5);
      if (whole) arc(pen, 0, TURN, radius);
      else arc(pen, run.from + inset, Math.max(run.from + inset + 1e-3, run.to - inset), radius);
    }
  }, "round");
}

function classed(layout, classes) {
  const places = new Map();
  const { members } = layout;
  if (members.length < 2) return places;
  members.forEach((member, place) => {
    const found = classes.of(member, members[(place + 1) % members.length]);
    if (!places.has(found)) places.set(found, []);
    places.get(found).push(place);
  });
  return places;
}

function drawEdges(pen, layout, classes, radius, width) {
  for (const [found, places] of classed(layout, classes)) {
    const plain = typeof found === "string";
    const colour = plain ? pen.colours[found === "same" ? "same-host" : "unknown"] : pen.colours.rates[found];
    pen.context.setLineDash(found === "unknown" ? [4, 5] : []);
    stroke(pen, colour, plain ? 2 : width, () => {
      for (const place of places) arc(pen, ...layout.edge(place), radius);
    });
  }
  pen.context.setLineDash([]);
}

function drawNodes(pen, layout, radius, node, selected, pointed) {
  const { context, colours } = pen;
  const { members, angles } = layout;
  const dots = (places, fill, line) => {
    if (places.length === 0) return;
    context.beginPath();
    for (const place of places) {
      const [x, y] = point(pen, angles[place], radius);
      context.moveTo(x + node, y);
      context.arc(x, y, node, 0, TURN);
    }
    context.fillStyle = fill;
    context.fill();
    context.strokeStyle = line;
    context.lineWidth = 1.5;
    context.stroke();
  };
  const places = [...members.keys()];
  dots(places.filter((place) => members[place].silent_s <= LATE_S), colours.surface, colours["ink-3"]);
  dots(places.filter((place) => members[place].silent_s > LATE_S), colours.surface, colours.warn);
  if (pointed >= 0) dots([pointed], colours.surface, colours.accent);
  if (selected >= 0) dots([selected], colours.accent, colours.accent);
  if (layout.kind !== "nodes") return;
  context.textAlign = "center";
  context.font = `600 ${Math.max(9, Math.round(node * 0.85))}px ${pen.font}`;
  for (const place of places) {
    const [x, y] = point(pen, angles[place], radius);
    context.fillStyle = place === selected ? colours.surface : colours.ink;
    context.fillText(String(place), x, y + 0.5);
  }
}

/** Many members: a band of hosts, and around it a band of the edges between them, each as wide as there is room. */
function drawBand(pen, layout, classes, radius, selected, pointed) {
  const { colours } = pen;
  const { members, runs, angles } = layout;
  for (const parity of [0, 1]) {
    stroke(pen, colours[parity === 0 ? "host-a" : "host-b"], 20, () => {
      runs.forEach((run, index) => {
        if (index % 2 === parity) arc(pen, run.from, run.to, radius - 10);
      });
    });
  }
  const late = members.flatMap((member, place) => (member.silent_s > LATE_S ? [place] : []));
  const half = Math.max(layout.unit / 2, 1.2 / radius);
  const ticks = (places, colour, from, to) =>
    stroke(pen, colour, to - from, () => {
      for (const place of places) arc(pen, angles[place] - half, angles[place] + half, (from + to) / 2);
    });
  ticks(late, colours.warn, radius - 20, radius);
  const byClass = new Map();
  runs.forEach((run, index) => {
    if (runs.length < 2) return;
    const last = (run.first + run.length - 1) % members.length;
    const next = runs[(index + 1) % runs.length];
    const found = classes.of(members[last], members[(last + 1) % members.length]);
    const from = (run.from + run.to) / 2;
    let to = (next.from + next.to) / 2;
    while (to <= from) to += TURN;
    if (!byClass.has(found)) byClass.set(found, []);
    byClass.get(found).push([from, to]);
  });
  for (const [found, spans] of byClass) {
    const plain = typeof found === "string";
    const colour = plain ? colours[found === "same" ? "same-host" : "unknown"] : colours.rates[found];
    const hair = runs.length > 400 ? 0 : 0.8 / radius;
    stroke(pen, colour, plain ? 4 : 15, () => {
      for (const [from, to] of spans) arc(pen, from + hair, to - hair, radius + 11);
    });
  }
  for (const [place, colour] of [[pointed, colours.ink], [selected, colours.accent]]) {
    if (place < 0) continue;
    ticks([place], colour, radius - 26, radius + 22);
  }
}

function drawLabels(pen, layout, radius, selected, pointed, slowest) {
  const { context, colours, compact } = pen;
  const { runs } = layout;
  if (compact && runs.length === 1) return; // the list says it, and there is no room
  const chosen = runs.length <= LABELS_UP_TO ? runs : [...new Set([pointed, selected, slowest].filter((place) => place >= 0).map((place) => layout.runOf(place)))];
  const marked = selected >= 0 ? layout.runOf(selected) : null;
  const taken = [];
  for (const run of chosen) {
    if (run === undefined) continue;
    const angle = labelAngle(layout, run);
    const [x, y] = point(pen, angle, radius);
    aligned(context, angle, compact);
    context.font = `${run === marked ? 620 : 520} 12px ${pen.font}`;
    const text = shorten(run.host, compact ? 9 : context.textAlign === "center" ? 24 : Math.max(6, Math.floor((pen.x - Math.abs(x - pen.x)) / LETTER_WIDTH)));
    if (taken.some(([otherX, otherY]) => Math.abs(otherY - y) < 14 && Math.abs(otherX - x) < 90)) continue;
    taken.push([x, y]);
    const lift = Math.sin(angle) * 3;
    context.fillStyle = run === marked ? colours.accent : colours["ink-2"];
    context.fillText(text, x, y + lift);
  }
}

function drawRates(pen, layout, radius, slowest) {
  const { context, colours } = pen;
  const { members } = layout;
  const known = members.flatMap((member, place) => (member.rate_to_next === null ? [] : [place]));
  if (known.length > RATES_UP_TO || layout.kind === "band") return;
  context.font = `500 11.5px ${pen.font}`;
  context.fillStyle = colours["ink-3"];
  for (const place of known) {
    if (place === slowest) continue;
    const angle = middle(layout.edge(place));
    const [x, y] = point(pen, angle, radius);
    aligned(context, angle);
    context.fillText(rate(members[place].rate_to_next), x, y + Math.sin(angle) * 3);
  }
}

/** Text beside a circle begins or ends there. */
function aligned(context, angle, inside = false) {
  const lean = inside ? -Math.cos(angle) : Math.cos(angle);
  context.textAlign = lean > 0.3 ? "left" : lean < -0.3 ? "right" : "center";
}

/** The mark of the slowest edge: a name plate inside of the ring, with a line to it. */
function drawSlowest(pen, layout, classes, radius, slowest) {
  if (slowest < 0) return;
  const { context, colours } = pen;
  const { members } = layout;
  context.textAlign = "center";
  const angle = middle(layout.edge(slowest));
  const text = `slowest ${rate(members[slowest].rate_to_next)}`;
  context.font = `620 11.5px ${pen.font}`;
  const width = context.measureText(text).width + 16;
  let [x, y] = point(pen, angle, Math.max(0, radius - 8 - (Math.abs(Math.cos(angle)) * width) / 2));
  if (pen.compact) {
    [x, y] = [pen.x, pen.y + (Math.sin(angle) < 0 ? -16 : 16)];
  } else if (Math.abs(y - pen.y) < CENTRE.tall + 12 && Math.abs(x - pen.x) < CENTRE.wide + width / 2) {
    y = pen.y + (CENTRE.tall + 14) * (Math.sin(angle) < 0 ? -1 : 1); // clear of what stands in the middle
  }
  const fill = colours.rates[classes.of(members[slowest], members[(slowest + 1) % members.length])];
  stroke(pen, fill, 1.5, () => {
    context.moveTo(...point(pen, angle, radius + (layout.kind === "band" ? 14 : 12)));
    context.lineTo(x, y);
  });
  context.beginPath();
  context.roundRect(x - width / 2, y - 11, width, 22, 6);
  context.fillStyle = colours.surface;
  context.fill();
  context.strokeStyle = fill;
  context.lineWidth = 1.5;
  context.stroke();
  context.fillStyle = colours.ink;
  context.fillText(text, x, y + 0.5);
}

/** How many there are, in the middle; on a small ring it makes room for the name plate, above it or below (`plate`). */
function drawCentre(pen, layout, plate) {
  const { context, colours } = pen;
  const hosts = new Set(layout.runs.map((run) => run.host)).size;
  context.textAlign = "center";
  context.fillStyle = colours.ink;
  context.font = `640 26px ${pen.font}`;
  context.fillText(count(layout.members.length), pen.x, pen.y + (pen.compact && plate !== null ? (plate < 0 ? 16 : -16) : -9));
  if (pen.compact && plate !== null) return;
  context.fillStyle = colours["ink-3"];
  context.font = `450 12.5px ${pen.font}`;
  context.fillText(`${layout.members.length === 1 ? "member" : "members"} on ${plural(hosts, "host")}`, pen.x, pen.y + 14);
}
