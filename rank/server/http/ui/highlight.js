// Colours for code: comments, strings, numbers and words that most languages keep for themselves. No grammar of any
// language: a few patterns, of which the first that fits wins.

const WORDS = new Set((
  "abstract and as assert async await begin bool boolean break case catch char class const constexpr continue def default " +
  "defer del delete do double elif else end enum esac except export extends extern false False fi final finally float fn for " +
  "foreach from func function global go goto if impl implements import in int interface is lambda let local long loop match " +
  "mod module mut namespace new nil none None nonlocal not null nullptr of operator or package pass private protected pub " +
  "public raise ref return self short signed sizeof static string struct super switch template then this throw trait true " +
  "True try type typedef typename typeof union unsafe unsigned until use using val var virtual void volatile where while " +
  "with yield select insert update set values create table join on group by order limit having distinct union"
).split(" "));
const HASH = new Set(["python", "py", "sh", "bash", "shell", "zsh", "yaml", "yml", "toml", "ruby", "rb", "r", "perl", "make", "makefile", "dockerfile", "console", ""]);
const NONE = new Set(["text", "txt", "plain", "markdown", "md", "output", "log"]);
const STRING = /^("""[^]*?"""|'''[^]*?'''|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`)/;
const NUMBER = /^(0[xX][\da-fA-F_]+|0[bB][01_]+|\d[\d_]*(\.\d+)?([eE][+-]?\d+)?)/;
const NAME = /^[A-Za-z_$][\w$]*/;

function comment(language) {
  if (HASH.has(language)) return /^#[^\n]*/;
  if (language === "sql" || language === "lua" || language === "haskell") return /^(--[^\n]*|\/\*[^]*?\*\/)/;
  if (language === "html" || language === "xml") return /^<!--[^]*?-->/;
  return /^(\/\/[^\n]*|\/\*[^]*?(\*\/|$))/;
}

function part(kind, text) {
  const made = document.createElement("span");
  made.className = `hl-${kind}`;
  made.textContent = text;
  return made;
}

// The text as nodes.
export function highlight(text, name) {
  const language = (name || "").toLowerCase();
  if (NONE.has(language) || text.length > 100_000) return [text];
  const kinds = [["comment", comment(language)], ["string", STRING], ["number", NUMBER]];
  const made = [];
  let plain = "", at = 0;
  const push = (node) => {
    if (plain) made.push(plain);
    plain = "";
    made.push(node);
  };
  while (at < text.length) {
    const rest = text.slice(at, at + 4000);
    const found = kinds.map(([kind, pattern]) => [kind, pattern.exec(rest)]).find(([, match]) => match);
    const word = !found && NAME.exec(rest);
    if (found) push(part(found[0], found[1][0]));
    else if (word && WORDS.has(word[0])) push(part("word", word[0]));
    else if (word && rest[word[0].length] === "(") push(part("call", word[0]));
    else plain += word ? word[0] : rest[0];
    at += found ? found[1][0].length : word ? word[0].length : 1;
  }
  if (plain) made.push(plain);
  return made;
}
