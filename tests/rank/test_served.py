"""Every model type, served by ranks, answers as transformers does (ChatGLM as its own test's model does):
log-probabilities and text. tests/rank/model/test_architectures.py has each shape of each type, cut in several ways.

Prompts longer than any sliding window are computed in chunks, sequences are preempted, and a prompt is continued from
the prefix cache. A new architecture is covered by its entry in `MODELS`.
"""

import functools
import json
import re
import subprocess
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from phalanx.rank.model import architectures
from phalanx.rank.options import JOB_ENV, Job, Options, encode_job
from safetensors.torch import load_file, save_file

from ..engine import device
from ..fields import each
from ..ranks import run_ranks
from .model import harness, test_chatglm
from .model.hybrids import HYBRIDS
from .model.shapes import ONE_STAGE
from .model.test_architectures import MODELS, write

CHATGLM = test_chatglm.CONFIG  # transformers has no class for it
SERVED = {name: dict(model_type=name) for name in ("llama", "qwen3")} | MODELS | {"chatglm": CHATGLM}


class Asked(NamedTuple):
    count: int  # tokens that each prompt gets
    known: int  # of them, when the last prompt is asked again
    blocks: int  # in the pool, fewer than the sequences come to need: the last one is preempted


FULL, FEWER, FEWEST = Asked(200, 150, 60), Asked(80, 60, 32), Asked(40, 20, 24)


class Layout(NamedTuple):
    tp: int = 1
    pp: int = 1
    ep: int = 1  # more: for models with experts
    threads: bool = False  # ranks in one process, which takes half the time of four under mpirun


SHORT = "short"
# The models that the short run serves: one of each kind of cache.
SHORT_MODELS = {"llama", "gemma2", "deepseek_v3", "gpt_oss", "qwen3_next", "granitemoehybrid"}
# One of each kind of cache, position and layer.
KINDS = {
    "llama", "gemma2", "gemma3", "glm4", "qwen2_moe", "deepseek_v3", "gpt_oss", "phi", "gpt_bigcode", "qwen3_next",
    "lfm2", "granitemoehybrid", "kimi_linear", "llama4_text",
}  # fmt: skip
# Three ranks give as many tokens of them and by two stages as by one rank.
PROBES = {"qwen2", "gemma2", "phi3", "granite"}
OF_ALL = {"tp1": Layout(), "tp2": Layout(tp=2), "ep2": Layout(tp=2, ep=2)}
OF_PROBES = {"tp3": Layout(tp=3), "pp2": Layout(pp=2)}
OF_KINDS = OF_PROBES | {"tp2-pp2": Layout(tp=2, pp=2), "ep2-pp2": Layout(tp=2, pp=2, ep=2)}
OF_OTHERS = {
    "tp2-pp2 of threads": Layout(tp=2, pp=2, threads=True),
    "ep2-pp2 of threads": Layout(tp=2, pp=2, ep=2, threads=True),
}
LAYOUTS = {SHORT: Layout(tp=2)} | OF_ALL | OF_KINDS | OF_OTHERS
TOLERANCE = 1e-4  # of log-probabilities; logits that are nearer than that are a tie
LENGTH = 60
PROMPTS = torch.randint(3, 512, (4, LENGTH), generator=torch.Generator().manual_seed(0)).tolist()
OPTIONS = dict(
    max_num_seqs=4, max_num_batched_tokens=24, max_model_len=288, dtype="f32", timeout=60.0,
    speculate="none",  # how many drafts pay depends on the clock, and who is preempted on how many there are
)  # fmt: skip
TIMEOUT = 60 + 20 * len(SERVED)  # seconds of a job, on a machine that others use too

pytestmark = pytest.mark.timeout(TIMEOUT + 60)


