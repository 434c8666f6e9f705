// The page at `/ui`: asks its own listener once a second for what the view shows, and shows that.
//
// What is bounded: one round of questions at a time, with a pause that keeps all of them below BYTES_PER_S; bytes of an
// answer; rows, GPUs of a row, and letters of a text. Texts of others become text nodes and nothing else. A hidden tab
// asks nothing. Who does not answer is asked less and less often, and what it told before stays, with its age.

const EVERY_MS = 1_000;
const PAUSE_MAX_MS = 15_000;
const PATIENCE_MS = 5_000;
const BYTES_PER_S = 14_000;
// Of an answer's and its question's heads, which scripts do not see all of.
const HEAD_BYTES = 900;
const ANSWER_BYTES_MAX = 2 << 20;
const MEMBERS = 20;
const MODELS = 30;
const GPUS_SHOWN = 32;
const LETTERS_MAX = 120;
const REQUESTS = 20;
const STEPS = 20;
// Of why a request's life was as it was.
const WHY_LETTERS_MAX = 600;

const $ = (id) => document.getElementById(id);
const at = (path) => new URL(path, new URL("../", import.meta.url));

/** What the page has been told, and what its user has chosen. */
const known = {
  who: null,
  // By the path of its question: the newest answer. `null` while there is none, `false` where it is not told.
  cluster: null,
  hosted: null,
  traffic: null,
  requests: null,
  // The number of the request that was asked for with these.
  chosen: "",
  // When the newest round was answered, on this page's clock, and how old it was then.
  toldAt: null,
  toldAgeMs: 0,
  error: null,
  failures: 0,
};
const asked = { members: 0, hosted: 0, traffic: 0, requests: 0 };
// The newest request that is listed: rows stay where they are until the user wants others.
let until = null;
let token = null;
let timer = null;
let round = null;

// Texts and elements

const cut = (text, most = LETTERS_MAX) => {
  const whole = String(text ?? "–");
  return whole.length > most ? `${whole.slice(0, most)}…` : whole;
};

/** An element with these properties and children; strings are text. */
const el = (tag, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
};

const setText = (node, text) => {
  if (node.textContent !== text) node.textContent = text;
};

const number = (value) => (Number.isFinite(value) ? value : 0);
const list = (value, most) => (Array.isArray(value) ? value.slice(0, most) : []);
const rate = (value) => number(value).toFixed(number(value) < 100 ? 1 : 0);
const ms = (value) => (Number.isFinite(value) ? `${value.toFixed(value < 100 ? 1 : 0)} ms` : "–");
const gib = (bytes) => (number(bytes) / 2 ** 30).toFixed(1);

/** Fills a table's body: a row for each of `rows`, each cell by its column. Rows that stay keep their elements, so that
 * what has the focus, or is selected, keeps it. */
const fill = (table, rows, columns, none) => {
  const body = $(table).tBodies[0];
  const wanted = rows.length || 1;
  while (body.rows.length > wanted) body.lastElementChild.remove();
  while (body.rows.length < wanted) body.append(el("tr"));
  if (!rows.length) {
    const cell = el("td", { colSpan: columns.length }, none);
    return body.rows[0].replaceChildren(cell);
  }
  rows.forEach((row, index) => {
    const tr = body.rows[index];
    if (tr.cells.length !== columns.length) {
      const cells = columns.map((_, place) => (place ? el("td") : el("th", { scope: "row" })));
      tr.replaceChildren(...cells);
    }
    columns.forEach((column, place) => put(tr.cells[place], column(row)));
  });
};

/** Puts text, or `{ text, kind }`, or `{ key, make }` into a cell, if it is not there already. */
const put = (cell, what) => {
  const { text, kind = "", key, make } = typeof what === "string" ? { text: what } : what;
  if (cell.className !== kind) cell.className = kind;
  if (!make) {
    delete cell.dataset.key;
    return setText(cell, text);
  }
  if (cell.dataset.key === key) return;
  cell.dataset.key = key;
  cell.replaceChildren(make());
};

