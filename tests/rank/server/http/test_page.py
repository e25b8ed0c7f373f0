"""The page that people chat on: served with a strict policy, and used in a headless Chromium."""

import hashlib
import json
import os
import re
import time
from pathlib import Path

import pytest
from phalanx.rank import protocol
from phalanx.rank.server.http import page

from .... import browser, retries
from ....fields import each
from ....server import Server
from ...mcp_servers import STDIO, free_port, written
from ..conftest import LiveServer

pytestmark = [pytest.mark.timeout(120), retries.BROWSER]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": {"type": "object"}}}
RICH = """\
# A title

Some **bold** and *thin* text with `code`, a [link](https://example.org/x) and $e^{i\\pi} + 1 = 0$.

- one
  - inside
- two

1. first
2. second

| name | value |
|---|---:|
| a | 1 |
| b | 22 |

```python
def f(x):  # a comment
    return "text", x + 1
```

> quoted

$$\\sum_{k=1}^{n} k = \\frac{n(n+1)}{2}$$

<script>alert(1)</script> ![pixel](https://example.org/p.png) [bad](javascript:alert(1))
"""


@pytest.fixture(scope="module")
def server(make_server):
    return make_server({"per_delta": 3}, served_model_name="tiny,other", ui_server=True)


@pytest.fixture
def says(server, monkeypatch):
    def says(text, **more):
        for name, value in {"answer": text, "pause": 0.0, "per_delta": 3, **more}.items():
            monkeypatch.setattr(server.scheduler, name, value)

    return says


def test_each_file_with_its_kind_and_policy(server):
    index = server.request("GET", "/")
    assert index.status == 200 and b"<title>Phalanx" in index.body
    policy = index.headers["Content-Security-Policy"]
    assert (
        "default-src 'none'" in policy
        and "img-src 'self' data:;" in policy
        and "script-src 'self'" in policy
        and "unsafe" not in policy
    )
    named = set(re.findall(rb'(?:src|href)="(ui/[^"]+)"', index.body))
    scripts = b"".join(content for name, (content, _) in page.files().items() if name.endswith(".js"))
    named |= {b"ui/" + name for name in re.findall(rb'from "\./([\w.]+)"', scripts)}
    assert named == {b"ui/" + name.encode() for name in page.files()} - {b"ui/index.html"}
    for path in named:
        answer = server.request("GET", f"/{path.decode()}")
        assert answer.status == 200 and answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Content-Security-Policy"] == policy
        assert ("javascript" in answer.headers["Content-Type"]) == path.endswith(b".js")


def test_nothing_inline_and_nothing_from_elsewhere():
    ours = {name: content for name, (content, _) in page.files().items() if not name.startswith("vendor/")}
    text = b"".join(ours.values()).decode()
    assert (
        not re.search(r'<script(?! (type="module"|defer) src="ui/)', text)
        and "style=" not in text
        and "<style" not in text
    )
    assert not re.search(r"\binnerHTML\b|\beval\(|new Function|document\.write", text)
    elsewhere = set(re.findall(r"https?://[\w./]+", text))
    assert elsewhere == {"http://www.w3.org/2000/svg"}  # a name, not an address


def test_libraries_are_what_their_readme_names_and_stay_small():
    vendor = page.FILES / "vendor"
    readme = (vendor / "README.md").read_text()
    libraries = {name: content for name, (content, _) in page.files().items() if name.startswith("vendor/")}
    assert len(libraries) == 4 and sum(map(len, libraries.values())) < 500_000
    for name, content in libraries.items():
        assert f"`{Path(name).name}`" in readme and hashlib.sha256(content).hexdigest() in readme
        assert not re.search(rb"\beval\(|new Function", content)
    for named in re.findall(r"LICENSE\.[\w-]+\.md", readme):
        assert (vendor / named).stat().st_size > 500


def test_off_unless_asked_for_and_no_other_file(server, start_server):
    fresh_server = start_server()
    for path in ("/", "/ui/app.js"):
        answer = fresh_server.request("GET", path)
        assert answer.status == 404 and "--ui-server" in answer.body["error"]["message"]
    for path in ("/ui/..%2Fpage.py", "/ui/none.js"):
        assert server.request("GET", path).status == 404