def cases():
    """Layouts and models: of each type the first. One rank and two have all types, more ranks and stages one of each
    kind, and the probes where one way cuts; where both ways cut, threads have the others. Shapes that cannot be divided
    into stages are layers of another kind, and served beside their type's first."""
    yield from ((SHORT, name) for name in SERVED if name in SHORT_MODELS)
    first = {options["model_type"]: name for name, options in reversed(SERVED.items())}
    for layout, cut in (OF_ALL | OF_KINDS | OF_OTHERS).items():
        for name in (*reversed(first.values()), *(ONE_STAGE if cut.pp == 1 else ())):
            text = SERVED[name] | SERVED[name].get("text_config", {})
            several = any("experts" in key for key in text)
            wanted = layout in OF_ALL or (name in KINDS) == (layout in OF_KINDS)
            wanted |= layout in OF_PROBES and name in PROBES
            if wanted and (several if cut.ep > 1 else not (several and layout in OF_OTHERS)):
                yield pytest.param(layout, name, marks=pytest.mark.long)


def values_of(case):
    """The model type of a case with marks, or without."""
    return getattr(case, "values", case)


def asked_of(layout, name):
    if layout == SHORT:
        return FEWEST
    probe = layout in OF_PROBES and name in PROBES
    return FULL if probe or layout in ("tp1", "tp2", "tp2-pp2", "ep2-pp2") else FEWER


def requests(tmp_path_factory, asked):
    """The name of serving.py's file."""
    file = tmp_path_factory.mktemp("requests") / "requests.json"
    file.write_text(json.dumps([dict(prompts=PROMPTS, **one._asdict()) for one in asked]))
    return str(file)


EMBEDDING = re.compile("embed|wte|wpe")
# Factors on embeddings; 0.05 unless given. Where sublayers' outputs are normed, they would drown the tokens.
EMBEDDING_GAINS = {
    "olmo2 few keys": 3.0,
    "qwen3_5": 0.5,
    "qwen3_5_text": 0.5,
    "qwen3_next mixed": 0.5,
    "nemotron_h": 0.5,
    "gpt_neox": 0.5,
    "falcon": 0.5,
}
# A factor on the norms of queries. Gemma 4 does not scale its scores: the weights of its norms do.
# With weights of 1, scores reach a head's size, and each layer's softmax multiplies their rounding: transformers' own
# log-probabilities in f32 are 1.4e-4 off those in f64, and move by 1.5e-4 where weights change in their last bit. With
# this factor both are 2e-5. Of the small shape they are 5e-5 with 0.25, which leaves ours too little of the tolerance.
QUERY_GAINS = {"gemma4_text": 0.25, "gemma4_text small": 0.125}
QUERY_NORM = "q_norm.weight"
FINAL_NORM = re.compile(r"(norm|norm_f|ln_f|final_layernorm)\.(weight|bias)$")  # outside layers
SPREAD = 2.0  # the standard deviation of a checkpoint's logits, which soft caps make less


class Expected:
    """A reference model, which says of every token that was chosen whether it is the likeliest after those before.

    One forward pass over a whole text says it, where generating that text takes one for each of its tokens.
    """

    def __init__(self, logits):
        """logits: a list of tokens -> theirs [tokens, vocab]."""
        self.logits = functools.cache(lambda *tokens: logits(list(tokens)))

    @classmethod
    def of(cls, path, options):
        """transformers' model of a checkpoint, or of ChatGLM's the one of its own test."""
        if options is CHATGLM:
            return cls(functools.partial(test_chatglm.logits_of, load_file(path / "model.safetensors"), CHATGLM))
        model = harness.reference(path)
        return cls(torch.no_grad()(lambda tokens: model(torch.tensor([tokens])).logits[0]))

    def after(self, prompt, got):
        """Logits [len(got), vocab] that each token of `got` was to be chosen by."""
        logits = self.logits(*prompt, *got)[len(prompt) - 1 : -1]
        assert logits.std() >= 1, f"a deviation of {logits.std():.2g}"
        return logits

    def ties(self, prompt, got):
        """The places where `got` takes another token than the likeliest, which is as likely.

        Raises AssertionError, with the place, for one that is less likely.
        """
        logits = self.after(prompt, got)
        behind = (logits.max(-1).values - logits[range(len(got)), got]).tolist()
        for place, gap in enumerate(behind):
            likeliest = int(logits[place].argmax())
            assert gap <= TOLERANCE, f"token {place}: {likeliest} +{gap:.2g}"
        return [place for place, gap in enumerate(behind) if gap > 0]