const pairs = (id, entries) => {
  const list = $(id);
  if (list.children.length !== entries.length) {
    list.replaceChildren(...entries.map(([name]) => el("div", {}, el("dt", {}, name), el("dd"))));
  }
  entries.forEach(([, value], index) => setText(list.children[index].lastElementChild, value));
};

// Words that are a class of the style, too: any other one is but shown.
const STATES = new Set(
  "serving primary standby idle joining unlinked drained starting leaving unreachable unusable".split(" "),
);
const state = (word) => ({ text: cut(word), kind: STATES.has(word) ? word : "" });

// Views

const showCluster = (page) => {
  const counts = page.counts ?? {};
  const of = (some, all) => `${number(some)} of ${number(all)}`;
  pairs("counts", [
    ["GPUs that serve", of(counts.gpus_serving, counts.gpus)],
    ["backends that serve", of(counts.backends_serving, counts.backends)],
    ["frontends that serve", of(counts.frontends_serving, counts.frontends)],
    ["models hosted", of(counts.models_hosted, counts.models)],
    ["epoch", cut(page.epoch)],
    ["told by", `${cut(page.scheduler)}, ${page.is_primary ? "the primary" : "not the primary"}, ${cut(page.arm)}`],
  ]);
  fill("schedulers", list(page.schedulers, 16), [(row) => cut(row.address), (row) => state(row.state)], "None.");
  const member = (row) =>
    row.obeys === false ? { text: `${cut(row.state)}, does not obey`, kind: "warn" } : state(row.state);
  fill(
    "frontends",
    list(page.frontends, MEMBERS),
    [(row) => cut(row.name), member, (row) => cut(row.address), (row) => cut(row.path)],
    "None.",
  );
  const models = (row) => String(number(row.models));
  fill(
    "backends",
    list(page.backends, MEMBERS),
    [(row) => cut(row.name), member, lanes, models, weights, safe, (row) => cut(row.address)],
    "None.",
  );
  pager("members-pages", "members", page, "members");
};

const MARKS = { serving: "●", idle: "○", unusable: "✕" };

const lanes = (backend) => {
  const gpus = list(backend.gpus, GPUS_SHOWN);
  const more = (Array.isArray(backend.gpus) ? backend.gpus.length : 0) - gpus.length;
  const make = () => {
    const items = gpus.map((gpu) => {
      const word = MARKS[gpu.state] ? gpu.state : "";
      const text = el("span", { className: "word" }, cut(gpu.state));
      const mark = el("span", { ariaHidden: "true" }, `${MARKS[word] ?? "?"} `);
      return el("li", { className: `gpu ${word}` }, mark, `${number(gpu.index)} `, text);
    });
    if (more > 0) items.push(el("li", { className: "gpu more" }, `and ${more} more`));
    return el("ul", { className: "lanes", ariaLabel: `GPUs of ${cut(backend.name)}` }, ...items);
  };
  return { key: JSON.stringify([backend.name, gpus.map((gpu) => [gpu.index, gpu.state]), more]), make };
};

const weights = ({ weights: found }) => {
  const { gpu_bytes: all, gpu_bytes_used: used } = found ?? {};
  if (!number(all)) return "all there";
  const text = `${gib(used)} of ${gib(all)} GiB`;
  const make = () => {
    const share = number(used) / number(all);
    return el("span", {}, el("meter", { value: share, ariaLabel: "share of memory in use" }), ` ${text}`);
  };
  return { key: text, make };
};

const safe = (backend) => {
  if (backend.safe_to_remove) return { text: "yes", kind: "well" };
  const first = list(backend.only_here_first, 3).map(cut).join(", ");
  return { text: `no: only here ${number(backend.only_here)} (${first})`, kind: "warn" };
};

