// How messages look: made once, and updated while an answer comes.

import { choose, plainText, siblings } from "./chats.js";
import { el } from "./dom.js";
import { codeBlock, update } from "./render.js";

const ICONS = {
  copy: "M9 9h10v10H9zM5 15V5h10",
  edit: "M4 20l1-4L16 5l3 3L8 19z",
  again: "M19 12a7 7 0 1 1-2-5M19 4v4h-4",
  goOn: "M5 6l7 6-7 6zM14 6l7 6-7 6z",
  remove: "M5 7h14M10 7V5h4v2M7 7l1 12h8l1-12",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
};

function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
  svg.setAttribute("viewBox", "0 0 24 24");
  line.setAttribute("d", ICONS[name]);
  svg.append(line);
  return svg;
}

const IDEAS = ["Explain MPI in three sentences", "Write a Python function that merges sorted lists", "Compare TCP and UDP in a table"];

// The view of an empty conversation; `suggest` gets the idea that is chosen.
export const welcome = (suggest) => el("div", { class: "welcome" },
  el("img", { src: "ui/icon.svg", alt: "", width: 56, height: 56 }), el("h1", {}, "How can I help?"),
  el("div", { class: "ideas" }, IDEAS.map((text) => el("button", { type: "button", onclick: () => suggest(text) }, text))));

const button = (name, title, action) => el("button", { class: `icon small do-${name}`, type: "button", title, "aria-label": title, onclick: action }, icon(name));

// The message's element. `actions`: what its buttons do, of app.js.
export function messageView(chat, node, actions, running) {
  const made = el("article", { class: `message ${node.role}`, "data-id": node.id });
  if (node.role === "user") {
    const text = el("div", { class: "bubble" });
    if (node.files?.length) text.append(el("div", { class: "files" }, node.files.map((file) => fileChip(file))));
    if (node.images?.length) text.append(el("div", { class: "images" }, node.images.map((image) => thumbnail(image))));
    if (node.text) text.append(el("div", { class: "plain" }, node.text));
    made.append(text, el("div", { class: "under" }, branches(chat, node, actions), tools(node, [
      ["copy", "Copy", () => actions.copy(plainText(node))],
      ["edit", "Edit: makes a branch", () => edit(made, node, actions)],
      ["remove", "Delete this message and what follows", () => actions.remove(node)],
    ])));
  } else {
    made.append(el("div", { class: "body" }), el("div", { class: "under" }));
    updateAnswer(made, chat, node, actions, running);
  }
  return made;
}

export const fileChip = (file, remove) => el("span", { class: "file" }, "📄 ", el("span", {}, file.name),
  el("small", {}, file.text.length < 1024 ? `${file.text.length} B` : `${(file.text.length / 1024).toFixed(1)} KB`),
  remove && el("button", { type: "button", class: "x", title: "Remove", "aria-label": `Remove ${file.name}`, onclick: remove }, "✕"));

// An image in small, which shows it in large; with `remove` in the message that is written.
export const thumbnail = (image, remove) => el("span", { class: "thumbnail" },
  el("button", { type: "button", title: `${image.name}: show it`, "aria-label": `Show ${image.name}`, onclick: () => enlarge(image) },
    el("img", { src: image.url, alt: image.name })),
  remove && el("button", { type: "button", class: "x", title: "Remove", "aria-label": `Remove ${image.name}`, onclick: remove }, "✕"));

function enlarge(image) {
  const dialog = document.getElementById("picture");
  dialog.querySelector("button").replaceChildren(el("img", { src: image.url, alt: image.name }));
  dialog.showModal();
}

const tools = (node, buttons) => el("span", { class: "tools" }, buttons.filter(Boolean).map((one) => button(...one)));

function branches(chat, node, actions) {
  const all = siblings(chat, node);
  if (all.length < 2) return null;
  const at = all.indexOf(node);
  const go = (step) => () => { choose(chat, all[at + step]); actions.chosen(); };
  const left = button("left", "The version before", go(-1)), right = button("right", "The next version", go(1));
  left.disabled = at === 0;
  right.disabled = at === all.length - 1;
  return el("span", { class: "branches" }, left, `${at + 1} / ${all.length}`, right);
}

