// Operations in flight.

import { byId, make, setText } from "./elements.js";
import { count, plural, seconds } from "./format.js";

const MOST = 6;

export class Flights {
  #list = byId("flights");
  #rows = [];

  draw(group) {
    const flights = group.in_flight.slice(0, MOST);
    while (this.#rows.length < flights.length) this.#rows.push(newRow());
    flights.forEach((flight, index) => fill(this.#rows[index], flight, group.members.length));
    const wanted = flights.length === 0 ? [none()] : this.#rows.slice(0, flights.length).map((row) => row.element);
    if (wanted.length !== this.#list.childElementCount || wanted[0] !== this.#list.firstElementChild) this.#list.replaceChildren(...wanted);
    const more = group.in_flight.length - flights.length;
    setText(byId("flight-hint"), flights.length === 0 ? "" : `The longest first${more > 0 ? `, and ${count(more)} more` : ""}`);
  }
}

function none() {
  return make("li", "flight-none", "No operation is under way.");
}

function newRow() {
  const parts = {
    what: make("span", "flight-what"),
    time: make("span", "flight-time"),
    tag: make("span", "flight-tag"),
    bar: make("i"),
    members: make("span"),
  };
  const bar = make("span", "flight-bar", parts.bar);
  bar.setAttribute("aria-hidden", "true");
  const element = make("li", "flight", parts.what, parts.tag, parts.time, make("span", "flight-members", bar, parts.members));
  return { element, ...parts };
}

function fill(row, flight, total) {
  setText(row.what, flight.what);
  row.what.title = flight.what;
  setText(row.time, seconds(flight.seconds));
  setText(row.tag, `tag ${flight.tag}`);
  setText(row.members, `${count(flight.members)} of ${total < 100 ? plural(total, "member") : count(total)}`);
  row.bar.style.transform = `scaleX(${total > 0 ? Math.min(1, flight.members / total) : 0})`;
}