const showTraffic = (page) => {
  const has = number(page.window_ms) > 0;
  const all = page.all ?? {};
  pairs("totals", [
    ["requests a second", has ? rate(all.requests) : "…"],
    ["of these in time", has ? share(all.good, all.requests) : "…"],
    ["median", has ? ms(all.p50_ms) : "…"],
    ["p99", has ? ms(all.p99_ms) : "…"],
    ["models asked for", `${number(page.asked)} of ${number(page.models)}`],
    ["rates are of the last", has ? `${(page.window_ms / 1000).toFixed(0)} s` : "… (of the next second)"],
  ]);
  const told = (show) => (row) => (has ? show(row) : "…");
  fill(
    "traffic",
    list(page.rows, MODELS),
    [
      (row) => (row.version === "1" ? cut(row.name) : `${cut(row.name)} version ${cut(row.version)}`),
      told((row) => rate(row.requests)),
      told((row) => rate(row.good)),
      told(onTime),
      told((row) => ms(row.p50_ms)),
      told(latency),
      told((row) => (Number.isFinite(row.batch) ? row.batch.toFixed(1) : "–")),
      told(drops),
    ],
    "No model has that in its name.",
  );
  pager("traffic-pages", "traffic", page, "models by what is asked");
};

const share = (part, all) => {
  if (!number(all)) return "–";
  const percent = (100 * number(part)) / number(all);
  // All is all: 99.97 % are not 100.
  return `${percent < 100 ? Math.min(percent, 99.9).toFixed(1) : "100"} %`;
};

const onTime = (row) => {
  const text = share(row.good, row.requests);
  const good = number(row.good) / (number(row.requests) || 1);
  return { text, kind: text === "–" || good >= 0.99 ? "" : good >= 0.95 ? "warn" : "missed" };
};

const latency = (row) => {
  if (!Number.isFinite(row.p99_ms)) return Number.isFinite(row.objective_ms) ? `– of ${ms(row.objective_ms)}` : "–";
  if (!Number.isFinite(row.objective_ms)) return `${ms(row.p99_ms)}, no objective`;
  const text = `${ms(row.p99_ms)} of ${ms(row.objective_ms)}`;
  const make = () => {
    const value = Math.min(row.p99_ms / row.objective_ms, 1.5);
    const bounds = { min: 0, max: 1.5, low: 0.8, high: 1, optimum: 0.5, value };
    return el("span", {}, el("meter", { ...bounds, ariaLabel: "p99 against the objective" }), ` ${text}`);
  };
  return { key: text, make };
};

const drops = ({ dropped }) => {
  const reasons = Object.entries(dropped ?? {}).sort(([, a], [, b]) => number(b) - number(a));
  if (!reasons.length) return { text: "none", kind: "" };
  return { text: reasons.slice(0, 8).map(([reason, of]) => `${cut(reason)} ${rate(of)}`).join(", "), kind: "missed" };
};

const showHosted = (page) => {
  const row = [
    (model) => cut(model.name),
    (model) => cut(model.version),
    (model) => (number(model.backends) ? String(model.backends) : { text: "nowhere", kind: "missed" }),
    (model) => String(number(model.gpus)),
  ];
  fill("hosted", list(page.models, MODELS), row, "No model has that in its name.");
  pager("hosted-pages", "hosted", page, "models by where they are hosted");
};

// Instants of a request's life between which a stage is; colours are what kind of waiting it was.
const STAGES = [
  ["receive", "arrived", "received", "its bytes came in"],
  ["preprocess", "received", "admitted", "it was read and checked"],
  ["submit", "admitted", "queued", "the scheduler was told of it"],
  ["defer", "queued", "due", "it was held back, so that its batch grows", "held"],
  ["queue", "due", "granted", "its batch waited for a GPU", "held"],
  ["grant", "granted", "planned", "the backend was told of the batch"],
  ["fetch", "planned", "fetched", "the backend read the inputs"],
  ["wait", "fetched", "started", "its batch waited for its window and for the batch before", "held"],
  ["execute", "started", "finished", "the GPU ran its batch", "ran"],
  ["push", "finished", "answered", "the outputs came back"],
];
const KEPT = [...STAGES.slice(0, 2), ["kept", "admitted", "answered", "its answer was looked up"]];

