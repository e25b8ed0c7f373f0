// The page: which conversation is shown, what the buttons do, and the answer that is being made.

import * as api from "./api.js";
import * as chats from "./chats.js";
import { copyText, el } from "./dom.js";
import { isPicture, readImage } from "./images.js";
import { defaults, showSettings } from "./settings.js";
import { edit, fileChip, messageView, thumbnail, updateAnswer, welcome } from "./view.js";

const $ = (id) => document.getElementById(id);
const MAX_FILE = 1 << 20; // characters
const narrow = matchMedia("(max-width: 800px)");
const THINKING = { "": "auto", on: "on", off: "off" };

let known = []; // conversations, the newest first
let chat = chats.newChat(defaults());
let models = [];
let servers = {}; // tool servers
let files = [], images = []; // attached to the message that is written
let running = null; // {chat, node, control}

// The state that is shown.

function showChats() {
  const words = $("search").value.trim();
  const found = words ? known.filter((one) => chats.matches(one, words)) : known;
  $("chats").replaceChildren(...found.map((one) => {
    const open = el("button", { class: "open", type: "button", title: one.title || "New chat", onclick: () => { show(one); hideSide(); } }, one.title || "New chat");
    const remove = el("button", { class: "x", type: "button", title: "Delete", "aria-label": `Delete ${one.title}`, onclick: () => forget(one) }, "✕");
    return el("div", { class: one.id === chat.id ? "item current" : "item", role: "listitem" }, open, remove);
  }));
  if (!found.length) $("chats").append(el("p", { class: "empty" }, words ? "Nothing found" : "No conversations yet"));
}

function show(which) {
  chat = which;
  files = [];
  images = [];
  $("input").value = "";
  showAll();
  toEnd(true);
  if (!narrow.matches) $("input").focus();
}

function showAll() {
  const shown = chats.path(chat);
  $("messages").replaceChildren(...(shown.length ? shown.map((node) => messageView(chat, node, actions, running?.node === node)) : [welcome(suggest)]));
  document.title = chat.title ? `${chat.title} · Phalanx` : "Phalanx";
  showChats();
  showGauge();
  showComposer();
  $("model").value = chat.settings.model || models[0]?.id || "";
  if (!$("settings").hidden) openSettings();
}

const suggest = (text) => { $("input").value = text; grow(); $("input").focus(); };

function showComposer() {
  const busy = running?.chat === chat;
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  $("files").replaceChildren(
    ...images.map((image) => thumbnail(image, () => { images = images.filter((one) => one !== image); showComposer(); $("input").focus(); })),
    ...files.map((file) => fileChip(file, () => { files = files.filter((one) => one !== file); showComposer(); $("input").focus(); })),
  );
  $("attach-image").hidden = !takesImages();
  $("drop-text").textContent = takesImages() ? "Drop images or text files" : "Drop text files";
  $("think").textContent = `Thinking: ${THINKING[chat.settings.thinking ?? ""]}`;
  $("think").classList.toggle("on", chat.settings.thinking === "on");
  const off = chat.settings.servers_off ?? [];
  $("tool-servers").replaceChildren(...Object.entries(servers).map(([name, state]) => {
    const on = state.status === "ready" && !off.includes(name);
    return el("button", { class: on ? "chip on" : "chip", type: "button", "aria-pressed": String(on), disabled: state.status !== "ready",
      title: state.message ?? `${state.tools} tools of the tool server ${name}`, onclick: () => {
        chat.settings.servers_off = on ? [...off, name] : off.filter((one) => one !== name);
        keep();
        showComposer();
      } }, `🔧 ${name}`);
  }));
}

const served = () => models.find((one) => one.id === (chat.settings.model || $("model").value)) ?? models[0];
const takesImages = () => served()?.images; // {per_prompt, pixels}, once the model is loaded

function showGauge() {
  // The usage of an answer with calls of tool servers is that of several prompts together.
  const usage = chats.path(chat).filter((node) => node.usage && !node.items.some((item) => item.server)).at(-1)?.usage;
  const most = models.find((one) => one.id === $("model").value)?.max_model_len ?? models[0]?.max_model_len;
  $("gauge").hidden = !usage || !most;
  if (!usage || !most) return;
  const used = usage.prompt + usage.completion;
  $("gauge-text").textContent = `${used.toLocaleString("en")} / ${most.toLocaleString("en")}`;
  $("gauge").title = `${used} of the context's ${most} tokens; ${usage.cached} came from the prefix cache`;
  $("gauge-bar").style.setProperty("width", `${Math.min(100, (100 * used) / most)}%`);
  $("gauge-bar").classList.toggle("full", used > 0.85 * most);
}