def test_reached_without_a_key_which_its_requests_need(start_server):
    server = start_server(ui_server=True, api_keys=["secret"])
    assert server.request("GET", "/").status == 200
    assert server.request("GET", "/v1/models").status == 401


# In a browser.

needs_browser = [pytest.mark.long, pytest.mark.skipif(bool(browser.missing()), reason=browser.missing() or "-")]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with browser.Browser(tmp_path_factory.mktemp("chromium")) as one:
        yield one


@pytest.fixture
def window(chromium, server):
    """A page without conversations. TEST_SHOTS names a directory that keeps what it looked like at the end."""
    url = f"http://127.0.0.1:{server.port}/"
    chromium.size(1280, 860)
    chromium.scheme("light")
    chromium.open(url)
    chromium.js("localStorage.clear(); sessionStorage.clear(); indexedDB.deleteDatabase('phalanx')")
    chromium.open(url)
    chromium.wait("return document.querySelector('.dot.ready') && document.querySelector('#model option')")
    chromium.log()
    yield chromium
    if place := os.environ.get("TEST_SHOTS"):
        name = os.environ["PYTEST_CURRENT_TEST"].split("::")[-1].split(" ")[0]
        chromium.shot(Path(place) / f"{name}.png")


def send(window, text):
    window.type("#input", text + browser.KEYS["enter"])


def finished(window, count):
    """Wait for so many answers; their texts."""
    script = (
        "return document.querySelectorAll('.assistant').length >= arguments[0] && !document.querySelector('.running')"
    )
    window.wait(script, count)
    return window.texts(".assistant .body")


def browsed(test):
    for mark in needs_browser:
        test = mark(test)
    return test


@browsed
def test_markdown_math_and_code(window, says):
    says(RICH)
    send(window, "hi")
    finished(window, 1)
    count = lambda css: window.js("return document.querySelectorAll(arguments[0]).length", f".assistant .prose {css}")  # noqa: E731
    assert (count("h1"), count("strong"), count("em"), count("ul ul li"), count("ol li"), count("td.right")) == (
        1,
        1,
        1,
        1,
        2,
        2,
    )
    assert (count("math"), count("math[display=block] munderover"), count("mfrac"), count("blockquote")) == (2, 1, 1, 1)
    assert (count(".hljs-keyword"), count(".hljs-comment"), count(".hljs-string")) == (2, 1, 1)
    assert (count("script"), count("img")) == (0, 0)
    links = window.js("return [...document.querySelectorAll('.prose a')].map((one) => one.href)")
    assert links == ["https://example.org/x", "https://example.org/p.png"]
    assert "<script>alert(1)</script>" in window.texts(".prose")[0]
    window.click(".copy")
    window.wait("return document.querySelector('.copy').textContent === 'Copied'")
    assert re.search(r"\d+ tokens", window.texts(".figures")[-1]) and "/ 512" in window.texts("#gauge")[0]
    assert not [line for line in window.log() if "mcp/tools" not in line]


SCRIPTS = """<script>alert(1)</script>
<img src=x onerror=alert(1)>
<svg onload=alert(1)>
<svg><script>alert(1)</script></svg>
<iframe src="javascript:alert(1)"></iframe>
<body onload=alert(1)>
<details open ontoggle=alert(1)>x</details>
<a href="javascript:alert(1)">x</a>
<a href="data:text/html,<script>alert(1)</script>">x</a>
<object data="javascript:alert(1)"></object>
<embed src="javascript:alert(1)">
<form action="javascript:alert(1)"><button>x</button></form>
<input autofocus onfocus=alert(1)>
<video><source onerror=alert(1)></video>
<math><mtext><table><mglyph><style><!--</style><img title="--&gt;&lt;img src=1 onerror=alert(1)&gt;">
<math href="javascript:alert(1)">x</math>
<style>@import "http://127.0.0.1:1/x.css"</style>
<link rel=stylesheet href="http://127.0.0.1:1/x.css">
<meta http-equiv=refresh content="0;url=javascript:alert(1)">
<base href="http://127.0.0.1:1/">
<template><script>alert(1)</script></template>
<noscript><p title="</noscript><img src=x onerror=alert(1)>">
<div style="background:url(javascript:alert(1))">x</div>
<span class="slot">0</span>
[x](javascript:alert(1))
[x](JaVaScRiPt:alert(1))
[x](java&#115;cript:alert(1))
[x](&#x6A;avascript:alert(1))
[x](vbscript:msgbox(1))
[x](data:text/html;base64,PHNjcmlwdD4=)
[x](file:///etc/passwd)
[x](//example.org/)
[x](ui/app.js)
[x](https://example.org/" onmouseover="alert(1))
![x](x" onerror="alert(1))
![x](http://127.0.0.1:1/p.png)
![x](data:image/svg+xml,<svg/onload=alert(1)>)
<javascript:alert(1)>
<https://example.org/"onclick=alert(1)>
`<img src=x onerror=alert(1)>`
**<img src=x onerror=alert(1)>**
$\\href{javascript:alert(1)}{x}$
$\\htmlData{x=y}{x}$
$\\includegraphics{http://127.0.0.1:1/p.png}$
$\\style{background:url(http://127.0.0.1:1/)}{x}$
$\\text{<img src=x onerror=alert(1)>}$
| <img src=x onerror=alert(1)> |⏎|---|⏎| <script>alert(1)</script> |
```html" onload="alert(1)⏎<script>alert(1)</script>⏎```
```xml⏎<img src=x onerror=alert(1)>⏎```
[x]: javascript:alert(1)""".split("\n")