/** Its stages in milliseconds since its arrival, and the two instants that are marked. */
const lifeOf = (chosen) => {
  const at = { admitted: 0, ...chosen.microseconds_since_admission };
  const since = (instant) => (Number.isFinite(at[instant]) ? (at[instant] - number(at.arrived)) / 1000 : null);
  const stages = (chosen.source === "cache" ? KEPT : STAGES)
    .map(([name, from, to, what, kind]) => ({ name, from: since(from), to: since(to), what, kind: kind ?? "" }))
    .filter(({ from, to }) => from !== null && to !== null);
  return { stages, window: since("exec_at"), deadline: since("deadline"), answered: since("answered") };
};

const exactly = (value) => `${value.toFixed(3)} ms`;

const showRequests = (page) => {
  const rows = list(page.rows, REQUESTS);
  const became = ({ error, in_time: inTime }) => {
    if (typeof error === "string") return { text: cut(error), kind: "missed" };
    return inTime ? { text: "answered in time", kind: "well" } : { text: "answered late", kind: "missed" };
  };
  const link = ({ request }) => {
    const key = String(number(request));
    return { key, make: () => el("a", { href: `#requests/${key}` }, key) };
  };
  const batch = ({ batch }) => (Number.isFinite(batch) ? String(batch) : "–");
  const columns = [link, (row) => cut(row.model), (row) => ms(row.took_ms), batch, became];
  fill("recent", rows, columns, "None that is asked for has ended.");
  for (const one of $("recent").querySelectorAll("a")) {
    if (one.textContent === chosenNumber()) one.setAttribute("aria-current", "true");
    else one.removeAttribute("aria-current");
  }
  pager("requests-pages", "requests", page, "requests");
  showLife(page.chosen);
};

const showLife = (found) => {
  const wanted = chosenNumber();
  const chosen = found && String(found.request) === wanted ? found : null;
  const facts = chosen?.batch;
  $("life-part").hidden = !chosen?.microseconds_since_admission;
  $("steps-part").hidden = !Array.isArray(chosen?.steps);
  setText($("life-title"), wanted ? `The life of request ${wanted}` : "One request’s life");
  let why = "Choose a request by its number.";
  if (chosen) why = chosen.why ? `${chosen.why}.` : `It was not answered: ${chosen.outcome}`;
  else if (wanted) why = known.chosen === wanted ? "It is not known, or not any more." : "…";
  setText($("life-why"), cut(why, WHY_LETTERS_MAX));
  if (!$("steps-part").hidden) showSteps(list(chosen.steps, STEPS));
  if ($("life-part").hidden) return;
  const life = lifeOf(chosen);
  pairs("life-facts", [
    ["model", cut(chosen.model)],
    ["tasks in its batch", facts ? String(number(facts.size)) : "–"],
    ["GPU", facts ? `${number(facts.gpu)} of backend ${number(facts.backend)}` : "–"],
    ["its window opened", life.window === null ? "–" : exactly(life.window)],
    ["answered", exactly(number(life.answered))],
    ["deadline", life.deadline === null ? "none" : exactly(life.deadline)],
    ["epochs", list(chosen.epochs, 2).map((epoch) => cut(epoch)).join(", ")],
  ]);
  const took = ({ from, to }) => exactly(to - from);
  fill("stages", life.stages, [(of) => of.name, (of) => exactly(of.from), took, (of) => of.what], "None is known.");
  draw(life, wanted);
};

const showSteps = (steps) => {
  const asked = ({ microseconds_since_arrival: since }) => exactly(number(since?.asked) / 1000);
  const why = (step) => cut(step.why ?? step.outcome, WHY_LETTERS_MAX);
  fill("steps", steps, [(step) => cut(step.model), asked, why], "None was asked.");
};