let toastTimer;
function toast(text) {
  $("toast").textContent = text;
  $("toast").hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => { $("toast").hidden = true; }, 6000);
}

// The end of the conversation stays in sight unless one has scrolled away from it.
let follows = true;
function toEnd(force) {
  if (force) follows = true;
  if (follows) $("scroll").scrollTop = $("scroll").scrollHeight;
}
$("scroll").addEventListener("scroll", () => {
  const { scrollTop, scrollHeight, clientHeight } = $("scroll");
  follows = scrollHeight - scrollTop - clientHeight < 60;
  $("to-end").hidden = follows;
});
$("to-end").addEventListener("click", () => toEnd(true));

// Conversations.

async function keep(of = chat) {
  if (!Object.keys(of.nodes).length) return;
  of.updated = Date.now();
  known = [of, ...known.filter((one) => one !== of)];
  try {
    await chats.save(of);
  } catch (error) {
    if (error.name === "QuotaExceededError") toast("This browser's storage is full, so the conversation is not kept: delete some that have images");
    else toast(`The conversation cannot be kept in this browser: ${error.message}`);
  }
}

async function forget(one) {
  if (!confirm(`Delete “${one.title || "New chat"}”?`)) return;
  if (running?.chat === one) running.control.abort();
  known = known.filter((other) => other !== one);
  await chats.forget(one);
  if (one === chat) show(chats.newChat(defaults()));
  else showChats();
}

function fresh() {
  show(chats.newChat({ ...defaults(), model: chat.settings.model }));
  hideSide();
  $("input").focus();
}

// An answer.

async function answer(node, goOn = false) {
  const from = chat, control = new AbortController();
  running = { chat: from, node, control };
  delete node.error;
  node.stopped = false;
  showAll();
  toEnd(true);
  const shown = chats.path(from);
  const before = shown.slice(0, shown.indexOf(node) + (goOn ? 1 : 0));
  const began = performance.now();
  let first = 0, drawn = false, had = 0, pause = 0;
  // Drawing a block that grows costs more with each delta: it gets at most a third of the tab's time.
  const drawSoon = () => (pause > 16 ? setTimeout(draw, pause) : requestAnimationFrame(draw));
  const draw = () => {
    drawn = false;
    const start = performance.now();
    const made = from === chat && document.querySelector(`[data-id="${node.id}"]`);
    if (made) updateAnswer(made, from, node, actions, running?.node === node);
    if (from === chat) { showGauge(); toEnd(); }
    pause = 2 * (performance.now() - start);
  };
  try {
    const on = Object.keys(servers).filter((name) => servers[name].status === "ready" && !(from.settings.servers_off ?? []).includes(name));
    const asked = { messages: chats.messagesOf(before, from.settings.system), settings: from.settings, servers: goOn ? [] : on, goOn, signal: control.signal };
    for await (const event of api.ask(asked)) {
      chats.apply(node, event);
      const now = performance.now();
      if (event.kind === "usage") {
        had ||= event.completion;
        const seconds = (now - first) / 1000;
        if (first && event.completion > had && seconds > 0.05) node.speed = (event.completion - had) / seconds;
      } else if (!first && event.kind !== "finish") {
        first = now;
        node.first = (now - began) / 1000;
      }
      if (!drawn) {
        drawn = true;
        drawSoon();
      }
    }
  } catch (error) {
    if (control.signal.aborted) node.stopped = true;
    else {
      node.error = error.message;
      if (error.status === 401) askKey();
    }
  } finally {
    running = null;
    await keep(from);
    if (from === chat) showAll();
    else showChats();
    if (models.some((one) => one.status)) readModels(); // another one of several may be loaded now
    toEnd();
  }
}

const reply = (parent) => answer(chats.add(chat, parent, { role: "assistant", items: [] }));

function submit() {
  const text = $("input").value.trim();
  if ((!text && !files.length && !images.length) || running || reading) return;
  const parent = chats.path(chat).at(-1)?.id;
  const node = chats.add(chat, parent, { role: "user", text, ...(files.length ? { files } : {}), ...(images.length ? { images } : {}) });
  chat.title ||= (text || (files[0] ?? images[0]).name).replace(/\s+/g, " ").slice(0, 60);
  files = [];
  images = [];
  $("input").value = "";
  grow();
  reply(node.id);
}

