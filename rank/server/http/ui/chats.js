// Conversations as trees: every message has a parent, and the one that is shown of its siblings is `chosen`.
// They are kept in the browser's IndexedDB, one record each.

const ROOT = "root";
const NAME = "phalanx";

export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (n) => n.toString(16).padStart(2, "0")).join("");

export function newChat(settings) {
  const now = Date.now();
  return { id: newId(), title: "", created: now, updated: now, settings: { ...settings }, nodes: {}, chosen: {} };
}

// Add a message below another one, and show it. An assistant's has `items`, a user's `text`, `files` and `images`.
export function add(chat, parent, node) {
  const made = { id: newId(), parent: parent ?? ROOT, time: Date.now(), ...node };
  chat.nodes[made.id] = made;
  chat.chosen[made.parent] = made.id;
  return made;
}

const children = (chat, parent) => Object.values(chat.nodes).filter((node) => node.parent === parent);

export const siblings = (chat, node) => children(chat, node.parent);

// The messages that are shown, from the first on.
export function path(chat) {
  const shown = [];
  for (let id = chat.chosen[ROOT]; id && chat.nodes[id]; id = chat.chosen[id]) shown.push(chat.nodes[id]);
  return shown;
}

export function choose(chat, node) {
  chat.chosen[node.parent] = node.id;
}

// Remove a message with all below it; a sibling takes its place.
export function remove(chat, node) {
  const left = siblings(chat, node).filter((one) => one !== node);
  if (chat.chosen[node.parent] === node.id) chat.chosen[node.parent] = left.at(-1)?.id;
  const gone = [node.id];
  for (const id of gone) {
    gone.push(...children(chat, id).map((one) => one.id));
    delete chat.nodes[id];
    delete chat.chosen[id];
  }
}

export function userText(node) {
  const files = (node.files ?? []).map((file) => `\`${file.name}\`:\n\n~~~~\n${file.text}\n~~~~`);
  return [...files, node.text].filter(Boolean).join("\n\n");
}

// A user's message as OpenAI has it: images first, as templates of most models expect them.
function userContent(node) {
  const text = userText(node);
  if (!node.images?.length) return text;
  const shown = node.images.map((image) => ({ type: "image_url", image_url: { url: image.url } }));
  return text ? [...shown, { type: "text", text }] : shown;
}

// The messages for the server. Reasoning of earlier turns is left out, as templates do.
export function messagesOf(nodes, system) {
  const made = system ? [{ role: "system", content: system }] : [];
  for (const node of nodes) {
    if (node.role === "user") made.push({ role: "user", content: userContent(node) });
    else made.push(...assistantMessages(node.items));
  }
  return made;
}

function assistantMessages(items) {
  const made = [];
  let content = "", calls = [];
  const flush = () => {
    if (!content && !calls.length) return;
    const message = { role: "assistant", content };
    if (calls.length) {
      message.tool_calls = calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given || "{}" } }));
    }
    made.push(message);
    for (const call of calls) made.push({ role: "tool", tool_call_id: call.id, content: call.result ?? "" });
    content = "";
    calls = [];
  };
  for (const item of items) {
    if (item.type === "text") {
      if (calls.length) flush();
      content += item.text;
    } else if (item.type === "call") calls.push(item);
  }
  flush();
  return made;
}

// Put one event of api.js into an assistant's items.
export function apply(node, event) {
  const last = node.items.at(-1);
  if (event.kind === "text" || event.kind === "reasoning") {
    if (last?.type === event.kind) last.text += event.text;
    else node.items.push({ type: event.kind, text: event.text });
  } else if (event.kind === "call") {
    node.items.push({ type: "call", id: event.id, name: event.name, server: event.server, arguments: "" });
  } else if (event.kind === "arguments" || event.kind === "result") {
    const call = node.items.find((item) => item.id === event.id);
    if (event.kind === "arguments") call.arguments += event.text;
    else Object.assign(call, { result: event.text, failed: event.failed });
  } else if (event.kind === "usage") {
    node.usage = { prompt: event.prompt, completion: event.completion, cached: event.cached };
  } else if (event.kind === "finish") node.finish = event.reason;
}

export const plainText = (node) => node.role === "user"
  ? node.text : node.items.filter((item) => item.type === "text").map((item) => item.text).join("");

export function matches(chat, words) {
  const text = [chat.title, ...Object.values(chat.nodes).map(plainText)].join("\n").toLowerCase();
  return words.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

// The store.

const opened = new Promise((resolve, reject) => {
  const request = indexedDB.open(NAME, 1);
  request.onupgradeneeded = () => request.result.createObjectStore("chats", { keyPath: "id" });
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

async function run(mode, work) {
  const transaction = (await opened).transaction("chats", mode);
  return new Promise((resolve, reject) => {
    const request = work(transaction.objectStore("chats"));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = () => reject(transaction.error ?? request.error); // a full disk shows here alone
  });
}

export const all = async () => (await run("readonly", (store) => store.getAll())).sort((a, b) => b.updated - a.updated);
export const save = (chat) => run("readwrite", (store) => store.put(structuredClone(chat)));
export const forget = (chat) => run("readwrite", (store) => store.delete(chat.id));

export const asFile = (chats) => JSON.stringify({ format: "phalanx-chats", version: 1, chats }, null, 1);

const isImage = (image) => typeof image.name === "string" && /^data:image\/(png|jpeg|webp|gif);base64,/.test(image.url);

// The conversations of a file that was exported. Throws an Error with a message for users.
export function fromFile(text) {
  let read;
  try {
    read = JSON.parse(text);
  } catch {
    throw new Error("this file is not JSON");
  }
  if (read?.format !== "phalanx-chats" || !Array.isArray(read.chats)) throw new Error("this is no file of exported conversations");
  for (const chat of read.chats) {
    const nodes = Object.values(chat.nodes ?? {});
    const good = typeof chat.id === "string" && chat.chosen && nodes.every((node) => typeof node.id === "string" &&
      (node.role === "user" ? typeof node.text === "string" && (node.images ?? []).every(isImage) : node.role === "assistant" && Array.isArray(node.items)));
    if (!good) throw new Error("a conversation in this file is damaged");
  }
  return read.chats.map((chat) => ({ ...newChat({}), ...chat }));
}
