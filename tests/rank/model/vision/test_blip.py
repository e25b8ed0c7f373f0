"""BLIP's captions and answers to questions, against transformers."""

import functools
import shutil

import pytest
import torch
import transformers
from phalanx.comm import mesh, threads
from phalanx.rank.model.load import load
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ....server import Server
from ..harness import distance
from ..test_architectures import TOLERANCE
from .seeing import data_url, picture, resized, rules_of, seen_logits

TEXT = dict(
    vocab_size=520, hidden_size=48, intermediate_size=40, num_hidden_layers=3, num_attention_heads=6,
    max_position_embeddings=64, bos_token_id=513, eos_token_id=2, sep_token_id=102, pad_token_id=0,
)  # fmt: skip


ANSWERS = 48, transformers.BlipForQuestionAnswering


def make(path, seen=64, kind=transformers.BlipForConditionalGeneration):
    vision = dict(
        hidden_size=seen, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, image_size=48, patch_size=16
    )
    config = transformers.BlipConfig(text_config=TEXT, vision_config=vision)
    torch.manual_seed(0)
    model = kind(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5 * (2 if "embed" in name else 1.5))
            else:
                parameter += 0.2 * torch.randn(parameter.shape)
    model.save_pretrained(path)
    return model


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    @functools.cache
    def one(*of):
        path = tmp_path_factory.mktemp("model")
        return path, make(path, *of)

    return one


def pixels(rules, image):
    shown = resized(rules, image).float() / 255
    mean, std = torch.tensor(rules.mean), torch.tensor(rules.std)
    return ((shown - mean) / std).permute(2, 0, 1)[None]


@pytest.mark.parametrize("seen", [64, 32])
def test_features(made, seen):
    path, model = made(seen)
    rules, image = rules_of(path), picture(100, 75)
    with torch.no_grad():
        want = model.vision_model(pixels(rules, image)).last_hidden_state[0]
        (got,) = threads.run(lambda comm: load(path, mesh.build(comm, 1, 1)).vision(resized(rules, image)), 1)
    assert distance(got[:, :seen], want) < TOLERANCE
    assert (got[:, -1] == 1).all()


def states_of(model, rules, image, question):
    """The states [T, hidden] of a question about an image, which answers attend to."""
    seen = model.vision_model(pixels(rules, image)).last_hidden_state
    return model.text_encoder(input_ids=torch.tensor([question]), encoder_hidden_states=seen).last_hidden_state


@pytest.mark.parametrize("tp", [1, 2])
def test_logits_of_answers(made, caplog, tp):
    path, model = made(*ANSWERS)
    rules, image, question, answer = rules_of(path), picture(100, 75), [101, *range(40, 57), 102], range(20, 40)
    ids, got = seen_logits(path, [image], tp, before=(), between=tuple(answer), read=question)
    with torch.no_grad():
        states = states_of(model, rules, image, question)
        (read,) = threads.run(
            lambda comm: load(path, mesh.build(comm, 1, 1)).vision(resized(rules, image), torch.tensor(question)), 1
        )
        assert distance(read[:, :48], states[0]) < TOLERANCE and states.std() > 0.5
        text = torch.tensor([[513, *answer]])
        want = model.text_decoder(input_ids=text, encoder_hidden_states=states).logits[0]
    assert ids[: len(question) + 1] == [519] * len(question) + [513]
    assert distance(got[len(question) :], want) < TOLERANCE
    assert want.std() > 0.5
    assert not [one for one in caplog.records if one.name.startswith("phalanx") and one.levelname == "WARNING"]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("seen", [64, 32])
def test_logits(made, caplog, seen, tp):
    path, model = made(seen)
    rules, image = rules_of(path), picture(100, 75)
    ids, got = seen_logits(path, [image], tp, before=(), between=tuple(range(20, 40)))
    text = ids[10:]
    assert text[0] == 513 and len(ids) == 10 + 21
    with torch.no_grad():
        want = model(pixel_values=pixels(rules, image), input_ids=torch.tensor([text])).logits[0]
    assert distance(got[10:], want) < TOLERANCE
    assert want.std() > 0.5
    assert not [one for one in caplog.records if one.name.startswith("phalanx") and one.levelname == "WARNING"]