const actions = {
  copy: async (text) => { await copyText(text); toast("Copied"); },
  chosen: () => { keep(); showAll(); },
  again: (node) => { if (!running) reply(node.parent); },
  goOn: (node) => { if (!running) answer(node, true); },
  edit(node, text) {
    const { files: given, images: shown } = node;
    if (running || !(text.trim() || shown)) return;
    const made = chats.add(chat, node.parent, { role: "user", text: text.trim(), ...(given && { files: given }), ...(shown && { images: shown }) });
    reply(made.id);
  },
  remove(node) {
    if (running?.chat === chat) running.control.abort();
    chats.remove(chat, node);
    keep();
    showAll();
  },
  result(node, item, text) {
    item.result = text;
    keep();
    if (node.items.some((one) => one.type === "call" && one.result === undefined)) showAll();
    else if (!running) reply(node.id);
  },
};

// Files and images.

let reading = 0; // images that are being scaled down
async function attach(list) {
  const into = chat; // images take a while, in which one may go to another conversation
  for (const file of list) {
    if (isPicture(file)) { await attachImage(file, into); continue; }
    if (file.size > 4 * MAX_FILE) { toast(`${file.name} is too large: up to ${MAX_FILE >> 20} million characters`); continue; }
    const text = await file.text();
    if (text.includes("\0") || text.includes("\ufffd")) toast(`${file.name} is no text`);
    else if (text.length > MAX_FILE) toast(`${file.name} is too large: up to ${MAX_FILE >> 20} million characters`);
    else files.push({ name: file.name, text });
  }
  showComposer();
}

async function attachImage(file, into) {
  const limits = takesImages();
  const had = [{ images }, ...chats.path(chat)].flatMap((node) => node.images ?? []).length;
  if (!limits) return toast(`${served()?.id ?? "The model"} takes no images`);
  if (had >= limits.per_prompt) return toast(`A conversation with ${served().id} has at most ${limits.per_prompt} images`);
  reading++;
  try {
    const image = await readImage(file, limits.pixels);
    if (chat === into) images.push(image);
  } catch (error) {
    toast(`${file.name} cannot be shown: ${error.message}`);
  } finally {
    reading--;
  }
}

let dragged = 0;
addEventListener("dragenter", (event) => { if (event.dataTransfer?.types.includes("Files")) { dragged++; $("drop").hidden = false; } });
addEventListener("dragleave", () => { dragged = Math.max(0, dragged - 1); $("drop").hidden = !dragged; });
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => {
  event.preventDefault();
  dragged = 0;
  $("drop").hidden = true;
  attach(event.dataTransfer.files);
});
$("attach").addEventListener("click", () => $("pick").click());
$("pick").addEventListener("change", () => { attach([...$("pick").files]); $("pick").value = ""; });
$("attach-image").addEventListener("click", () => $("pick-image").click());
$("pick-image").addEventListener("change", () => { attach([...$("pick-image").files]); $("pick-image").value = ""; $("input").focus(); });
$("input").addEventListener("paste", (event) => { if (event.clipboardData.files.length) attach([...event.clipboardData.files]); });