def write_checkpoint(directory, options):
    """A checkpoint of random weights of an entry of SERVED."""
    test_chatglm.make(directory) if options is CHATGLM else write(directory, **options)
    return directory


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """name -> its checkpoint, with weights that make the text vary."""

    def make(name):
        path = write_checkpoint(tmp_path_factory.mktemp(re.sub(r"\W", "-", name)), SERVED[name])
        weights = load_file(path / "model.safetensors")
        for key, x in weights.items():
            if x.dim() > 1 and x.is_floating_point() and "lm_head" not in key:
                x *= EMBEDDING_GAINS.get(name, 0.05) if EMBEDDING.search(key) else 1.2
            elif key.endswith("bias"):
                x *= 0.1
            elif key.endswith(QUERY_NORM):
                x *= QUERY_GAINS.get(name, 1.0)
        save(weights, path)
        spread = float(Expected.of(path, SERVED[name]).logits(*PROMPTS[0]).std())
        spread_logits(weights, SPREAD / spread)
        save(weights, path)
        return path

    def save(weights, path):
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})

    return functools.cache(make)


def spread_logits(weights, gain):
    """Scale the final norm, as a head may be the embedding, which begins what the layers compute. Texts stay alike."""
    for key, x in weights.items():
        if FINAL_NORM.search(key) and "layers." not in key:
            offset = float(key.endswith("weight") and abs(x.mean()) < 0.5)  # such a weight is added to 1
            x.copy_((x + offset) * gain - offset)


@pytest.fixture(scope="module")
def expected(checkpoint):
    return functools.cache(lambda name: Expected.of(checkpoint(name), SERVED[name]))


@pytest.fixture(scope="module")
def answers(request, checkpoint, tmp_path_factory):
    """(layout, name) -> what the ranks answer: one job for all architectures of a layout that are tested now."""
    chosen = [item.callspec.params for item in request.session.items if item.function is test_served]

    @functools.cache
    def serve(layout):
        tp, pp, ep, threads = LAYOUTS[layout]
        names, ranks = [params["name"] for params in chosen if params["layout"] == layout], tp * pp
        cut = dict(tp=tp, pp=pp, ep=ep, multithread=threads)
        options = Options(ranks=ranks, device=device(ranks, threads), **cut, **OPTIONS)
        environ = {
            "MODELS": ":".join(str(checkpoint(name)) for name in names),
            "REQUESTS": requests(tmp_path_factory, [asked_of(layout, name) for name in names]),
            "ANSWERS": f"{layout}.json",
            JOB_ENV: encode_job(Job(options=options, announced_size=0 if threads else ranks)),
        }
        script = Path(__file__).with_name("serving.py")
        try:
            return run_ranks(ranks, script, timeout=TIMEOUT, threads=threads, **environ)
        except AssertionError as late:  # for all of its models, which must not wait again
            return subprocess.CompletedProcess([], 1, "", str(late))

    def read(layout, name):
        done = serve(layout)
        file = checkpoint(name) / f"{layout}.json"
        assert file.exists(), f"no {name} of {layout}:\n{done.stderr}"
        assert done.returncode == 0, done.stderr
        return SimpleNamespace(**json.loads(file.read_text()))

    return read


