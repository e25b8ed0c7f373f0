// TeX as models write it to MathML, which browsers lay out themselves. What is not known is shown as it was written.

const GREEK = "alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ lambda λ mu μ nu ν xi ξ pi π varpi ϖ rho ρ varrho ϱ sigma σ varsigma ς tau τ upsilon υ phi ϕ varphi φ chi χ psi ψ omega ω Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω ell ℓ hbar ℏ partial ∂ nabla ∇ infty ∞ emptyset ∅ varnothing ∅ aleph ℵ Re ℜ Im ℑ imath ı jmath ȷ angle ∠ top ⊤ bot ⊥ degree ° prime ′";
const SIGNS = "times × div ÷ cdot ⋅ pm ± mp ∓ ast ∗ star ⋆ circ ∘ bullet ∙ oplus ⊕ otimes ⊗ odot ⊙ leq ≤ le ≤ geq ≥ ge ≥ neq ≠ ne ≠ approx ≈ equiv ≡ sim ∼ simeq ≃ cong ≅ propto ∝ ll ≪ gg ≫ prec ≺ succ ≻ in ∈ notin ∉ ni ∋ subset ⊂ subseteq ⊆ supset ⊃ supseteq ⊇ cup ∪ cap ∩ setminus ∖ wedge ∧ land ∧ vee ∨ lor ∨ neg ¬ lnot ¬ forall ∀ exists ∃ nexists ∄ to → rightarrow → leftarrow ← gets ← leftrightarrow ↔ Rightarrow ⇒ implies ⟹ Leftarrow ⇐ Leftrightarrow ⇔ iff ⟺ mapsto ↦ longrightarrow ⟶ uparrow ↑ downarrow ↓ ldots … dots … cdots ⋯ vdots ⋮ ddots ⋱ mid ∣ parallel ∥ perp ⟂ models ⊨ vdash ⊢ colon : langle ⟨ rangle ⟩ lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉ lbrace { rbrace } vert | Vert ‖ lvert | rvert | backslash \\ therefore ∴ because ∵ triangle △ square □ blacksquare ■ checkmark ✓ dagger † hookrightarrow ↪ rightharpoonup ⇀";
const BIG = "sum ∑ prod ∏ coprod ∐ int ∫ iint ∬ iiint ∭ oint ∮ bigcup ⋃ bigcap ⋂ bigoplus ⨁ bigotimes ⨂ bigvee ⋁ bigwedge ⋀";
const NAMES = "sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan log ln lg exp max min sup inf lim limsup liminf arg argmax argmin det dim ker deg gcd hom Pr mod";
const ACCENTS = "hat ^ widehat ^ bar ¯ overline ¯ tilde ~ widetilde ~ vec → dot ˙ ddot ¨ overrightarrow → overbrace ⏞ check ˇ";
const SPACES = { ",": "0.167em", ":": "0.222em", ";": "0.278em", " ": "0.25em", "!": "-0.167em", quad: "1em", qquad: "2em", enspace: "0.5em", thinspace: "0.167em" };
const FONTS = { mathbf: "bold", boldsymbol: "bold", bm: "bold", mathbb: "double", mathcal: "script", mathscr: "script", mathfrak: "fraktur", mathrm: "normal", mathit: "", mathsf: "normal", mathtt: "normal" };
const pairs = (text) => { const words = text.split(" "); return new Map(words.flatMap((word, i) => (i % 2 ? [] : [[word, words[i + 1]]]))); };
const LETTERS = pairs(GREEK), OPERATORS = pairs(SIGNS), LARGE = pairs(BIG), OVER = pairs(ACCENTS), FUNCTIONS = new Set(NAMES.split(" "));
const LIMITS = new Set("sum prod coprod bigcup bigcap bigoplus bigotimes bigvee bigwedge lim limsup liminf max min sup inf argmax argmin".split(" "));
const ALPHABETS = { bold: [0x1d400, 0x1d41a, 0x1d7ce], double: [0x1d538, 0x1d552, 0x1d7d8], script: [0x1d49c, 0x1d4b6], fraktur: [0x1d504, 0x1d51e] };
// Letters of these alphabets that Unicode had before the others.
const OLD = { doubleC: "ℂ", doubleH: "ℍ", doubleN: "ℕ", doubleP: "ℙ", doubleQ: "ℚ", doubleR: "ℝ", doubleZ: "ℤ", scriptB: "ℬ", scriptE: "ℰ", scriptF: "ℱ", scriptH: "ℋ", scriptI: "ℐ", scriptL: "ℒ", scriptM: "ℳ", scriptR: "ℛ", scripte: "ℯ", scriptg: "ℊ", scripto: "ℴ", frakturC: "ℭ", frakturH: "ℌ", frakturI: "ℑ", frakturR: "ℜ", frakturZ: "ℨ" };
const FENCES = { pmatrix: "()", bmatrix: "[]", Bmatrix: "{}", vmatrix: "||", Vmatrix: "‖‖", cases: ["{", ""] };

