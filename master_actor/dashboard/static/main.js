// The page: takes reports in and has the panels show them, each in a frame of its own.

import { Chart } from "./chart.js";
import { Connection } from "./connection.js";
import { Detail } from "./detail.js";
import { byId, make, setText } from "./elements.js";
import { Figures } from "./figures.js";
import { Flights } from "./flights.js";
import { digits, milliseconds, moment, rate, seconds, time } from "./format.js";
import { Frames } from "./frames.js";
import { Members } from "./members.js";
import { Ring } from "./ring.js";
import { State } from "./state.js";
import { Timeline } from "./timeline.js";

const STATES = {
  connecting: "Connecting",
  live: "Live",
  away: "Master away, trying again",
  full: "Too many pages are open",
  refused: "Token not accepted",
  paused: "Paused",
};

// The token is in a cookie by now, and not to be in the address line, in bookmarks and in screenshots.
if (new URLSearchParams(location.search).has("token")) history.replaceState(null, "", location.pathname + location.hash);

const frames = new Frames();
const state = new State();
const figures = new Figures();
const flights = new Flights();
const timeline = new Timeline(frames);
const ring = new Ring(frames, (peer) => choose(peer));
const members = new Members(frames, (peer) => choose(peer, { show: false }));
const detail = new Detail((by) => step(by));
const charts = [
  new Chart(byId("bytes-chart"), { name: "Bytes reduced", value: (sample) => sample.bytes_per_s, text: rate, series: "--series-bytes", frames, now: byId("bytes-now") }),
  new Chart(byId("operations-chart"), { name: "Operations", value: (sample) => sample.operations_per_s, text: (value) => `${digits(value)}/s`, series: "--series-operations", frames, now: byId("operations-now") }),
];
let shown = ""; // the group that is looked at
let chosen = ""; // the member that is looked at

const connection = new Connection({ onReport: take, onState: drawConnection, position: () => state.position() });
setTimeout(() => connection.dial());
setInterval(drawConnection, 1000);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  ring.recolour();
  charts.forEach((chart) => chart.redraw());
});
addEventListener("hashchange", () => show(fromAddress()));
byId("group").addEventListener("change", (event) => {
  location.hash = encodeURIComponent(event.target.value);
});

function fromAddress() {
  try {
    return decodeURIComponent(location.hash.slice(1));
  } catch {
    return "";
  }
}

function take(report) {
  const news = state.take(report);
  frames.ask("chooser", drawChooser);
  const group = state.group(shown) ?? pick();
  if (group !== null && group.name !== shown) {
    show(group.name);
  } else {
    draw();
    timeline.add(news);
  }
  announce(news);
}

/** The group that the address names, else the largest. */
function pick() {
  const named = state.group(fromAddress());
  if (named !== null) return named;
  return state.report.groups.reduce((found, group) => (found === null || group.members.length > found.members.length ? group : found), null);
}

function show(name) {
  const group = state.group(name);
  if (group === null) return;
  shown = name;
  chosen = "";
  ring.select("");
  members.select("");
  timeline.show(state, name);
  frames.ask("chooser", drawChooser);
  draw();
}

function draw() {
  const group = state.group(shown);
  frames.ask("view", () => {
    const changes = byId("group-view").hidden !== (group === null);
    byId("empty").hidden = group !== null;
    byId("group-view").hidden = group === null;
    return changes; // to lay all of it out is enough for one frame
  });
  frames.ask("foot", drawFoot);
  if (group === null) return;
  const history = state.history(shown);
  const { report } = state;
  setText(byId("group-title"), `Group ${shown}`);
  document.title = `${shown} · ray_pccl`;
  frames.ask("figures", () => figures.draw(report, group, history));
  frames.ask("ring data", () => {
    ring.update(group);
    frames.ask("members data", () => members.update(group, ring.classes));
  });
  frames.ask("detail", () => detail.draw(group, chosen));
  frames.ask("flights", () => flights.draw(group));
  const mine = state.happenings.filter((happening) => happening.at > report.at - 330 && (happening.group === shown || happening.group === ""));
  charts.forEach((chart, index) => frames.ask(`chart data ${index}`, () => chart.update(history, mine, report.at)));
}

function choose(peer, { show: reveal = true } = {}) {
  chosen = peer;
  ring.select(peer);
  members.select(peer, { show: reveal });
  const group = state.group(shown);
  if (group !== null) frames.ask("detail", () => detail.draw(group, chosen));
}

function step(by) {
  const all = state.group(shown)?.members ?? [];
  const place = all.findIndex((member) => member.peer_id === chosen);
  if (place >= 0) choose(all[(place + by + all.length) % all.length].peer_id);
}

function drawChooser() {
  const select = byId("group");
  const groups = state.report.groups;
  byId("chooser").hidden = groups.length === 0;
  const names = groups.map((group) => group.name).sort();
  const present = [...select.options].map((option) => option.value);
  if (names.join("\0") !== present.join("\0")) {
    select.replaceChildren(
      ...names.map((name) => {
        const option = make("option", "", name);
        option.value = name;
        return option;
      }),
    );
  }
  if (select.value !== shown) select.value = shown;
}

function drawConnection() {
  const element = byId("connection");
  const age = (performance.now() - connection.since) / 1000;
  const away = connection.state === "away" || connection.state === "full";
  if (element.dataset.state !== connection.state) element.dataset.state = connection.state;
  setText(byId("connection-text"), away ? `${STATES[connection.state]} · ${seconds(Math.floor(age))}` : STATES[connection.state]);
  document.body.classList.toggle("stale", connection.state !== "live" && state.report !== null);
  const banner = byId("banner");
  const texts = {
    away: state.report === null ? "" : `The master does not answer. What you see is from ${time(state.report.at)}; running collectives go on without it.`,
    full: "The master serves a limited number of pages at once. Close another one, and this one goes on.",
    refused: "The master does not accept this page's token any more. Open the page again with the address that ray-pccl status shows.",
  };
  setText(banner, texts[connection.state] ?? "");
  banner.hidden = banner.textContent === "";
}

function drawFoot() {
  const { report } = state;
  const words = [`ray_pccl ${report.version}`, `master ${report.host}:${report.port}`, `process ${report.pid}`, `up since ${moment(report.booted_at)}`, report.master_id];
  const foot = byId("foot");
  if (foot.childElementCount !== words.length) foot.replaceChildren(...words.map(() => make("span")));
  words.forEach((word, index) => setText(foot.children[index], word));
}

/** Tells those who don't see the page what matters: deaths and recoveries of the group. */
function announce(news) {
  const mine = news.filter((happening) => happening.group === shown);
  const lost = mine.filter((happening) => happening.kind === "lost").length;
  const recovered = mine.findLast((happening) => happening.kind === "recovered");
  const words = [];
  if (lost > 0) words.push(lost === 1 ? "A peer was lost." : `${lost} peers were lost.`);
  if (recovered !== undefined && recovered.took_ms !== null) words.push(`Recovered in ${milliseconds(recovered.took_ms)}.`);
  if (words.length > 0) setText(byId("announcer"), words.join(" "));
}
