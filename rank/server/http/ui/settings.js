// The drawer with the system prompt and sampling settings. Empty fields leave the choice to the server.

import { el } from "./dom.js";

const STORED = "phalanx.settings";
const FIELDS = [
  ["temperature", "Temperature", "0 is greedy", { min: 0, max: 5, step: 0.05 }],
  ["top_p", "Top-p", "1 keeps all", { min: 0, max: 1, step: 0.01 }],
  ["top_k", "Top-k", "0 keeps all", { min: -1, step: 1 }],
  ["min_p", "Min-p", "relative to the likeliest", { min: 0, max: 1, step: 0.01 }],
  ["max_tokens", "Longest answer", "in tokens", { min: 1, step: 1 }],
  ["seed", "Seed", "equal answers again", { min: 0, step: 1 }],
  ["presence_penalty", "Presence penalty", "0 is none", { min: -2, max: 2, step: 0.1 }],
  ["frequency_penalty", "Frequency penalty", "0 is none", { min: -2, max: 2, step: 0.1 }],
  ["repetition_penalty", "Repetition penalty", "1 is none", { min: 0.01, step: 0.05 }],
];

// Settings of a new conversation: those that were chosen last.
export function defaults() {
  try {
    return JSON.parse(localStorage.getItem(STORED)) ?? {};
  } catch {
    return {};
  }
}

function toolsError(text) {
  if (!text.trim()) return "";
  try {
    const tools = JSON.parse(text);
    const good = Array.isArray(tools) && tools.every((tool) => tool?.type === "function" && typeof tool.function?.name === "string");
    return good ? "" : 'a list of {"type": "function", "function": {"name": …}} is needed';
  } catch (error) {
    return `no JSON: ${error.message}`;
  }
}

// Fill the drawer for these settings; `changed` is called after each change.
export function showSettings(place, settings, { changed, close, askKey }) {
  const set = (name, value) => {
    settings[name] = value;
    localStorage.setItem(STORED, JSON.stringify(settings));
    changed();
  };
  const area = (name, rows, placeholder) => {
    const made = el("textarea", { rows, placeholder, id: `set-${name}` });
    made.value = settings[name] ?? "";
    made.addEventListener("input", () => set(name, made.value));
    return made;
  };
  const number = ([name, label, hint, limits]) => {
    const made = el("input", { type: "number", placeholder: "default", id: `set-${name}`, inputmode: "decimal", ...limits });
    made.value = settings[name] ?? "";
    made.addEventListener("input", () => made.checkValidity() && set(name, made.value));
    return el("label", { class: "field" }, el("span", {}, label, el("small", {}, hint)), made);
  };
  const wrong = el("small", { class: "wrong" }, toolsError(settings.tools ?? ""));
  const tools = el("textarea", { rows: 4, spellcheck: "false", id: "set-tools", placeholder: '[{"type": "function", "function": {"name": …}}]' });
  tools.value = settings.tools ?? "";
  tools.addEventListener("input", () => {
    wrong.textContent = toolsError(tools.value);
    if (!wrong.textContent) set("tools", tools.value);
  });
  const reset = el("button", { class: "quiet", type: "button", onclick: () => {
    for (const name of [...FIELDS.map(([field]) => field), "stop", "tools", "system"]) delete settings[name];
    set("model", settings.model);
    showSettings(place, settings, { changed, close, askKey });
  } }, "Reset");
  place.replaceChildren(
    el("div", { class: "drawer-head" }, el("h2", {}, "Settings"), reset, el("button", { class: "icon", type: "button", title: "Close", "aria-label": "Close the settings", onclick: close }, "✕")),
    el("label", { class: "block" }, el("span", {}, "System prompt"), area("system", 5, "What the model is told first")),
    el("h3", {}, "Sampling"),
    el("div", { class: "grid" }, FIELDS.map(number)),
    el("label", { class: "block" }, el("span", {}, "Stop texts", el("small", {}, "one in a line")), area("stop", 2, "")),
    el("label", { class: "block" }, el("span", {}, "Tools", el("small", {}, "functions as JSON; you give the results")), tools, wrong),
    el("p", { class: "note" }, "Empty fields leave the choice to the server. Conversations and settings stay in this browser."),
    el("button", { class: "quiet", type: "button", onclick: askKey }, "API key …"),
  );
}
