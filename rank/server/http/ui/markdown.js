// Markdown to DOM nodes: what models write of CommonMark and GitHub's tables, with math. No HTML is ever parsed, so a
// text cannot bring its own elements, scripts or images.

import { math } from "./math.js";
import { highlight } from "./highlight.js";

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const LIST = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const QUOTE = /^ {0,3}>\s?/;
const TABLE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

export function el(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== undefined && value !== null) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== undefined && child !== null && child !== false));
  return made;
}

// The text's blocks: {kind, lines, …}. The last one may still grow while the text is written.
export function blocks(text) {
  const lines = text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n");
  const found = [];
  let i = 0;
  const until = (over) => {
    const from = i;
    while (i < lines.length && !over(lines[i])) i++;
    return lines.slice(from, i);
  };
  while (i < lines.length) {
    const line = lines[i];
    let match;
    if (!line.trim()) i++;
    else if ((match = FENCE.exec(line))) {
      const [, indent, fence, language] = match;
      i++;
      const close = new RegExp(`^ {0,3}${fence[0]}{${fence.length},} *$`);
      const content = until((one) => close.test(one)).map((one) => one.replace(new RegExp(`^ {0,${indent.length}}`), ""));
      i++;
      found.push({ kind: "code", language, text: content.join("\n") });
    } else if (/^\s*(\$\$|\\\[)/.test(line)) {
      const close = line.trim().startsWith("$$") ? "$$" : "\\]";
      const rest = line.trim().slice(2);
      if (rest.includes(close)) {
        i++;
        found.push({ kind: "math", text: rest.slice(0, rest.indexOf(close)) });
        const after = rest.slice(rest.indexOf(close) + 2).trim();
        if (after) found.push({ kind: "text", text: after });
      } else {
        i++;
        const content = [rest, ...until((one) => one.includes(close))];
        if (i < lines.length) content.push(lines[i].slice(0, lines[i].indexOf(close)));
        i++;
        found.push({ kind: "math", text: content.join("\n") });
      }
    } else if ((match = HEADING.exec(line))) {
      i++;
      found.push({ kind: "heading", level: match[1].length, text: match[2] });
    } else if (RULE.test(line)) {
      i++;
      found.push({ kind: "rule" });
    } else if (QUOTE.test(line)) {
      found.push({ kind: "quote", text: until((one) => !QUOTE.test(one)).map((one) => one.replace(QUOTE, "")).join("\n") });
    } else if (LIST.test(line)) {
      const content = listLines(lines, i);
      i += content.length;
      found.push({ kind: "list", text: content.join("\n") });
    } else if (line.includes("|") && TABLE.test(lines[i + 1] ?? "") && lines[i + 1].includes("-")) {
      found.push({ kind: "table", text: until((one) => !one.trim() || !one.includes("|")).join("\n") });
    } else {
      const from = i++;
      while (i < lines.length && lines[i].trim() && !starts(lines[i]) && !/^\s*(\$\$|\\\[)/.test(lines[i])) i++;
      found.push({ kind: "text", text: lines.slice(from, i).join("\n") });
    }
  }
  return found;
}

// The lines of a list whose first item begins at `from`.
function listLines(lines, from) {
  const [, indent, marker] = LIST.exec(lines[from]);
  const first = indent.length, ordered = /\d/.test(marker);
  let i = from + 1;
  while (i < lines.length) {
    const one = lines[i], item = LIST.exec(one);
    const next = lines[i + 1] ?? "";
    if (item ? item[1].length < first || (item[1].length < first + 2 && /\d/.test(item[2]) !== ordered) || RULE.test(one) : one.trim() ? !/^ {2,}/.test(one) && (!lines[i - 1].trim() || starts(one))
      : !(/^ {2,}\S/.test(next) || LIST.test(next))) break;
    i++;
  }
  return lines.slice(from, i);
}

const starts = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || LIST.test(line);

const render = {
  text: (block) => el("p", {}, inline(block.text)),
  heading: (block) => el(`h${block.level}`, {}, inline(block.text)),
  rule: () => el("hr"),
  quote: (block) => el("blockquote", {}, markdown(block.text)),
  math: (block) => el("div", { class: "math" }, math(block.text.trim(), true)),
  code: (block) => codeBlock(block.text, block.language),
  list: (block) => list(block.text),
  table: (block) => table(block.text),
};

export const markdown = (text) => blocks(text).map((block) => render[block.kind](block));

// Show a text that grows: only blocks that changed since the last call are made anew.
export function update(place, text) {
  const wanted = blocks(text);
  const had = place.shown ?? [];
  let same = 0;
  while (same < wanted.length && same < had.length && JSON.stringify(wanted[same]) === had[same]) same++;
  while (place.childNodes.length > same) place.lastChild.remove();
  place.append(...wanted.slice(same).map((block) => render[block.kind](block)));
  place.shown = wanted.map((block) => JSON.stringify(block));
}

export function codeBlock(text, language) {
  const copy = el("button", { class: "copy", type: "button", title: "Copy the code" }, "Copy");
  copy.addEventListener("click", async () => {
    await copyText(text);
    copy.textContent = "Copied";
    setTimeout(() => { copy.textContent = "Copy"; }, 1500);
  });
  const code = el("code", {}, highlight(text, language));
  return el("div", { class: "code" }, el("div", { class: "code-head" }, el("span", {}, language || "text"), copy), el("pre", { tabindex: "0" }, code));
}

// The clipboard's interface is there on HTTPS and localhost only.
export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = el("textarea", { class: "offscreen" });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

function list(text) {
  const lines = text.split("\n");
  const [, indent, marker] = LIST.exec(lines[0]);
  const ordered = /\d/.test(marker);
  const items = [];
  let width = 0;
  for (const line of lines) {
    const match = LIST.exec(line);
    if (match && match[1].length <= indent.length + 1) {
      width = Math.min(match[0].length, match[1].length + match[2].length + 4) || 2;
      items.push([line.slice(match[0].length)]);
    } else items.at(-1).push(line.replace(new RegExp(`^ {0,${Math.max(width, 2)}}`), ""));
  }
  const loose = items.some((item) => item.some((line, i) => !line.trim() && i < item.length - 1 && i > 0));
  const made = items.map((item) => {
    const task = /^\[([ xX])\] /.exec(item[0]);
    const content = markdown((task ? item[0].slice(4) : item[0]) + "\n" + item.slice(1).join("\n"));
    const parts = content.flatMap((part) => (!loose && part.tagName === "P" ? [...part.childNodes] : [part]));
    if (task) parts.unshift(el("input", { type: "checkbox", disabled: true, checked: task[1] !== " " }), " ");
    return el("li", task ? { class: "task" } : {}, parts);
  });
  return ordered ? el("ol", { start: parseInt(marker, 10) }, made) : el("ul", {}, made);
}

function cells(line) {
  const trimmed = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return trimmed.split(/(?<!\\)\|/).map((cell) => cell.replace(/\\\|/g, "|").trim());
}

function table(text) {
  const [head, marks, ...rows] = text.split("\n");
  const sides = cells(marks).map((mark) => (/^:-+:$/.test(mark) ? "center" : /-:$/.test(mark) ? "right" : ""));
  const row = (line, tag) => el("tr", {}, cells(line).slice(0, sides.length).map((cell, i) => el(tag, { class: sides[i] || false }, inline(cell))));
  return el("div", { class: "table" }, el("table", {}, el("thead", {}, row(head, "th")), el("tbody", {}, rows.map((line) => row(line, "td")))));
}

// Inline marks, each with the pattern that begins where it stands; the first that fits wins.
const MARKS = [
  [/^\\\(([^]+?)\\\)/, ([, text]) => math(text.trim(), false)],
  [/^\\\[([^]+?)\\\]/, ([, text]) => math(text.trim(), true)],
  [/^\\([!-/:-@[-`{-~])/, ([, char]) => char],
  [/^(`+)([^]*?[^`])\1(?!`)/, ([, , text]) => el("code", {}, text.replace(/\n/g, " ").replace(/^ (.+) $/, "$1"))],
  [/^\$\$([^]+?)\$\$/, ([, text]) => math(text.trim(), true)],
  [/^\$(?![\s\d][^$]*\s\$)([^\s$](?:[^$\n]*[^\s$\\])?)\$(?!\d)/, ([, text]) => math(text, false)],
  [/^(\*\*|__)(?=\S)([^]*?\S)\1/, ([, , text]) => el("strong", {}, inline(text))],
  [/^\*(?=[^\s*])((?:[^*]|\*\*[^*]+\*\*)*?[^\s*])\*(?!\*)/, ([, text]) => el("em", {}, inline(text))],
  [/^_(?=[^\s_])([^_]*?[^\s_])_(?!\w)/, ([, text]) => el("em", {}, inline(text))],
  [/^~~(?=\S)([^]*?\S)~~/, ([, text]) => el("del", {}, inline(text))],
  [/^!?\[((?:[^[\]]|\[[^\]]*\])*)\]\(\s*<?([^\s)>]+)>?(?:\s+["'][^)]*["'])?\s*\)/, ([all, text, to]) => link(to, inline(text || to), all)],
  [/^<((?:https?:\/\/|mailto:)[^\s>]+)>/, ([all, to]) => link(to, [to], all)],
  [/^https?:\/\/[^\s<>"'`]*[^\s<>"'`.,;:!?)\]}*_]/, ([to]) => link(to, [to], to)],
  [/^( {2,}|\\)\n/, () => el("br")],
];
const PLAIN = /^(?:[^\\`$*_~![<h \n]+| (?! *\n)|[h ](?!ttps?:))+/;

function link(to, content, all) {
  if (!/^(https?:|mailto:)/i.test(to)) return all;
  return el("a", { href: to, target: "_blank", rel: "noopener noreferrer nofollow" }, content);
}

function mark(text) {
  for (const [pattern, make] of MARKS) {
    const match = pattern.exec(text);
    if (match) return { length: match[0].length, node: make(match) };
  }
}

export function inline(text) {
  const made = [];
  let plain = "", word = false;
  while (text) {
    const skipped = PLAIN.exec(text)?.[0];
    if (skipped) {
      plain += skipped;
      text = text.slice(skipped.length);
      word = /\w$/.test(skipped);
      continue;
    }
    const found = word && text[0] === "_" ? undefined : mark(text);
    if (found) {
      if (plain) made.push(plain);
      plain = "";
      made.push(found.node);
      text = text.slice(found.length);
      word = false;
    } else {
      plain += text[0];
      word = /\w/.test(text[0]);
      text = text.slice(1);
    }
  }
  if (plain) made.push(plain);
  return made;
}