@pytest.mark.parametrize("layout, name", list(cases()))
def test_served(answers, expected, layout, name):
    found, want = answers(layout, name), expected(name)
    assert max(len(set(tokens)) for tokens in found.tokens) >= 8, f"{name}: too few tokens"
    assert found.chunks > 0, f"{layout}, {name}"
    assert found.preemptions > 0 or found.windows, f"{layout}, {name}"
    if name in HYBRIDS:
        # A state snapshot of its first prompt; which of them are left depends on who was preempted in between.
        assert found.cached >= (LENGTH // 16 * 16 if layout == "short" else 16), f"{layout}, {name}: {found.cached}"
    else:
        most = LENGTH + asked_of(layout, name).known - 1
        least = min(LENGTH, most // found.unit * found.unit)
        assert found.cached >= least, f"{layout}, {name}: {found.cached}"
    check_answers(f"{layout}, {name}", want, found, asked_of(layout, name))


def check_answers(title, want, found, asked):
    """All of one job's answers, and the log-probabilities of the last prompt's."""
    for i, prompt in enumerate(PROMPTS):
        check(f"{title}, prompt {i}", want, prompt, found.tokens[i], asked.count)
    start = PROMPTS[-1] + found.tokens[-1][: asked.known]
    title = f"{title}, prompt {len(PROMPTS) - 1} from its token {asked.known} on"
    check(title, want, start, found.again, asked.count - asked.known)
    logprobs = want.after(start, found.again).log_softmax(-1)
    assert len(found.logprobs) == len(logprobs)
    for place, top in enumerate(found.logprobs):
        ids, values = zip(*top, strict=True)
        assert sorted(ids) == list(range(logprobs.shape[-1]))
        far = (torch.tensor(values) - logprobs[place, list(ids)]).abs().max()
        assert far < TOLERANCE, f"{title}, {place}: {far:.2g} off"


def check(title, want, prompt, got, count):
    """`count` tokens, the likeliest; of several that are as likely, any."""
    assert len(got) == count, f"{title}: {len(got)} tokens"
    try:
        ties = want.ties(prompt, got)
    except AssertionError as wrong:
        raise AssertionError(f"{title}: {wrong}") from None
    for place in ties:
        warnings.warn(f"{title}: token {place} is one of several that are as likely", stacklevel=2)


def test_a_wrong_token_is_named_and_a_tie_is_told():
    logits = torch.zeros(5, 8)
    logits[[1, 2, 3], [4, 5, 6]] = 10.0
    logits[2, 7] = 10.00005
    want = Expected(lambda tokens: logits)
    check("", want, [0, 0], [4, 7, 6], 3)
    with pytest.warns(UserWarning, match="short, llama, prompt 0: token 1 is one of several"):
        check("short, llama, prompt 0", want, [0, 0], [4, 5, 6], 3)
    with pytest.raises(AssertionError, match="prompt 0: token 2"):
        check("short, llama, prompt 0", want, [0, 0], [4, 7, 3], 3)
    with pytest.raises(AssertionError, match="prompt 0: 2 tokens"):
        check("short, llama, prompt 0", want, [0, 0], [4, 7], 3)


def test_prompts_are_longer_than_windows_and_than_what_indexers_choose():
    for name, options in SERVED.items():
        text = options | options.get("text_config", {})
        blocks, rate = text.get("sparse_attention_config", {}), max(text.get("compress_rates", {"": 1}).values())
        reach = (
            text.get("sliding_window") or 0,
            text.get("attention_chunk_size", 0),
            text.get("index_topk", 0) * rate,
            text.get("index_topk_blocks", 0) * text.get("index_block_size", 0),
            blocks.get("sparse_topk_blocks", 0) * blocks.get("sparse_block_size", 0),
        )
        assert max(reach) < LENGTH, name


def test_each_type_is_served_where_tensors_and_layers_are_cut():
    cut = {SERVED[name]["model_type"] for layout, name in map(values_of, cases()) if "-pp2" in layout}
    assert cut == set(each(SERVED.values(), "model_type"))


def test_each_architecture_is_served():
    others = {"kimi_k2", "mimo", "internlm2", "qwen", "baichuan"}  # deepseek_v3, qwen2 and llama by other names
    others |= {"bailing_moe", "moondream1"}  # transformers has no class: their own tests compare logits
    others |= {"glm5_next_text", "step3p5"}  # the text models of glm5_next and step3p7
    others |= {"apertus1p5"}  # whose text model is apertus1p5_text
    others |= {"blip"}  # it says nothing without an image: its own test asks a server with one
    assert set(each(SERVED.values(), "model_type")) | others == set(architectures.supported())