RENDER = """const [texts, steps] = arguments;
return import(new URL("ui/render.js", document.baseURI)).then(async ({update}) => {
  const place = document.querySelector("#messages");
  const found = [];
  const clean = DOMPurify.sanitize;
  for (const text of texts) {
    const part = document.createElement("div");
    part.className = "prose";
    place.append(part);
    let given = 0;
    DOMPurify.sanitize = (html, options) => { given += html.length; return clean.call(DOMPurify, html, options); };
    const began = performance.now();
    for (let i = 1; i <= steps; i++) update(part, text.slice(0, Math.ceil(text.length * i / steps)), i < steps);
    while (part.shown.more) await new Promise((next) => setTimeout(next));
    void part.offsetHeight;
    const took = performance.now() - began;
    found.push({ given, took, text: part.textContent, html: part.innerHTML,
      names: [...new Set([...part.querySelectorAll("*")].map((one) => one.localName))],
      attributes: [...part.querySelectorAll("*")].flatMap((one) => [...one.attributes].map((a) => a.name)),
      links: [...part.querySelectorAll("[href]")].map((one) => one.getAttribute("href")) });
    if (!window.keeps) part.remove();
  }
  DOMPurify.sanitize = clean;
  return found;
});"""


@browsed
def test_scripts_stay_text(window):
    payloads = [one.replace("⏎", "\n") for one in SCRIPTS]
    assert len(payloads) >= 40
    window.js("window.alert = () => { window.attacked = true; }; window.keeps = true")
    forbidden = {"script", "img", "svg", "iframe", "object", "embed", "form", "style", "link", "meta", "base", "video"}
    for payload, found in zip(payloads, window.js(RENDER, payloads, 1), strict=True):
        assert not forbidden & set(found["names"]), payload
        assert not [name for name in found["attributes"] if name.startswith("on") or name in ("src", "action")], payload
        assert all(re.match("https?:|mailto:", link) for link in found["links"]), payload
        assert found["text"].strip() or payload.startswith("[x]:"), payload
    time.sleep(0.3)
    assert not window.js("return window.attacked")
    assert not [line for line in window.log() if "mcp/tools" not in line]  # no request was tried, no policy broken


ATTACKS = {
    "quotes": ">" * 20000,
    "spaced quotes": "> " * 20000,
    "fractions": "$" + "\\frac{" * 20000 + "$",
    "short fractions": "$$" + "\\frac" * 300 + "$$",
    "braces": "$" + "{" * 1900 + "}" * 40 + "$",
    "roots": "$" + "\\sqrt " * 250 + "x$",
    "scripts": "$" + "x^{" * 400 + "}" * 400 + "$",
    "fences of math": "$" + "\\left(" * 200 + "\\right)" * 200 + "$",
    "macros": "$$\\def\\a{\\b\\b\\b}\\def\\b{\\c\\c\\c}\\def\\c{\\a\\a\\a}\\a$$",
    "wide": "$\\rule{1e9em}{1e9em}\\kern{99999999em}x$",
    "formulas": "$x_1$ " * 20000,
    "dollars": "$" * 20000,
    "openers": "\\(" * 20000,
    "addresses": "<http://a" * 20000,
    "bare addresses": "http://a/(((" * 10000,
    "brackets": "[" * 20000,
    "links": "[a](" * 20000,
    "stars": "*a **" * 20000,
    "ticks": "`a``" * 20000,
    "lists": "".join(" " * i + "- a\n" for i in range(400)),
    "dashes": "- " * 20000,
    "table": "|" + "a|" * 300 + "\n|" + "-|" * 300 + "\n" + "|\n" * 20000,
    "blocks": "a\n\n" * 50000,
    "code": "```java\n" + "$" * 100000 + "\n```",
    "lines of code": "```csharp\n" + "a \n" * 50000 + "```",
    "open code": "```ini\n" + "---\n" * 20000,
    "fences": "```\n" * 20000,
}


