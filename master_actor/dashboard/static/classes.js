// Bandwidths in at most five classes, from slow (0) to fast (4), with bounds that are round numbers and so stay put.

import { rate, tidy } from "./format.js";

const MOST = 5;
const ROUND = [1, 2, 5];

/** The bounds between classes, ascending; none if all rates are alike. */
function boundsOf(rates) {
  const low = Math.min(...rates);
  const high = Math.max(...rates);
  if (!(low > 0) || high / low < 1.3) return [];
  const bounds = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high) + 1; power += 1) {
    for (const step of ROUND) {
      const bound = step * 10 ** power;
      if (bound > low && bound <= high) bounds.push(bound);
    }
  }
  if (bounds.length === 0) return [Math.sqrt(low * high)];
  while (bounds.length > MOST - 1) bounds.splice(Math.floor(bounds.length / 2), 1);
  return bounds;
}

/** From one rate to the other; a unit that both have is said once. */
function span(from, to) {
  const [low, high] = [tidy(rate(from)), tidy(rate(to))];
  const [value, unit] = low.split(" ");
  return `${high.endsWith(` ${unit}`) ? value : low} – ${high}`;
}

export class Classes {
  constructor(members) {
    const rates = members.map((member) => member.rate_to_next).filter((value) => value !== null);
    this.bounds = rates.length > 0 ? boundsOf(rates) : [];
    this.any = rates.length > 0;
    this.unknown = members.some((member, place) => this.of(member, members[(place + 1) % members.length]) === "unknown");
    this.same = members.some((member, place) => this.of(member, members[(place + 1) % members.length]) === "same");
  }

  /** The class of the edge from a member to the next: 0 to 4, "same" (one host) or "unknown". */
  of(member, next) {
    if (member.rate_to_next === null) return member.host === next.host ? "same" : "unknown";
    const above = this.bounds.filter((bound) => member.rate_to_next >= bound).length;
    return MOST - 1 - (this.bounds.length - above);
  }

  /** [class, text] for each line of the legend, fast first. */
  legend() {
    const lines = [];
    if (this.any) {
      const { bounds } = this;
      if (bounds.length === 0) lines.push([MOST - 1, "all alike"]);
      for (let index = bounds.length; index >= 0 && bounds.length > 0; index -= 1) {
        const [from, to] = [bounds[index - 1], bounds[index]];
        const text = to === undefined ? `${rate(from)} and more` : from === undefined ? `below ${rate(to)}` : span(from, to);
        lines.push([MOST - 1 - (bounds.length - index), tidy(text)]);
      }
    }
    if (this.same) lines.push(["same", "same host"]);
    if (this.unknown) lines.push(["unknown", "not measured"]);
    return lines;
  }
}

/** The edge in words. */
export function edgeText(member, next) {
  if (member.rate_to_next !== null) return rate(member.rate_to_next);
  return member.host === next.host ? "same host" : "not measured";
}