/** A bar for each stage, as wide as it took. The table beneath tells the same. */
const draw = ({ stages, window, deadline, answered }, wanted) => {
  const picture = $("life-picture");
  const key = JSON.stringify([wanted, stages, window, deadline]);
  if (picture.dataset.key === key) return;
  picture.dataset.key = key;
  const [left, width, row] = [80, 505, 16];
  // A deadline far behind the answer would leave no room for what happened.
  const end = 1.05 * Math.max(number(answered), ...stages.map(({ to }) => to), 1e-3);
  const x = (value) => left + (width * Math.min(Math.max(value, 0), end)) / end;
  const shape = (tag, attributes, ...children) => {
    const made = document.createElementNS(picture.namespaceURI, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
    made.append(...children);
    return made;
  };
  const bars = stages.flatMap(({ name, from, to, kind }, place) => [
    shape("text", { x: 4, y: row * place + 15 }, name),
    shape("rect", { class: kind, x: x(from), y: row * place + 5, width: Math.max(1, x(to) - x(from)), height: 12 }),
  ]);
  const mark = (value, kind) =>
    value === null || value > end ? [] : [shape("line", { class: kind, x1: x(value), x2: x(value), y1: 0, y2: 170 })];
  picture.replaceChildren(...bars, ...mark(window, "window"), ...mark(deadline, "deadline"));
  const told = stages.map(({ name, from, to }) => `${name} ${exactly(to - from)}`).join(", ");
  picture.setAttribute("aria-label", `Stages of request ${wanted}: ${told}`);
};

/** Buttons for the other pages; they stay the same elements. */
const pager = (id, part, page, what) => {
  const place = $(id);
  if (!place.children.length) {
    const turn = (by) => (event) => {
      if (event.currentTarget.ariaDisabled === "true") return;
      asked[part] = Math.max(0, asked[part] + by);
      askNow();
    };
    const button = (text, by) =>
      el("button", { type: "button", ariaLabel: `${text} page of ${what}`, onclick: turn(by) }, text);
    place.append(button("Previous", -1), el("span"), button("Next", 1));
  }
  const [previous, shown, next] = place.children;
  const pages = Math.max(1, number(page.pages));
  const here = Math.min(number(page.page), pages - 1);
  setText(shown, `page ${here + 1} of ${pages}`);
  // A disabled button would lose the focus.
  previous.ariaDisabled = String(here === 0);
  next.ariaDisabled = String(here + 1 >= pages);
};

// What is shown

/** The number of the request that the address names, behind the view's name. */
const chosenNumber = () => /^#requests\/(\d{1,15})$/.exec(location.hash)?.[1] ?? "";

/** The view that the address names, or the one that there is. */
const viewShown = () => {
  const has = { cluster: known.cluster !== false, models: known.traffic !== false || known.hosted !== false };
  has.requests = known.requests !== false;
  const wanted = ["models", "requests"].find((name) => location.hash.slice(1).split("/")[0] === name) ?? "cluster";
  if (has[wanted]) return wanted;
  return has.cluster ? "cluster" : has.models ? "models" : "absent";
};

const show = () => {
  const shown = viewShown();
  for (const id of ["cluster", "models", "requests", "absent"]) $(id).hidden = id !== shown;
  $("to-cluster").hidden = known.cluster === false;
  $("to-models").hidden = known.traffic === false && known.hosted === false;
  $("to-requests").hidden = !known.requests;
  for (const id of ["cluster", "models", "requests"]) {
    if (id === shown) $(`to-${id}`).setAttribute("aria-current", "page");
    else $(`to-${id}`).removeAttribute("aria-current");
  }
  $("traffic-part").hidden = !known.traffic;
  $("hosted-part").hidden = !known.hosted;
  $("order-label").hidden = known.traffic === false;
  if (shown === "cluster" && known.cluster) showCluster(known.cluster);
  if (shown === "models" && known.traffic) showTraffic(known.traffic);
  if (shown === "models" && known.hosted) showHosted(known.hosted);
  if (shown === "requests" && known.requests) showRequests(known.requests);
  const who = known.who && `${cut(known.who.role)} ${cut(known.who.name)}, release ${cut(known.who.version)}`;
  setText($("who"), who ?? "");
  document.title = who ? `${cut(known.who.name)} – downbeat` : "downbeat";
  showAge();
};

/** How old what is shown is. That something has changed is told to screen readers, the age is not. */
const showAge = () => {
  const { toldAt, error, who } = known;
  const old = toldAt === null ? null : performance.now() - toldAt + known.toldAgeMs;
  const isOld = error !== null || (old !== null && old > 10 * EVERY_MS);
  $("standing").classList.toggle("old", isOld);
  const not = who?.not_live ?? who?.not_ready;
  let text = "Nothing has been told yet.";
  if (error) text = toldAt === null ? error : `${error} What is shown is what was told last.`;
  else if (isOld) text = "It tells of itself, but not of anything new.";
  else if (toldAt !== null) text = not ? `It answers, and is not well: ${cut(not)}.` : "It answers.";
  setText($("state"), text);
  const seconds = old === null ? "" : old < 10_000 ? (old / 1000).toFixed(1) : (old / 1000).toFixed(0);
  setText($("age"), old === null ? "" : `Shown is how it was ${seconds} s ago.`);
};

// Questions

class Refused extends Error {}

/** An answer as JSON, and its bytes; `false` if nothing is there. */
const ask = async (path, parameters, signal) => {
  const url = at(path);
  url.search = new URLSearchParams(parameters).toString();
  const headers = token === null ? {} : { authorization: `Bearer ${token}` };
  const answer = await fetch(url, { headers, signal, cache: "no-store", redirect: "error" });
  if (answer.status === 404) return { bytes: HEAD_BYTES, json: false };
  if (answer.status === 401 || answer.status === 403) {
    const wants = "It asks for a token: see the end of this page.";
    throw new Refused(token === null ? wants : "It does not take this token.");
  }
  const { text, bytes } = await read(answer);
  if (answer.status === 400) return { bytes: HEAD_BYTES + bytes, json: null };
  if (!answer.ok) throw new Refused(`It answers with status ${answer.status}.`);
  return { bytes: HEAD_BYTES + bytes, json: JSON.parse(text) };
};

const read = async (answer) => {
  const reader = answer.body.getReader();
  const parts = [];
  let bytes = 0;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    bytes += value.length;
    if (bytes > ANSWER_BYTES_MAX) {
      await reader.cancel();
      throw new Refused(`It answers with more than ${ANSWER_BYTES_MAX >> 20} MiB.`);
    }
    parts.push(value);
  }
  return { text: await new Blob(parts).text(), bytes };
};

