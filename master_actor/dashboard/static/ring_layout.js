// Where everything of the ring is: angles of members, arcs of hosts. Clockwise from the top; nothing is drawn here.

const TURN = 2 * Math.PI;
const TOP = -Math.PI / 2;
export const NODES_UP_TO = 40;
export const DOTS_UP_TO = 72;
const GAPPED_UP_TO = 200;

export class RingLayout {
  constructor(members) {
    this.members = members;
    const total = members.length;
    this.kind = total <= NODES_UP_TO ? "nodes" : total <= DOTS_UP_TO ? "dots" : "band";
    /** Neighbours of one host, in the order of the ring: {host, first, length}. The last may go on over the top. */
    this.runs = runsOf(members);
    const many = this.runs.length;
    const gap = many > 1 && many <= GAPPED_UP_TO ? Math.min(0.9, (0.22 * total) / many) : 0;
    this.unit = TURN / Math.max(1, total + gap * many);
    this.angles = new Float64Array(total);
    let at = TOP;
    for (const run of this.runs) {
      at += (gap / 2) * this.unit;
      run.from = at;
      for (let index = 0; index < run.length; index += 1) {
        this.angles[(run.first + index) % total] = at + this.unit / 2;
        at += this.unit;
      }
      run.to = at;
      at += (gap / 2) * this.unit;
    }
  }

  /** The angle of a member's edge to the next: [from, to], to being the larger. */
  edge(place) {
    const from = this.angles[place];
    let to = this.angles[(place + 1) % this.members.length];
    while (to <= from) to += TURN;
    return [from, to];
  }

  /** The run that a member is of. */
  runOf(place) {
    const total = this.members.length;
    return this.runs.find((run) => (place - run.first + total) % total < run.length);
  }

  /** The member nearest to an angle. */
  nearest(angle) {
    let best = -1;
    let least = Infinity;
    for (let place = 0; place < this.angles.length; place += 1) {
      const away = Math.abs(((angle - this.angles[place]) % TURN + TURN + Math.PI) % TURN - Math.PI);
      if (away < least) [best, least] = [place, away];
    }
    return best;
  }
}

function runsOf(members) {
  const runs = [];
  members.forEach((member, place) => {
    const last = runs[runs.length - 1];
    if (last !== undefined && last.host === member.host) last.length += 1;
    else runs.push({ host: member.host, first: place, length: 1, from: 0, to: 0 });
  });
  // The ring closes: what ends with the host that it begins with is one run.
  if (runs.length > 1 && runs[0].host === runs[runs.length - 1].host) {
    const tail = runs.pop();
    runs[0] = { ...runs[0], first: tail.first, length: runs[0].length + tail.length };
  }
  return runs;
}