def with_tokenizer(path, directory):
    """Copies a checkpoint, with a tokenizer; returns the ids of its words."""
    shutil.copytree(path, directory, dirs_exist_ok=True)
    words = ["[PAD]", *(f"unused{i}" for i in range(100)), "[CLS]", "[SEP]", "a", "picture", "of", *"bcdefghij"]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    tokenizer.save(str(directory / "tokenizer.json"))
    return vocab


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("cut", ["--tp", "--pp"])
def test_greedy_answers_on_a_live_server(made, tmp_path, cut):
    """Questions about two images, the second time with features that are there already, and with words before it."""
    path, model = made(*ANSWERS)
    vocab, rules = with_tokenizer(path, tmp_path), rules_of(path)
    options = "--np", "2", "--device", "cpu", "--mem", "64", cut, "2"
    with Server(str(tmp_path), *options) as server, torch.no_grad():
        for seed, text in [(0, "a b c"), (0, "a b d"), (1, "a b d"), (0, "a b d")]:
            shown = picture(100, 75, seed)
            content = [{"type": "image_url", "image_url": {"url": data_url(shown)}}, {"type": "text", "text": text}]
            before = [{"role": "user", "content": "e f"}, {"role": "assistant", "content": "g"}]
            body = {"messages": [*before, {"role": "user", "content": content}], "temperature": 0, "max_tokens": 40}
            body |= {"ignore_eos": True, "return_token_ids": True}
            status, answer, _ = server.request("/v1/chat/completions", body)
            assert status == 200, answer
            ids, tokens = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
            question = [101, *(vocab[word] for word in text.split()), 102]
            assert ids == [519] * 5 + [513] and len(tokens) == 40
            states = states_of(model, rules, shown, question)
            text = torch.tensor([[513, *tokens]])
            logits = model.text_decoder(input_ids=text, encoder_hidden_states=states).logits[0]
            assert logits[:-1].argmax(1).tolist() == tokens
        assert server.metric("vllm:mm_cache_queries_total") == 4 and server.metric("vllm:mm_cache_hits_total") == 1
        content[1]["text"] = "a " * 63
        status, answer, _ = server.request("/v1/chat/completions", body)
        assert status == 400 and "65 tokens" in answer["error"]["message"]


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("cut", ["--tp", "--pp"])
def test_greedy_captions_on_a_live_server(made, tmp_path, cut):
    """An image alone, and one with the beginning of its caption."""
    path, model = made(64)
    vocab = with_tokenizer(path, tmp_path)
    shown = picture(100, 75)
    image = {"type": "image_url", "image_url": {"url": data_url(shown)}}
    options = "--np", "2", "--device", "cpu", "--mem", "64", "--max-num-batched-tokens", "8", cut, "2"
    with Server(str(tmp_path), *options) as server, torch.no_grad():
        text = {"prompt": [20] * 70, "max_tokens": 4, "ignore_eos": True}  # longer than the table of positions
        assert server.request("/v1/completions", text)[0] == 200
        for content in ([image], [image, {"type": "text", "text": "a picture of"}]):
            body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 40}
            body |= {"ignore_eos": True, "return_token_ids": True}
            status, answer, _ = server.request("/v1/chat/completions", body)
            assert status == 200, answer
            ids, tokens = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
            begin = [513] if len(content) == 1 else [513, vocab["a"], vocab["picture"], vocab["of"]]
            assert ids == [519] * 10 + begin
            text = begin + tokens
            logits = model(pixel_values=pixels(rules_of(path), shown), input_ids=torch.tensor([text])).logits[0]
            assert logits[len(begin) - 1 : -1].argmax(1).tolist() == tokens and len(tokens) == 40