/** What the view needs: where each answer belongs, and how it is asked for. */
const questions = () => {
  const match = (id) => ({ match: $(id).value });
  const { members, hosted, traffic, requests: of } = asked;
  const last = until === null ? {} : { until };
  const one = chosenNumber() ? { request: chosenNumber() } : {};
  const order = $("requests-order").value;
  const all = {
    cluster: ["v2/cluster", { part: "members", rows: MEMBERS, page: members, ...match("members-match") }],
    hosted: ["v2/cluster", { part: "models", rows: MODELS, page: hosted, ...match("models-match") }],
    requests: ["debug/requests", { rows: REQUESTS, page: of, order, ...match("requests-match"), ...last, ...one }],
    traffic: ["v2/traffic", { rows: MODELS, page: traffic, order: $("order").value, ...match("models-match") }],
  };
  const wanted = { cluster: ["cluster"], models: ["traffic", "hosted"], requests: ["requests"], absent: [] }[viewShown()];
  // Whether there is that view at all.
  if (known.requests === null && !wanted.includes("requests")) wanted.push("requests");
  return wanted.filter((name) => known[name] !== false).map((name) => [name, ...all[name]]);
};

const askAll = async (signal) => {
  const { json: who, bytes } = await ask("ui/state", {}, signal);
  if (!who) throw new Refused("Nothing answers at its address.");
  known.who = who;
  // What is not told here may be, after it has been away: another release is there, or a proxy knows its way again.
  if (known.failures) for (const name of ["cluster", "hosted", "traffic", "requests"]) known[name] ||= null;
  let [all, age, answered] = [bytes, 0, true];
  for (const [name, path, parameters] of questions()) {
    const found = await ask(path, parameters, signal);
    all += found.bytes;
    if (found.json === null) {
      // Its page is gone: there are fewer of them now.
      const part = { cluster: "members" }[name] ?? name;
      if (asked[part] === 0) throw new Refused("It does not understand the question.");
      [asked[part], answered] = [0, false];
      continue;
    }
    known[name] = found.json;
    if (name === "requests") {
      known.chosen = parameters.request ?? "";
      if (viewShown() === name && Number.isFinite(found.json.last)) until ??= found.json.last;
    }
    age = Math.max(age, number(found.json && found.json.age_ms));
  }
  if (answered) [known.toldAt, known.toldAgeMs] = [performance.now(), age];
  return all;
};