$("export").addEventListener("click", () => {
  const url = URL.createObjectURL(new Blob([chats.asFile(known)], { type: "application/json" }));
  el("a", { href: url, download: `phalanx-chats-${new Date().toISOString().slice(0, 10)}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
});
$("import").addEventListener("click", () => $("pick-import").click());
$("pick-import").addEventListener("change", async () => {
  try {
    const read = chats.fromFile(await $("pick-import").files[0].text());
    for (const one of read) await chats.save(one);
    known = await chats.all();
    toast(`${read.length} conversations were added`);
    showChats();
  } catch (error) {
    toast(`Nothing was added: ${error.message}`);
  }
  $("pick-import").value = "";
});

// The server.

function askKey() {
  $("key-input").value = "";
  if (!$("key").open) $("key").showModal();
}
$("key").addEventListener("close", () => {
  if ($("key").returnValue !== "ok") return;
  api.key.set($("key-input").value.trim(), $("key-keep").checked);
  readModels();
  $("input").focus();
});

async function readModels() {
  try {
    models = await api.models();
    servers = await api.toolServers();
  } catch (error) {
    if (error.status === 401) askKey();
    return;
  }
  $("model").replaceChildren(...models.map((one) => el("option", { value: one.id }, (one.status ?? "loaded") === "loaded" ? one.id : `${one.id} (${one.status})`)));
  $("model").value = chat.settings.model || models[0]?.id;
  if ($("model").selectedIndex < 0) $("model").selectedIndex = 0;
  showComposer();
  showGauge();
}
$("model").addEventListener("change", () => { chat.settings.model = $("model").value; keep(); showGauge(); showComposer(); });

let was = "";
async function watch() {
  const state = await api.health();
  const { done, total, phase } = state.progress ?? {};
  const words = {
    ready: state.running ? `${state.running} running${state.waiting ? `, ${state.waiting} waiting` : ""}` : "",
    loading: `loading: ${phase ?? ""}${total ? ` ${Math.floor((100 * done) / total)} %` : ""}`,
    unreachable: "the server does not answer",
  };
  $("status").textContent = words[state.status] ?? `${state.status}${state.message ? `: ${state.message}` : ""}`;
  $("dot").className = `dot ${state.status}`;
  $("dot").title = state.status;
  if (state.status === "ready" && was !== "ready") readModels();
  was = state.status;
  setTimeout(watch, document.hidden ? 20_000 : state.status === "ready" ? 4000 : 1000);
}

// Settings, keys of the keyboard, and the rest of the frame.

function openSettings() {
  $("settings").hidden = false;
  document.body.classList.toggle("with-settings", true);
  showSettings($("settings"), chat.settings, { changed: () => keep(), close: closeSettings, askKey });
}
function closeSettings() {
  $("settings").hidden = true;
  document.body.classList.toggle("with-settings", false);
}
$("open-settings").addEventListener("click", () => ($("settings").hidden ? openSettings() : closeSettings()));
$("think").addEventListener("click", () => {
  const order = Object.keys(THINKING);
  chat.settings.thinking = order[(order.indexOf(chat.settings.thinking ?? "") + 1) % order.length];
  keep();
  showComposer();
});

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  localStorage.setItem("phalanx.theme", theme);
  $("theme").title = `Theme: ${theme || "as the system"}`;
}
$("theme").addEventListener("click", () => {
  const order = ["", "dark", "light"];
  setTheme(order[(order.indexOf(document.documentElement.dataset.theme ?? "") + 1) % order.length]);
});

const hideSide = () => document.body.classList.remove("side");
$("open-side").addEventListener("click", () => document.body.classList.toggle(narrow.matches ? "side" : "no-side"));
$("close-side").addEventListener("click", () => (narrow.matches ? hideSide() : document.body.classList.add("no-side")));
$("shade").addEventListener("click", hideSide);
$("new").addEventListener("click", fresh);
$("search").addEventListener("input", showChats);
$("help-button").addEventListener("click", () => $("help").showModal());
$("stop").addEventListener("click", () => running?.control.abort());
$("composer").addEventListener("submit", (event) => { event.preventDefault(); submit(); });

function grow() {
  $("input").style.setProperty("height", "auto");
  $("input").style.setProperty("height", `${Math.min($("input").scrollHeight, 260)}px`);
}
$("input").addEventListener("input", grow);
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  } else if (event.key === "ArrowUp" && !$("input").value && !running) {
    const last = chats.path(chat).filter((node) => node.role === "user").at(-1);
    const made = last && document.querySelector(`[data-id="${last.id}"]`);
    if (made) { event.preventDefault(); edit(made, last, actions); }
  }
});

addEventListener("keydown", (event) => {
  const writing = /^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement?.tagName);
  const command = event.ctrlKey || event.metaKey;
  const pressed = event.key.toLowerCase();
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    if (running?.chat === chat) running.control.abort();
    else if (!$("settings").hidden) closeSettings();
    else hideSide();
  } else if (command && pressed === "k") document.body.classList.remove("no-side"), document.body.classList.toggle("side", narrow.matches), $("search").focus();
  else if (command && event.shiftKey && pressed === "o") fresh();
  else if (command && pressed === ",") openSettings();
  else if (!writing && !command && event.key === "/") $("input").focus();
  else if (!writing && !command && event.key === "?") $("help").showModal();
  else return;
  if (event.key !== "Escape") event.preventDefault();
});

setTheme(localStorage.getItem("phalanx.theme") ?? "");
known = await chats.all().catch((error) => { toast(`Conversations cannot be kept: ${error.message}`); return []; });
showAll();
watch();