// Bring an answer's element up to date.
export function updateAnswer(made, chat, node, actions, running) {
  const [body, under] = made.children;
  made.classList.toggle("running", running);
  body.querySelectorAll(":scope > .waiting, :scope > .error").forEach((one) => one.remove());
  node.items.forEach((item, i) => {
    const last = i === node.items.length - 1;
    let part = body.children[i];
    if (!part) {
      part = makers[item.type](item, node, actions);
      body.append(part);
    }
    updaters[item.type](part, item, running && last, actions, node);
  });
  while (body.children.length > node.items.length) body.lastChild.remove();
  if (running && !node.items.length) body.append(el("div", { class: "waiting", "aria-label": "The model is at work" }, el("i"), el("i"), el("i")));
  if (running) {
    under.replaceChildren(el("span", { class: "figures" }, figures(node)));
    return;
  }
  if (node.error) body.append(el("div", { class: "error" }, node.error));
  const goesOn = node.items.at(-1)?.type === "text" && (node.finish === "length" || node.stopped || node.error);
  under.replaceChildren(branches(chat, node, actions) ?? "", tools(node, [
    ["copy", "Copy", () => actions.copy(plainText(node))],
    ["again", "Answer again: makes a branch", () => actions.again(node)],
    goesOn && ["goOn", "Go on", () => actions.goOn(node)],
    ["remove", "Delete this message and what follows", () => actions.remove(node)],
  ]), el("span", { class: "figures" }, figures(node)));
}

function figures(node) {
  const said = [];
  if (node.usage?.completion) said.push(`${node.usage.completion} tokens`);
  if (node.speed) said.push(`${node.speed < 100 ? node.speed.toFixed(1) : Math.round(node.speed)} tokens/s`);
  if (node.first) said.push(`first after ${node.first < 1 ? `${Math.round(1000 * node.first)} ms` : `${node.first.toFixed(1)} s`}`);
  if (node.finish === "length") said.push("cut off: too long");
  if (node.stopped) said.push("stopped");
  return said.join(" · ");
}

const makers = {
  text: () => el("div", { class: "prose" }),
  reasoning: () => el("details", { class: "fold reasoning" }, el("summary", {}, el("span", { class: "title" })), el("div", { class: "prose" })),
  call: (item) => el("details", { class: "fold call" }, el("summary", {}, el("span", { class: "title" }), el("span", { class: "mark" })), el("div", { class: "inside" })),
};

const updaters = {
  text: (part, item, running) => update(part, item.text.replace(/^\n+/, ""), running),
  reasoning(part, item, running) {
    part.querySelector(".title").textContent = running ? "Thinking …" : "Thoughts";
    part.classList.toggle("live", running);
    update(part.lastChild, item.text.trimStart(), running);
  },
  call(part, item, running, actions, node) {
    const state = JSON.stringify([item, running]);
    if (part.state === state) return;
    part.state = state;
    const done = item.result !== undefined;
    const title = [item.server, item.name].filter(Boolean).join(" · ");
    part.querySelector(".title").textContent = `${running && !done ? "Calling" : "Called"} ${title}`;
    part.querySelector(".mark").textContent = done ? (item.failed ? "failed" : "done") : running ? "" : "waits for a result";
    part.classList.toggle("failed", Boolean(item.failed));
    const inside = part.lastChild;
    inside.replaceChildren(el("h4", {}, "Arguments"), codeBlock(pretty(item.arguments), "json"));
    if (done) inside.append(el("h4", {}, "Result"), codeBlock(pretty(item.result), ""));
    else if (!running) inside.append(resultForm(item, node, actions));
  },
};

function resultForm(item, node, actions) {
  const text = el("textarea", { rows: 2, placeholder: "What the tool answers", "aria-label": `Result of ${item.name}` });
  const form = el("form", { class: "result" }, text, el("button", { class: "primary", type: "submit" }, "Give the result"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    actions.result(node, item, text.value);
  });
  return form;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

export function edit(made, node, actions) {
  const text = el("textarea", { class: "edit", rows: Math.min(12, node.text.split("\n").length + 1), "aria-label": "Edit the message" });
  text.value = node.text;
  const cancel = () => actions.chosen();
  const form = el("form", { class: "editor" }, text, el("div", { class: "row" }, el("span", { class: "spread" }),
    el("button", { class: "quiet", type: "button", onclick: cancel }, "Cancel"), el("button", { class: "primary", type: "submit" }, "Send")));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    actions.edit(node, text.value);
  });
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    } else if (event.key === "Escape") {
      event.stopPropagation();
      cancel();
    }
  });
  made.replaceChildren(form);
  text.focus();
}