/** One round of questions, and when the next one is due. */
const turn = async () => {
  clearTimeout(timer);
  timer = null;
  if (document.visibilityState === "hidden" || round) return;
  const mine = new AbortController();
  round = mine;
  const patience = setTimeout(() => mine.abort(), PATIENCE_MS);
  const before = viewShown();
  let pause = EVERY_MS;
  try {
    const bytes = await askAll(mine.signal);
    [known.error, known.failures] = [null, 0];
    pause = Math.max(EVERY_MS, (1000 * bytes) / BYTES_PER_S);
    // It was for a view that is not here.
    if (viewShown() !== before) pause = 0;
  } catch (error) {
    if (round !== mine) return;
    known.failures += 1;
    known.error = error instanceof Refused ? error.message : "It does not answer.";
    pause = Math.min(EVERY_MS * 2 ** (known.failures - 1), PAUSE_MAX_MS);
  } finally {
    clearTimeout(patience);
    if (round === mine) round = null;
  }
  show();
  if (timer === null) timer = setTimeout(turn, pause);
};

/** Asks anew, whatever is under way. */
const askNow = () => {
  round?.abort();
  round = null;
  show();
  turn();
};

// The user

let typing = null;
const typed = (...parts) => () => {
  clearTimeout(typing);
  typing = setTimeout(() => {
    for (const part of parts) asked[part] = 0;
    askNow();
  }, 300);
};

$("members-match").addEventListener("input", typed("members"));
$("models-match").addEventListener("input", typed("hosted", "traffic"));
$("order").addEventListener("change", typed("traffic"));
$("requests-match").addEventListener("input", typed("requests"));
$("requests-order").addEventListener("change", typed("requests"));
$("requests-newest").addEventListener("click", () => {
  [until, asked.requests] = [null, 0];
  askNow();
});
for (const form of document.forms) form.addEventListener("submit", (event) => event.preventDefault());
$("token-form").addEventListener("submit", () => {
  const found = $("token").value.trim();
  // What a header field can have.
  const isToken = /^[\x21-\x7e]+$/.test(found);
  $("token").setCustomValidity(isToken ? "" : "Expected letters, digits and signs of ASCII without blanks.");
  if (!isToken) return $("token").reportValidity();
  token = found;
  $("token").value = "";
  $("forget").hidden = false;
  known.failures = 0;
  askNow();
});
$("token").addEventListener("input", () => $("token").setCustomValidity(""));
$("forget").addEventListener("click", () => {
  token = null;
  $("forget").hidden = true;
  $("token").focus();
  askNow();
});
$("skip").addEventListener("click", (event) => {
  // As an address it would name no view.
  event.preventDefault();
  $("main").focus();
});
window.addEventListener("hashchange", askNow);
document.addEventListener("visibilitychange", () => {
  if (document.visibilityState === "hidden") {
    round?.abort();
    round = null;
    clearTimeout(timer);
    timer = null;
  } else {
    askNow();
  }
});
setInterval(() => {
  if (document.visibilityState !== "hidden") showAge();
}, 500);
show();
turn();
