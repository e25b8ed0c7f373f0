// Markdown, math and code of a model's answer, by the libraries in vendor/ (scripts of index.html). The text is never
// trusted: markdown-it takes no HTML, and DOMPurify lets through only the elements named here. Each library gets a
// bounded segment of text, so what an answer costs grows with its length and nothing else.

import { copyText, el } from "./dom.js";

const { DOMPurify, hljs, markdownit, temml } = globalThis;

const MAX_BLOCK = 16_000; // characters that markdown-it gets at once; a longer block is cut
const MAX_NESTING = 40; // of quotes, lists and emphasis
const MAX_CODE = 20_000; // characters that are coloured, in lines of
const MAX_CODE_LINE = 500; // at most: some grammars take the square of it
const MAX_TEX = 2_000; // characters of one formula
const MAX_TEX_DEPTH = 30; // of braces and of the MathML made
const MAX_FORMULAS = 200; // in one piece
const MAX_AT_ONCE = 32_000; // characters before the browser may do something else
const SHORT = 2_000; // characters of a block that grows: it is made anew with each delta

const CLEAN = {
  ALLOWED_TAGS: "a blockquote br code del div em h1 h2 h3 h4 h5 h6 hr li ol p pre s span strong table tbody td th thead tr ul".split(" "),
  ALLOWED_ATTR: ["class", "href", "rel", "start", "target"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const parser = markdownit({ html: false, linkify: true, maxNesting: MAX_NESTING });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
// No pictures are loaded. References would make a block depend on others, which may not have come yet.
parser.disable(["image", "reference"]);
parser.validateLink = (url) => /^(https?:|mailto:)/i.test(url);
parser.inline.ruler.before("escape", "math", inlineMath);
parser.block.ruler.before("fence", "math", blockMath, { alt: ["paragraph", "blockquote", "list"] });
parser.core.ruler.push("marks", (state) => state.tokens.forEach(mark));

// Inline styles are against the page's policy; links open elsewhere and tell nothing.
function mark(token) {
  const style = token.attrGet("style");
  if (style) token.attrs = [["class", style.replace("text-align:", "")]];
  for (const child of token.children ?? []) {
    if (child.type === "link_open") for (const [name, value] of [["target", "_blank"], ["rel", "noopener noreferrer nofollow"]]) child.attrSet(name, value);
  }
}

// Slots that the output of the code and math libraries replaces once the Markdown is clean.
function slot(kind) {
  return (tokens, i, options, env) => `<${kind} class="slot">${env.slots.push(tokens[i]) - 1}</${kind}>`;
}
for (const name of ["fence", "code_block", "math_block"]) parser.renderer.rules[name] = slot("div");
parser.renderer.rules.math_inline = slot("span");
parser.renderer.rules.table_open = () => '<div class="table"><table>';
parser.renderer.rules.table_close = () => "</table></div>";

const CLOSE = { "$$": "$$", "\\[": "\\]", "\\(": "\\)", "$": "$" };

function inlineMath(state, silent) {
  const { src, pos } = state;
  if (src[pos] !== "$" && src[pos] !== "\\") return false;
  const open = CLOSE[src.slice(pos, pos + 2)] ? src.slice(pos, pos + 2) : src[pos];
  const close = CLOSE[open];
  if (!close) return false;
  const rest = src.slice(pos + open.length, Math.min(state.posMax, pos + open.length + MAX_TEX));
  const length = rest.indexOf(close);
  const text = rest.slice(0, length);
  if (length < 1 || !text.trim()) return false;
  // A dollar may be money: a formula's have no blank inside, and no number follows.
  if (open === "$" && (/^\s|[\s\\]$|\n/.test(text) || /\d/.test(rest[length + 1] ?? ""))) return false;
  if (!silent) Object.assign(state.push("math_inline", "", 0), { content: text.trim(), info: open === "$$" || open === "\\[" ? "display" : "" });
  state.pos += open.length + length + close.length;
  return true;
}

function blockMath(state, from, to, silent) {
  const line = (i) => state.src.slice(state.bMarks[i] + state.tShift[i], state.eMarks[i]);
  const open = line(from).slice(0, 2);
  if (open !== "$$" && open !== "\\[") return false;
  const lines = [line(from).slice(2)];
  let i = from, length = 0;
  while (!lines.at(-1).includes(CLOSE[open])) {
    length += lines.at(-1).length;
    if (++i >= to || state.sCount[i] < state.blkIndent || length > MAX_TEX) return false;
    lines.push(line(i));
  }
  const last = lines.pop();
  const at = last.indexOf(CLOSE[open]);
  if (last.slice(at + 2).trim()) return false; // text follows on the line: an inline formula
  if (silent) return true;
  Object.assign(state.push("math_block", "", 0), { content: [...lines, last.slice(0, at)].join("\n").trim(), info: "display", map: [from, i + 1] });
  state.line = i + 1;
  return true;
}

function depth(root) {
  let level = 0, deepest = 0;
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_ELEMENT);
  for (;;) {
    if (walker.firstChild()) deepest = Math.max(deepest, ++level);
    else {
      while (!walker.nextSibling()) {
        if (!walker.parentNode()) return deepest;
        level--;
      }
    }
  }
}

// Whether braces and environments nest deeper than the library, which recurses, is given.
function tooDeep(text) {
  let level = 0;
  for (const [sign] of text.matchAll(/[{}]|\\(?:left|right|begin|end)(?![a-zA-Z])/g)) {
    level += /^(\{|\\left|\\begin)$/.test(sign) ? 1 : -1;
    if (level > MAX_TEX_DEPTH) return true;
  }
  return false;
}

// A formula as MathML; what is no formula, or is too large, as it is written.
function math(text, display) {
  const place = el(display ? "div" : "span", { class: "math" });
  try {
    if (text.length > MAX_TEX || tooDeep(text)) throw new RangeError("too large");
    temml.render(text, place, { displayMode: display, throwOnError: true, trust: false, maxExpand: 200, maxSize: [20, 200], annotate: false });
    if (depth(place) > 4 * MAX_TEX_DEPTH) throw new RangeError("too deep");
  } catch {
    place.replaceChildren(el("code", {}, text));
  }
  return place;
}

function highlighted(text, language) {
  if (!hljs.getLanguage(language) || text.length > MAX_CODE || text.split("\n").some((line) => line.length > MAX_CODE_LINE)) return text;
  return DOMPurify.sanitize(hljs.highlight(text, { language, ignoreIllegals: true }).value, { ...CLEAN, ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"] });
}

export function codeBlock(text, language, growing = false) {
  const code = el("code", {}, growing ? text : highlighted(text, language));
  const copy = el("button", { class: "copy", type: "button", title: "Copy the code" }, "Copy");
  copy.addEventListener("click", async () => {
    await copyText(code.textContent);
    copy.textContent = "Copied";
    setTimeout(() => { copy.textContent = "Copy"; }, 1500);
  });
  return el("div", { class: "code" }, el("div", { class: "code-head" }, el("span", {}, language || "text"), copy), el("pre", { tabindex: "0" }, code));
}

const language = (token) => token.info.trim().split(/\s+/)[0].slice(0, 40);

function piece(text) {
  const env = { slots: [] };
  const made = DOMPurify.sanitize(parser.render(text, env), CLEAN);
  let formulas = 0;
  for (const place of made.querySelectorAll(".slot")) {
    const token = env.slots[Number(place.textContent)];
    if (!token.type.startsWith("math")) place.replaceWith(codeBlock(token.content.replace(/\n$/, ""), language(token)));
    else if (++formulas > MAX_FORMULAS) place.replaceWith(el("code", {}, token.content));
    else place.replaceWith(math(token.content, token.info === "display"));
  }
  for (const item of made.querySelectorAll("li")) {
    const first = item.firstElementChild?.tagName === "P" ? item.firstElementChild.firstChild : item.firstChild;
    const task = first?.nodeType === Node.TEXT_NODE && /^\s*\[([ xX])\] /.exec(first.data);
    if (!task) continue;
    first.data = first.data.slice(task[0].length);
    first.before(el("input", { type: "checkbox", disabled: true, checked: task[1] !== " " }), " ");
    item.classList.add("task");
  }
  return [...made.childNodes];
}

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)[^`\n]*$/;
const LIST = /^ {0,3}([-*+]|\d{1,9}[.)])( |$)/;
const MATH = /^ {0,3}(\$\$|\\\[)/;

// The end of the block that begins at `from`; -1 while it may still grow. Only whole lines decide, so that a text has
// the same blocks however it comes.
function blockEnd(text, from) {
  let at = from, first = null, blank = false, inside = null;
  for (;;) {
    const end = text.indexOf("\n", at);
    if ((end < 0 ? text.length : end) - from > MAX_BLOCK) return at > from ? at : from + MAX_BLOCK;
    if (end < 0) return -1;
    const line = text.slice(at, end);
    const fence = FENCE.exec(line.trimStart());
    const own = line.search(/\S/) < 2 || !LIST.test(first ?? "");
    if (inside) {
      if (line.includes(inside)) inside = null;
    } else if (first === null) {
      if (line.trim()) first = line;
      const [, math] = MATH.exec(line) ?? [];
      if (math && !line.trimStart().slice(2).includes(CLOSE[math])) inside = CLOSE[math];
    } else if (!line.trim()) blank = true;
    else {
      const goesOn = LIST.test(first) ? /^ {2,}|^\t/.test(line) || LIST.test(line) : /^( {4}|\t)/.test(first) && /^( {4}|\t)/.test(line);
      if ((blank && !goesOn) || (own && FENCE.test(line)) || (own && MATH.test(line))) return at;
      blank = false;
      if (fence) inside = fence[1];
    }
    at = end + 1;
  }
}

function codeStart(text, at) {
  const end = text.indexOf("\n", at);
  if (end < 0 || end - at > MAX_BLOCK) return null;
  const match = FENCE.exec(text.slice(at, end));
  return match && { close: new RegExp(`^ {0,3}${match[1][0]}{${match[1].length},}[ \\t]*$`), language: match[2].slice(0, 40), from: end + 1, at: end + 1, node: null };
}

// Takes the lines that have come of a block of code; true once it has ended.
function growCode(state, text) {
  const { code } = state;
  if (!code.node) state.place.append(code.node = codeBlock("", code.language, true));
  let added = "", closed = false;
  while (!closed) {
    const end = text.indexOf("\n", code.at);
    const line = text.slice(code.at, end < 0 ? text.length : end);
    closed = code.close.test(line) && (end >= 0 || !state.running);
    if (!closed && end < 0) {
      if (!state.running) added += line;
      break;
    }
    if (!closed) added += `${line}\n`;
    code.at = end < 0 ? text.length : end + 1;
  }
  if (added) code.node.querySelector("code").append(added);
  if (!closed && state.running) return false;
  const whole = code.node.querySelector("code").textContent.replace(/\n$/, "");
  code.node.replaceWith(codeBlock(whole, code.language));
  state.at = closed ? code.at : text.length;
  return true;
}

// Show a text that grows. Blocks that have ended stay as they are; only the last one is rendered again.
export function update(place, text, running = false) {
  let state = place.shown;
  if (state?.text === text && state.running === running) return;
  clearTimeout(state?.more);
  if (!state || !state.running || !text.startsWith(state.text)) {
    place.replaceChildren();
    state = place.shown = { place, at: 0, last: [], made: 0, code: null, more: 0 };
  }
  Object.assign(state, { text, running });
  goOn(state);
}

// Show the last block, which grows. A longer one is rendered again only if it is an eighth longer, or it took the
// square of its length; until then what has come of it stands below, as it was written.
function grow(state, text) {
  if (state.last.length && (text.length - state.made) * 8 < text.length - SHORT) {
    state.last.at(-1).textContent = text.slice(state.made);
    return;
  }
  drop(state);
  state.last = [...piece(text), ...(state.running ? [el("p", {})] : [])];
  state.made = text.length;
  state.place.append(...state.last);
}

function drop(state) {
  state.last.forEach((node) => node.remove());
  state.last = [];
}

function goOn(state) {
  const { place, text } = state;
  state.more = 0;
  if (!state.running) drop(state);
  const began = state.at;
  while (state.at < text.length) {
    if (state.at - began > MAX_AT_ONCE) {
      state.more = setTimeout(goOn, 0, state);
      return;
    }
    if (text[state.at] === "\n") {
      state.at++;
      continue;
    }
    const end = (state.code ??= codeStart(text, state.at)) ? 0 : blockEnd(text, state.at);
    if (end < 0) {
      grow(state, text.slice(state.at));
      return;
    }
    drop(state);
    if (state.code) {
      if (!growCode(state, text)) return;
      state.code = null;
      continue;
    }
    // Blocks that have ended are made together, as far as they fit.
    let whole = end;
    for (let next = end; next >= 0 && next - state.at <= MAX_BLOCK && !codeStart(text, whole); next = blockEnd(text, whole)) whole = next;
    place.append(...piece(text.slice(state.at, whole)));
    state.at = whole;
  }
}
