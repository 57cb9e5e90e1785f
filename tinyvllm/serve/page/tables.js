// The table of requests, the list of events and the bars of memory. All text is set as text.

import { FIRST_LABEL } from "./cells.js";
import { bytes, clock, count, plural, sequenceColour, shortId } from "./format.js";

export function element(tag, { text, ...attributes } = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text != null) made.textContent = text;
  made.append(...children);
  return made;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

const STATES = {
  decode: "decoding",
  prefill: "prefill",
  return: "coming back",
  swapped: "swapped out",
  preempted: "to recompute",
  waiting: "waiting",
};

export class RequestTable {
  // select: called with the label of the chosen request, or null.
  constructor(body, note, select) {
    Object.assign(this, { body, note, select });
    this.rows = new Map();
    this.chosen = null;
    this.requests = [];
  }

  update(requests, leftOut) {
    this.requests = requests;
    const dark = getComputedStyle(this.body).getPropertyValue("--dark").trim() === "1";
    const gone = new Set(this.rows.keys());
    let before = null; // rows stay where they are if they can: one of them may have the focus
    for (const request of requests) {
      const id = request.request_id;
      gone.delete(id);
      const row = this.rows.get(id) ?? this.add(request);
      const wanted = before ? before.nextSibling : this.body.firstChild;
      if (row.line !== wanted) this.body.insertBefore(row.line, wanted);
      before = row.line;
      this.fill(row, request, dark);
    }
    for (const id of gone) {
      if (this.chosen === this.rows.get(id).label) this.choose(null);
      this.rows.get(id).line.remove();
      this.rows.delete(id);
    }
    const more = leftOut ? ` and ${count(leftOut)} more, not shown` : "";
    setText(this.note, requests.length ? `${plural(requests.length, "sequence")}${more}` : "none");
  }

  add(request) {
    const { label, request_id: id } = request;
    const button = element("button", { type: "button", "aria-pressed": "false", title: id });
    const swatch = element("i", { class: "swatch one" });
    button.append(swatch, element("b", { text: `#${label - FIRST_LABEL}` }),
      element("span", { text: shortId(id) }));
    button.addEventListener("click", () => this.choose(this.chosen === label ? null : label));
    const cells = Array.from({ length: 6 }, () => element("td"));
    const line = element("tr", {}, element("th", { scope: "row" }, button), ...cells);
    const row = { label, line, button, swatch, cells };
    this.rows.set(id, row);
    return row;
  }

  fill(row, request, dark) {
    row.swatch.style.background = sequenceColour(request.label, dark);
    row.line.dataset.state = request.state;
    [
      STATES[request.state] ?? request.state,
      count(request.prompt_tokens),
      count(request.output_tokens),
      count(request.blocks),
      request.host_blocks ? count(request.host_blocks) : "–",
      request.preemptions ? count(request.preemptions) : "–",
    ].forEach((text, i) => setText(row.cells[i], text));
  }

  choose(label) {
    this.chosen = label;
    for (const row of this.rows.values()) {
      row.button.setAttribute("aria-pressed", String(row.label === label));
    }
    this.select(label);
  }

  // What the map calls the sequence of a label.
  name(label) {
    const request = this.requests.find((one) => one.label === label);
    if (!request) return `#${label - FIRST_LABEL}`;
    const state = STATES[request.state] ?? request.state;
    return `#${label - FIRST_LABEL} ${shortId(request.request_id)}, ${state}`;
  }
}

const KINDS = {
  above: ["▲", "Above the watermark: nothing is admitted"],
  below: ["▼", "Back below the watermark"],
  swap: ["⇥", "Preempted, swapped out"],
  recompute: ["↻", "Preempted, to be computed again"],
  return: ["↩", "Runs again"],
  fail: ["✕", "Ended: its blocks could not be copied"],
};

export function showEvents(list, events, server) {
  const newest = events.at(-1)?.number ?? -1;
  const state = `${server} ${newest}`;
  if (list.dataset.shown === state) return;
  list.dataset.shown = state;
  const items = [...events].reverse().map(({ time, kind, request_id: id, detail }) => {
    const [sign, what] = KINDS[kind] ?? ["•", kind];
    return element("li", { "data-kind": kind },
      element("time", { text: clock(time), datetime: new Date(time * 1000).toISOString() }),
      element("span", { class: "sign", "aria-hidden": "true", text: sign }),
      element("span", {}, element("b", { text: what }),
        ...(id ? [" ", element("code", { text: shortId(id), title: id })] : []),
        element("small", { text: detail })));
  });
  if (!items.length) items.push(element("li", { class: "none", text: "None so far" }));
  list.replaceChildren(...items);
}

// A bar with parts in it and their numbers below: [name, value, class].
export function showBar(box, title, whole, parts, notes) {
  if (!box.bar) {
    box.bar = element("div", { class: "bar", "aria-hidden": "true" });
    box.list = element("dl", { class: "numbers" });
    box.replaceChildren(element("h3", { text: title }), box.bar, box.list);
    box.bar.replaceChildren(...parts.map(([, , kind]) => element("i", { class: kind })));
  }
  parts.forEach(([, value], i) => {
    const share = whole ? Math.min(100, 100 * value / whole) : 0;
    box.bar.children[i].style.setProperty("--share", `${share}%`);
  });
  const all = [...parts.map(([name, value, kind]) => [name, bytes(value), kind]), ...notes];
  while (box.list.children.length < all.length) {
    box.list.append(element("div", {}, element("dt"), element("dd")));
  }
  all.forEach(([name, text, kind], i) => {
    const [dt, dd] = box.list.children[i].children;
    if (dt.dataset.name !== name) {
      dt.dataset.name = name;
      dt.replaceChildren(...(kind ? [element("i", { class: `swatch ${kind}` })] : []), name);
    }
    setText(dd, text);
  });
}