@browsed
def test_whatever_a_model_writes_is_rendered_in_bounded_time(window):
    for name, text in ATTACKS.items():
        (found,) = window.js(RENDER, [text], 1)
        assert found["took"] < 20_000 and found["given"] < 60 * len(text) + 100_000, (name, found["took"])
        assert found["text"].strip() or name in ("table", "quotes", "spaced quotes", "dashes", "fences"), name
    assert not [line for line in window.log() if "mcp/tools" not in line]


@browsed
def test_a_growing_answer_is_parsed_once_and_looks_the_same(window):
    """Four times the text costs about four times the work, and the pieces in which it comes leave no trace."""
    work = []
    for count in (4, 16):
        text = (RICH + "\n") * count
        (whole,), (pieces,) = window.js(RENDER, [text], 1), window.js(RENDER, [text], len(text) // 8)
        assert pieces["html"] == whole["html"]
        work.append(pieces["given"])
    assert work[1] < 6 * work[0]


GROWING = {
    "a list": "".join(f"- item {i} with **bold** words\n" for i in range(400)),
    "a table": "| a | b |\n|---|---|\n" + "".join(f"| {i} | two |\n" for i in range(900)),
    "a paragraph": "some *words* and [a link](https://a.example) " * 300,
    "code": "```python\n" + "x = 1\n" * 2000 + "```\n",
}


@browsed
@pytest.mark.parametrize("kind", GROWING)
def test_a_block_that_grows_long_does_not_take_the_square(window, kind):
    """Twice the text costs about twice the work, and in the end it looks as it would at once."""
    work = []
    for text in (GROWING[kind][: len(GROWING[kind]) // 2], GROWING[kind]):
        (whole,), (pieces,) = window.js(RENDER, [text], 1), window.js(RENDER, [text], len(text) // 40)
        assert pieces["html"] == whole["html"] and pieces["text"].strip()
        work.append(pieces["given"])
    assert work[1] < 3 * work[0]


@browsed
def test_stop_go_on_and_again(window, server, says):
    says("hello world " * 50, pause=0.02, per_delta=1)
    send(window, "count")
    window.wait("return document.querySelector('.running .prose')?.innerText.length > 10")
    window.keys("escape")
    (text,) = finished(window, 1)
    server.wait(lambda: not server.link.open_sequences)
    assert "stopped" in window.texts(".assistant .figures")[0]
    says("and the rest")
    window.click(".do-goOn")
    window.wait("return document.querySelector('.assistant .body').innerText.includes('and the rest')")
    (longer,) = finished(window, 1)
    assert longer.startswith(text.strip()) and server.asked.rstrip().endswith(text.strip())
    says("another answer")
    window.click(".do-again")
    window.wait("return document.querySelector('.branches')")
    assert "another answer" in finished(window, 1)[0]
    assert window.texts(".branches") == ["2 / 2"]
    window.click(".branches .do-left")
    assert window.texts(".branches") == ["1 / 2"] and "and the rest" in window.texts(".assistant .body")[0]


@browsed
def test_an_edit_makes_a_branch_and_both_are_kept(window, server, says):
    says("fine")
    send(window, "how are you?")
    finished(window, 1)
    says("good morning")
    window.keys("up")
    window.js("document.querySelector('textarea.edit').value = 'good morning?'")
    window.type("textarea.edit", browser.KEYS["enter"])
    window.wait("return document.querySelector('.user .branches')")
    assert "good morning" in finished(window, 1)[0]
    assert window.texts(".user .plain") == ["good morning?"]
    assert "how are you" not in server.asked
    window.open(f"http://127.0.0.1:{server.port}/")
    window.click(".item .open")
    assert window.texts(".user .branches") == ["2 / 2"]
    window.click(".user .branches .do-left")
    assert window.texts(".user .plain") == ["how are you?"] and "fine" in window.texts(".assistant .body")[0]


@browsed
def test_a_tool_call_and_its_result(window, server, says):
    says(f"<think>\nI look.\n</think>\n\n{CALL}")
    window.click("#open-settings")
    window.js("document.getElementById('set-tools').value = arguments[0]", json.dumps([TOOL]))
    window.type("#set-tools", " ")
    window.type("#set-system", "be brief")
    window.type("#set-temperature", "0.5")
    window.click("#open-settings")
    send(window, "weather?")
    finished(window, 1)
    assert window.texts(".reasoning .title") == ["Thoughts"] and "get_weather" in window.texts(".call .title")[0]
    assert "waits for a result" in window.texts(".call .mark")[0]
    assert server.asked.startswith("<|turn|>tools") and "be brief" in server.asked
    assert server.scheduler.requests[-1].sampling.temperature == 0.5
    says("it rains in Paris")
    window.click(".call summary")
    window.type(".result textarea", '{"sky": "rain"}')
    window.click(".result .primary")
    window.wait("return document.querySelectorAll('.assistant').length === 2")
    assert "it rains in Paris" in finished(window, 2)[1]
    assert '"sky": "rain"' in server.asked


@browsed
def test_dark_by_the_system_and_by_choice(window, says):
    says(RICH)
    colour = "return getComputedStyle(document.body).backgroundColor"
    light = window.js(colour)
    window.scheme("dark")
    dark = window.js(colour)
    assert sum(map(int, re.findall(r"\d+", light))) > 600 > 150 > sum(map(int, re.findall(r"\d+", dark)))
    window.scheme("light")
    window.click("#theme")
    assert window.js(colour) == dark
    send(window, "hi")
    finished(window, 1)


@browsed
def test_a_phone(window, says):
    window.size(390, 780)
    says(RICH)
    send(window, "hi")
    finished(window, 1)
    assert window.js("return document.documentElement.scrollWidth <= 390")
    window.wait("return document.querySelector('#side').getBoundingClientRect().right <= 0")
    window.click("#open-side")
    window.wait("return document.querySelector('#side').getBoundingClientRect().left === 0")
    window.click(".item .open")
    window.wait("return document.querySelector('#side').getBoundingClientRect().right <= 0")


@browsed
def test_search_export_and_import(window, says):
    says("fine")
    for text in ("about apples", "about pears"):
        send(window, text)
        finished(window, 1)
        window.click("#new")
    window.keys("control", "k")
    window.type("#search", "PEARS")
    assert window.texts(".item .open") == ["about pears"]
    exported = window.js(
        "return new Promise((resolve) => { URL.createObjectURL = (blob) => { blob.text().then(resolve); return ''; };"
        "document.getElementById('export').click(); })"
    )
    kept = json.loads(exported)
    assert each(kept["chats"], "title") == ["about pears", "about apples"]
    kept["chats"][0] |= {"id": "imported", "title": "from a file"}
    put = """const files = new DataTransfer(); files.items.add(new File([arguments[0]], "a.json"));
        const pick = document.getElementById("pick-import"); pick.files = files.files;
        pick.dispatchEvent(new Event("change"));"""
    window.js(put, json.dumps(kept))
    window.wait("return document.getElementById('toast').innerText.includes('2 conversations were added')")
    window.js(
        "const field = document.getElementById('search'); field.value = ''; field.dispatchEvent(new Event('input'))"
    )
    assert sorted(window.texts(".item .open")) == ["about apples", "about pears", "from a file"]
    window.js(put, "{}")
    window.wait("return document.getElementById('toast').innerText.includes('no file of exported conversations')")


@browsed
def test_a_dropped_file_goes_along(window, server, says):
    says("read")
    window.js(
        """const data = new DataTransfer(); data.items.add(new File(["secret words"], "notes.txt"));
        dispatchEvent(new DragEvent("drop", {dataTransfer: data, bubbles: true, cancelable: true}));"""
    )
    window.wait("return document.querySelector('#files .file')")
    send(window, "what is in it?")
    finished(window, 1)
    assert "notes.txt" in server.asked and "secret words" in server.asked
    assert "notes.txt" in window.texts(".user .file")[0]


# A picture of so many pixels, as a File: from the clipboard, or dropped.
GIVE = """const [how, name, width, height] = arguments;
const canvas = document.createElement("canvas");
canvas.width = width;
canvas.height = height;
const context = canvas.getContext("2d");
const colours = context.createLinearGradient(0, 0, width, height);
["crimson", "gold", "teal", "navy"].forEach((colour, i) => colours.addColorStop(i / 3, colour));
context.fillStyle = colours;
context.fillRect(0, 0, width, height);
return new Promise((resolve) => canvas.toBlob((blob) => {
  const data = new DataTransfer();
  data.items.add(new File([blob], name, { type: "image/png" }));
  if (how === "paste") {
    const paste = new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true });
    document.getElementById("input").dispatchEvent(paste);
  } else if (how === "drop") dispatchEvent(new DragEvent("drop", { dataTransfer: data, cancelable: true }));
  else {
    const pick = document.getElementById("pick-image");
    pick.files = data.files;
    pick.dispatchEvent(new Event("change"));
  }
  resolve();
}));"""
CONTENT = """return new Promise((resolve) => { const request = indexedDB.open("phalanx");
  request.onsuccess = () => { const read = request.result.transaction("chats").objectStore("chats").getAll();
    read.onsuccess = () => { request.result.close(); resolve(read.result); }; }; });"""


@browsed
def test_pictures_go_along_and_are_kept(chromium, tmp_path):
    """A model that sees, on a live server: pasted, dropped and chosen pictures, scaled down to what it takes."""
    pytest.importorskip("torch")  # the checkpoint is made with it
    from ...model.vision.seeing import SEEING, add_text, write_seeing

    path = add_text(write_seeing(tmp_path / "model", SEEING[0]))
    options = "--np", "1", "--device", "cpu", "--mem", "64", "--ui-server", "--images-per-prompt", "3"
    with Server(str(path), *options) as server:
        entry = server.request("/v1/models")[1]["data"][0]
        assert entry["input_modalities"] == ["text", "image"] and entry["images"]["per_prompt"] == 3
        chromium.size(1280, 860)
        chromium.scheme("light")
        chromium.open(server.url)
        chromium.js("localStorage.setItem('phalanx.settings', '{\"max_tokens\": 20}')")
        chromium.open(server.url)
        chromium.wait("return !document.getElementById('attach-image').hidden")
        chromium.js(GIVE, "paste", "sunset.png", 1200, 800)
        chromium.wait("return document.querySelectorAll('#files .thumbnail').length === 1")
        for how in ("drop", "pick"):
            chromium.js(GIVE, how, f"{how}.png", 60, 90)
        chromium.wait("return document.querySelectorAll('#files .thumbnail').length === 3")
        chromium.js(GIVE, "paste", "one more.png", 60, 60)
        chromium.wait("return document.getElementById('toast').innerText.includes('at most 3')")
        names = chromium.js("return [...document.querySelectorAll('#files button')].map((b) => b.ariaLabel)")
        assert names[:2] == ["Show sunset.png", "Remove sunset.png"] and len(names) == 6
        chromium.js("document.querySelector('#files [aria-label=\"Remove pick.png\"]').click()")
        if place := os.environ.get("TEST_SHOTS"):
            chromium.shot(Path(place) / "test_pictures_attached.png")
        chromium.js("document.getElementById('input').focus()")
        send(chromium, "What is this?")
        finished(chromium, 1)
        assert not chromium.texts(".error")
        (chat,) = chromium.js(CONTENT)
        (node,) = (one for one in chat["nodes"].values() if one["role"] == "user")
        assert [one["name"] for one in node["images"]] == ["sunset.png", "drop.png"]
        assert [one["url"][:16] for one in node["images"]] == ["data:image/jpeg;", "data:image/png;b"]
        assert node["images"][0]["width"] * node["images"][0]["height"] <= entry["images"]["pixels"]
        answered = next(one for one in chat["nodes"].values() if one["role"] == "assistant")
        assert answered["usage"]["prompt"] > 20
        chromium.open(server.url)
        chromium.click(".item .open")
        loaded = "return [...document.querySelectorAll('.user .thumbnail img')].filter((i) => i.naturalWidth).length"
        chromium.wait(f"{loaded} === 2")
        chromium.click(".user .thumbnail button")
        chromium.wait("return document.querySelector('#picture[open] img')?.naturalWidth > 1")
        chromium.keys("escape")
        chromium.wait("return !document.querySelector('#picture').open")
        if place:
            chromium.shot(Path(place) / "test_pictures_go_along_and_are_kept.png")
        chromium.js(
            "IDBObjectStore.prototype.put = () => { throw new DOMException('no space', 'QuotaExceededError'); }"
        )
        send(chromium, "And now?")
        chromium.wait("return document.getElementById('toast').innerText.includes('storage is full')")
        finished(chromium, 2)
        assert not [line for line in chromium.log() if "mcp/tools" not in line]


@browsed
def test_a_text_model_is_given_no_picture(window):
    assert window.js("return document.getElementById('attach-image').hidden")
    window.js(GIVE, "paste", "a.png", 60, 60)
    window.wait("return document.getElementById('toast').innerText.includes('takes no images')")
    assert not window.texts("#files .thumbnail")


@browsed
def test_errors_are_told(window, server, says, monkeypatch):
    says("x")
    monkeypatch.setattr(server.scheduler, "error", (500, "the engine stumbled"))
    send(window, "hi")
    window.wait("return document.querySelector('.error')")
    assert "the engine stumbled" in window.texts(".error")[0]


@browsed
def test_the_key_is_asked_for(chromium, start_server):
    server = start_server(ui_server=True, api_keys=["secret"])
    chromium.size(1280, 860)
    chromium.open(f"http://127.0.0.1:{server.port}/")
    chromium.wait("return document.querySelector('#key[open]')")
    chromium.type("#key-input", "secret")
    chromium.click("#key .primary")
    chromium.wait("return document.querySelector('#model option')")
    chromium.click("#input")
    send(chromium, "hi")
    assert "hello world" in finished(chromium, 1)[0]


@browsed
def test_a_fast_answer_is_shown_whole(window, server, says):
    says("hello world. " * 60, per_delta=50)
    began = time.monotonic()
    send(window, "much")
    (text,) = finished(window, 1)
    assert len(text) > 500 and time.monotonic() - began < 20


@browsed
def test_tool_servers_are_switched(chromium, tmp_path, model_dir, tokenizer):
    """The answer with a call of one that is on; then without, as it is off. What does not answer cannot be switched."""
    dead = {"url": f"http://127.0.0.1:{free_port()}/mcp"}
    config = written(tmp_path, {"mcpServers": {"local": STDIO, "dead": dead}})
    ready = protocol.Ready(max_model_len=8192, vocab_size=400, kv_tokens=8192, block_size=16, max_num_seqs=4, ranks=1)
    scheduler = {"per_delta": 3, "ready": ready}
    fresh_server = LiveServer(tmp_path, model_dir, tokenizer, True, scheduler, ui_server=True, mcp_config=config)
    try:
        fresh_server.call(fresh_server.state.tools.settled(30))
        call = '<tool_call>\n{"name": "local_add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
        left = [call, "it is 5", "no tools"]
        fresh_server.scheduler.encode = lambda _: fresh_server.engine.text.tokenizer.encode(left.pop(0), False)
        chromium.size(1280, 860)
        chromium.open(f"http://127.0.0.1:{fresh_server.port}/")
        chromium.js("localStorage.clear(); sessionStorage.clear(); indexedDB.deleteDatabase('phalanx')")
        chromium.open(f"http://127.0.0.1:{fresh_server.port}/")
        chromium.wait("return document.querySelectorAll('#tool-servers .chip').length === 2")
        assert chromium.texts("#tool-servers .chip:disabled") == ["🔧 dead"]
        send(chromium, "add")
        assert "it is 5" in finished(chromium, 1)[0] and "local_add" in fresh_server.asked
        assert "add" in chromium.texts(".call .title")[0]
        chromium.click("#tool-servers .chip.on")
        send(chromium, "again")
        assert "no tools" in finished(chromium, 2)[1] and "<|turn|>tools" not in fresh_server.asked
    finally:
        fresh_server.stop()