function node(tag, children = [], attributes = {}) {
  const made = document.createElementNS("http://www.w3.org/1998/Math/MathML", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...[children].flat());
  return made;
}

const row = (parts) => (parts.length === 1 ? parts[0] : node("mrow", parts));

function letter(char, font) {
  const code = char.codePointAt(0), starts = ALPHABETS[font];
  if (!starts) return char;
  if (OLD[font + char]) return OLD[font + char];
  if (/[A-Z]/.test(char)) return String.fromCodePoint(starts[0] + code - 65);
  if (/[a-z]/.test(char)) return String.fromCodePoint(starts[1] + code - 97);
  return /\d/.test(char) && starts[2] ? String.fromCodePoint(starts[2] + code - 48) : char;
}

class Parser {
  constructor(text, display) {
    this.tokens = text.match(/\\[a-zA-Z]+\*?|\\[^]|\d+(?:\.\d+)?|\s+|[^]/g) ?? [];
    this.at = 0;
    this.display = display;
    this.font = "";
  }

  get next() {
    while (/^\s/.test(this.tokens[this.at] ?? "")) this.at++;
    return this.tokens[this.at];
  }

  take() {
    const token = this.next;
    this.at++;
    return token;
  }

  // Everything up to one of these tokens, which is left where it is.
  until(...ends) {
    const parts = [];
    while (this.next !== undefined && !ends.includes(this.next)) parts.push(this.scripted());
    return parts;
  }

  group() {
    if (this.next !== "{") return this.next === undefined ? node("mrow") : this.atom();
    this.take();
    const parts = this.until("}");
    this.take();
    return row(parts);
  }

  // The characters of a group as they are.
  raw() {
    if (this.next !== "{") return this.take() ?? "";
    this.at++;
    let depth = 1, text = "";
    while (this.at < this.tokens.length) {
      const token = this.tokens[this.at++];
      depth += token === "{" ? 1 : token === "}" ? -1 : 0;
      if (!depth) break;
      text += token;
    }
    return text;
  }

  scripted() {
    const name = (this.next ?? "").slice(1).replace("*", "");
    let base = this.atom();
    if (this.next === "\\limits" || this.next === "\\nolimits") this.take();
    let below, above;
    for (;;) {
      if (this.next === "_" && !below) below = (this.take(), this.group());
      else if (this.next === "^" && !above) above = (this.take(), this.group());
      else if (this.next === "'" ) {
        let primes = "";
        while (this.next === "'") { this.take(); primes += "′"; }
        above = above ? node("mrow", [node("mo", primes), above]) : node("mo", primes);
      } else break;
    }
    const over = this.display && LIMITS.has(name) || base.localName === "munder" || base.localName === "mover";
    if (below && above) base = node(over ? "munderover" : "msubsup", [base, below, above]);
    else if (below) base = node(over ? "munder" : "msub", [base, below]);
    else if (above) base = node(over ? "mover" : "msup", [base, above]);
    return base;
  }

  atom() {
    const token = this.take();
    if (token === "{") {
      this.at--;
      return this.group();
    }
    if (token.startsWith("\\") && token.length > 1) return this.command(token.slice(1));
    if (/^\d/.test(token)) return node("mn", [...token].map((char) => letter(char, this.font)).join(""));
    if (/^[a-zA-Z]$/.test(token)) return this.identifier(token);
    if (token === "~") return node("mspace", [], { width: "0.333em" });
    if (/^\p{L}$/u.test(token)) return node("mi", token);
    return node("mo", token === "-" ? "−" : token === "*" ? "∗" : token, /[()[\]|/]/.test(token) ? { stretchy: "false" } : {});
  }

  identifier(char) {
    const shown = letter(char, this.font);
    return node("mi", shown, this.font === "normal" || shown !== char ? { mathvariant: "normal" } : {});
  }

