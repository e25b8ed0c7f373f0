"""A model directory's links, FIFOs and devices: what is read, and what is refused at once."""

import json
import os
import shutil
from pathlib import Path

import pytest
from phalanx.errors import FatalError
from phalanx.launcher.commands.doctor import disk
from phalanx.rank import safetensors_header, untrusted_files
from phalanx.rank.checkpoint_files import config_bytes, read_index
from phalanx.rank.model import fingerprint
from phalanx.rank.model.config import read_config
from phalanx.rank.model.weights.local_copy import make_local_copy
from phalanx.rank.server.batch.weights_fingerprint import fingerprint as batch_fingerprint
from phalanx.rank.server.text.load import Text

from ..checkpoints import make_checkpoint

ENVIRON = "/proc/self/environ"
INDEX = "model.safetensors.index.json"
pytestmark = pytest.mark.timeout(60)  # of what would block for ever


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("whole") / "model", shards=2)


@pytest.fixture
def model(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "models--a--b" / "snapshots" / "0123"))


def replace(file: Path, target: Path | str) -> None:
    """Let a link to `target` stand for the file."""
    file.unlink(missing_ok=True)
    file.parent.mkdir(exist_ok=True)
    file.symlink_to(target)


def read_all(model: Path) -> None:
    read_config(model)
    read_index(model)
    batch_fingerprint(str(model))
    Text(str(model))


def test_links_of_the_hubs_cache_are_followed(model, whole):
    blobs = model.parent.parent / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(model.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(f"../../blobs/{number}")
    (model / "1_Pooling").mkdir()
    (blobs / "pooling").write_text('{"pooling_mode_cls_token": true}')
    (model / "1_Pooling" / "config.json").symlink_to("../../../blobs/pooling")
    read_all(model)
    assert Text(str(model)).pooling == "cls"
    assert fingerprint.take(model, True) == fingerprint.take(whole, True)


def test_a_link_to_the_directory_and_links_inside_it_are_followed(model, tmp_path):
    (model / "config.json").rename(model / "config-2.json")
    (model / "config.json").symlink_to("config-2.json")
    (tmp_path / "link").symlink_to(model)
    read_all(tmp_path / "link")


def test_weights_may_be_elsewhere(model, tmp_path):
    (tmp_path / "shared").mkdir()
    for file in model.glob("*.safetensors"):
        file.rename(tmp_path / "shared" / file.name)
        file.symlink_to(tmp_path / "shared" / file.name)
    read_all(model)


@pytest.mark.parametrize("target", [ENVIRON, "secret.json", "../../blobs/../../secret.json", "/dev/zero", "fifo"])
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", read_config),
        ("config.json", config_bytes),
        ("config.json", lambda model: Text(str(model))),
        (INDEX, read_index),
        ("tokenizer.json", lambda model: Text(str(model))),
        ("tokenizer_config.json", lambda model: Text(str(model))),
        ("generation_config.json", lambda model: Text(str(model))),
        ("chat_template.jinja", lambda model: Text(str(model))),
        ("additional_chat_templates/a.jinja", lambda model: Text(str(model))),
        ("1_Pooling/config.json", lambda model: Text(str(model))),
    ],
)  # fmt: skip
def test_small_files_elsewhere_are_refused(model, tmp_path, name, read, target):
    """A name that is no file for certain, as behind it is a device or a FIFO, the model may also be without it."""
    (tmp_path / "secret.json").write_text('{"hush": "hush"}')
    os.mkfifo(tmp_path / "fifo")
    outside = target if target.startswith("/") else tmp_path / target
    replace(model / name, outside)
    try:
        read(model)
    except (FatalError, OSError) as error:
        assert name.rpartition("/")[2] in str(error) and "hush" not in str(error)
        return
    assert not (model / name).is_file()


@pytest.mark.parametrize("name", ["tekken.json", "tokenizer.model"])
def test_other_tokenizers_elsewhere_are_refused(model, tmp_path, name):
    (model / "tokenizer.json").rename(tmp_path / "secret")
    (model / name).symlink_to(tmp_path / "secret")
    with pytest.raises((OSError, ValueError), match="model's directory"):
        Text(str(model))


def test_blobs_that_are_a_link_are_no_cache(model, tmp_path):
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "a").write_text("{}")
    (model.parent.parent / "blobs").symlink_to(tmp_path / "private")
    replace(model / "chat_template.jinja", "../../blobs/a")
    with pytest.raises(OSError, match="model's directory"):
        Text(str(model))


@pytest.mark.parametrize("kind", ["fifo", "/dev/zero", ENVIRON, "/sys/kernel/uevent_seqnum", "directory", "loop"])
@pytest.mark.parametrize("file", ["model-00001-of-00002.safetensors", "model.gguf"])
def test_weights_that_are_no_file_are_refused_at_once(model, tmp_path, file, kind):
    path = model / file
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(path if kind == "loop" else kind)
    wanted = path if file.endswith(".gguf") else model
    with pytest.raises(FatalError) as stop:
        read_index(wanted)
    assert file in str(stop.value) and "PATH" not in str(stop.value)
    if wanted == model:
        with pytest.raises(OSError):
            untrusted_files.open_weights(path)
        batch_fingerprint_fails(model)
        assert file not in [one.name for one in disk.weights(model)] or kind.startswith("/")


def batch_fingerprint_fails(model: Path) -> None:
    with pytest.raises(FatalError):
        batch_fingerprint(str(model))


@pytest.mark.parametrize("named", ["/etc/hostname", "../../../secret", "a/../../secret"])
def test_an_index_names_no_file_elsewhere(model, named):
    index = json.loads((model / INDEX).read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], named)
    (model / INDEX).write_text(json.dumps(index))
    with pytest.raises(FatalError) as stop:
        safetensors_header.read_index(model)
    assert named in str(stop.value) and "outside" in str(stop.value)


def test_a_small_file_that_is_large(model):
    os.truncate(model / "tokenizer.json", untrusted_files.LARGEST + 1)
    with pytest.raises(OSError, match="larger than"):
        Text(str(model))


def test_a_staged_copy_takes_no_file_from_elsewhere(model, tmp_path):
    (tmp_path / "secret").write_text("{}")
    replace(model / "generation_config.json", tmp_path / "secret")
    (tmp_path / "copy").mkdir()
    with pytest.raises((FatalError, OSError), match="model's directory"):
        make_local_copy(model, tmp_path / "copy", lambda done, total: None)


def test_ends_of_lines_in_templates(model):
    """Text is read as Python reads text files."""
    (model / "chat_template.jinja").write_bytes(b"a\r\nb\rc\n")
    assert untrusted_files.read_text(model, "chat_template.jinja") == "a\nb\nc\n"