  command(whole) {
    const name = whole.replace("*", "");
    if (LETTERS.has(name)) return node("mi", LETTERS.get(name), /^[A-Z]/.test(name) ? { mathvariant: "normal" } : {});
    if (LARGE.has(name)) return node("mo", LARGE.get(name), { movablelimits: this.display ? "false" : "true", largeop: "true" });
    if (OPERATORS.has(name)) return node("mo", OPERATORS.get(name), /vert|angle|floor|ceil|brace/.test(name) ? { stretchy: "false" } : {});
    if (FUNCTIONS.has(name)) return node("mi", name === "argmax" ? "arg max" : name === "argmin" ? "arg min" : name, { mathvariant: "normal" });
    if (OVER.has(name)) return node("mover", [this.group(), node("mo", OVER.get(name), { stretchy: name.length > 5 || name === "overline" ? "true" : "false" })], { accent: "true" });
    if (name in SPACES) return node("mspace", [], { width: SPACES[name] });
    if (name in FONTS) return this.inFont(FONTS[name]);
    if (/^[dt]?frac$|^cfrac$/.test(name)) return node("mfrac", [this.group(), this.group()]);
    if (/^[dt]?binom$/.test(name)) return node("mrow", [node("mo", "("), node("mfrac", [this.group(), this.group()], { linethickness: "0" }), node("mo", ")")]);
    if (name === "sqrt") return this.root();
    if (["text", "textrm", "textbf", "textit", "mbox", "texttt", "textsf"].includes(name)) return node("mtext", this.raw().replace(/^ | $/g, "\u00a0"));
    if (name === "operatorname") return node("mi", this.raw(), { mathvariant: "normal" });
    if (name === "left") return this.fenced();
    if (name === "begin") return this.environment(this.raw());
    if (name === "underbrace") return node("munder", [this.group(), node("mo", "⏟")]);
    if (name === "underline") return node("munder", [this.group(), node("mo", "_", { stretchy: "true" })]);
    if (["overset", "stackrel"].includes(name)) { const above = this.group(); return node("mover", [this.group(), above]); }
    if (name === "underset") { const below = this.group(); return node("munder", [this.group(), below]); }
    if (["boxed", "fbox"].includes(name)) return node("mrow", [this.group()], { class: "boxed" });
    if (["color", "textcolor", "phantom", "tag", "label"].includes(name)) { this.raw(); return node("mrow"); }
    if (name === "pmod" || name === "bmod") return name === "bmod" ? node("mo", "mod") : node("mrow", [node("mo", "("), node("mi", "mod", { mathvariant: "normal" }), node("mspace", [], { width: "0.3em" }), this.group(), node("mo", ")")]);
    if (/^([bB]igg?[lrm]?|displaystyle|textstyle|scriptstyle|limits|nolimits|nonumber|hline|middle)$/.test(name)) return node("mrow");
    if (name === "not") return node("mrow", [node("mo", "¬"), this.group()]);
    if (/^[{}%$#&_]$/.test(name)) return node("mo", name, { stretchy: "false" });
    if (name === "|") return node("mo", "‖", { stretchy: "false" });
    if (name === "\\") return node("mspace", [], { linebreak: "newline" });
    return node("mtext", `\\${whole}`);
  }

  inFont(font) {
    const before = this.font;
    this.font = font;
    const made = this.group();
    this.font = before;
    return made;
  }

  root() {
    if (this.next !== "[") return node("msqrt", this.group());
    this.take();
    const degree = row(this.until("]"));
    this.take();
    return node("mroot", [this.group(), degree]);
  }

  delimiter() {
    const token = this.take() ?? ".";
    if (token === ".") return "";
    const name = token.slice(1);
    return token === "\\|" ? "‖" : token.startsWith("\\") ? OPERATORS.get(name) ?? name : token;
  }

  fenced() {
    const open = this.delimiter();
    const inner = this.until("\\right");
    this.take();
    return node("mrow", [node("mo", open, { stretchy: "true", fence: "true" }), ...inner, node("mo", this.delimiter(), { stretchy: "true", fence: "true" })]);
  }

  environment(name) {
    const kind = name.replace("*", "");
    if (kind === "array" && this.next === "{") this.raw();
    const rows = [[]];
    while (this.next !== undefined && this.next !== "\\end") {
      rows.at(-1).push(node("mtd", this.until("&", "\\\\", "\\end")));
      if (this.next === "\\\\") { this.take(); rows.push([]); } else if (this.next === "&") this.take();
    }
    this.take();
    this.raw();
    if (!rows.at(-1).length || (rows.at(-1).length === 1 && !rows.at(-1)[0].childNodes.length)) rows.pop();
    const aligned = /^(align|aligned|split|eqnarray|gather|gathered|equation)$/.test(kind);
    const table = node("mtable", rows.map((one) => node("mtr", one)), { class: aligned ? "aligned" : kind === "cases" ? "cases" : "matrix", displaystyle: aligned ? "true" : "false" });
    const fences = FENCES[kind];
    if (!fences) return table;
    return node("mrow", [node("mo", fences[0], { stretchy: "true", fence: "true" }), table, node("mo", fences[1], { stretchy: "true", fence: "true" })]);
  }
}

// A formula; `display`: on a line of its own.
export function math(text, display) {
  const parser = new Parser(text, display);
  const parts = [];
  while (parser.next !== undefined) {
    if (["}", "&", "\\right", "\\end"].includes(parser.next)) parser.take(); // it has no beginning: the text may be cut off
    else parts.push(parser.scripted());
  }
  return node("math", node("mrow", parts), display ? { display: "block" } : {});
}
