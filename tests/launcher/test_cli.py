"""The `phalanx` command: help, verbs, exit codes, and how little it loads."""

import importlib.metadata
import re
import shlex
import subprocess
import sys

import pytest
from phalanx import errors
from phalanx.launcher import cli
from phalanx.launcher.job import rank_bootstrap, supervisor
from phalanx.launcher.options import help, option_sources
from phalanx.rank.options import JOB_ENV, Options, specs
from phalanx.rank.server import config as server_config
from phalanx.rank.server.batch import config as batch_config


def phalanx(*argv, **more):
    command = [sys.executable, "-m", "phalanx.launcher.cli", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **more)


def test_it_loads_nothing_heavy():
    code = (
        "import sys; import phalanx; assert len([m for m in sys.modules if m.startswith('phalanx')]) == 1;"
        "import phalanx.launcher.cli; phalanx.launcher.cli.main(['serve', '--help']);"
        "phalanx.launcher.cli.main(['--help']);"
        "heavy = {'torch', 'mpi4py', 'cupy', 'tornado', 'numpy', 'asyncio', 'yaml', 'tokenizers', 'jinja2'};"
        "found = heavy & set(sys.modules); assert not found, found"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_help(capsys):
    assert cli.main(["--help"]) == 0
    overview = capsys.readouterr().out
    assert cli.main(["serve", "-h"]) == 0
    serve = capsys.readouterr().out
    assert all(len(line) <= 120 for line in (overview + serve).splitlines())
    assert all(spec.flag.help in serve for spec in specs().values())
    assert "--show-config" in serve and "--config FILE" in serve
    assert len(overview.splitlines()) < 30 and "serve --help" in overview
    for verb, what in cli.verbs().items():
        assert what and f"  {verb:8} {what}" in overview
    assert len(serve.splitlines()) < 120


def test_help_tells_the_limit_of_open_requests():
    text = help.options_help(Options)
    assert "sequences plus --max-num-seqs (1024)" in text


def test_every_listed_verb_has_help(capsys):
    for verb in cli.verbs():
        assert cli.main([verb, "--help"]) == 0
        assert f"phalanx {verb}" in capsys.readouterr().out.replace("[serve]", "serve")


def test_verbs_are_found_by_their_files(monkeypatch, tmp_path, capsys):
    assert list(cli.verbs()) == [
        "serve",
        "batch",
        "bench",
        "chat",
        "convert",
        "doctor",
        "fit",
        "gateway",
        "hostfile",
        "pull",
    ]
    assert "without network" in cli.verbs()["pull"]
    (tmp_path / "listing").mkdir()
    for name in ("__init__.py", "helpers.txt", "simple.py", "listing/__init__.py", "listing/command.py"):
        (tmp_path / name).write_text("import nothing_of_the_kind\nHELP = 'tell ' \\\n 'what'\n")
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(cli, "COMMANDS", tmp_path)
    assert cli.verbs() == {"listing": "tell what", "simple": "tell what"}


@pytest.mark.parametrize("word", ["__init__", "bench/command", "../cli", "fit.py", "command"])
def test_words_that_are_no_verbs(word, capsys):
    assert cli.main([word, "--show-config"]) == 0
    assert f"model                   {word}".split() == capsys.readouterr().out.splitlines()[0].split()[:2]


def test_show_config(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PHALANX_MEM", "512")
    file = tmp_path / "serve.yaml"
    file.write_text("api-key: hush\n")
    assert cli.main(["--p", "2100", "--config", str(file), "--show-config", "--d", "0,1", "--temperature", "0.5"]) == 0
    lines = {line.split()[0]: line.split(None, 2)[1:] for line in capsys.readouterr().out.splitlines()}
    assert list(lines) == list(specs())
    assert lines["port"] == ["2100", "command line (--p)"]
    assert lines["mem"] == ["512", "environment (PHALANX_MEM)"]
    assert lines["devices"] == ["0,1", "command line (--d)"]
    assert lines["temperature"] == ["0.5", "command line (--temperature)"]
    assert lines["api_key"] == ["(hidden)", f"{file} (api-key)"]
    assert lines["prefix_cache"] == ["on", "default"]
    assert lines["model"] == ["-", "default"]


def test_show_config_tells_what_is_in_force(capsys, monkeypatch):
    monkeypatch.setenv("PHALANX_PROT", "3")
    for argv, ranks, tp, pp in (
        (["--tp", "2"], "0 → 2", "2", "0 → 1"),
        (["--d", "0,1", "--pp", "2"], "0 → 2", "0 → 1", "2"),
        (["--np", "1"], "1", "0 → 1", "0 → 1"),
    ):
        assert cli.main([*argv, "--show-config"]) == 0
        out, err = capsys.readouterr()
        lines = {line.split()[0]: line.split("  ", 1)[1].strip().partition("  ")[0] for line in out.splitlines()}
        assert (lines["ranks"], lines["tp"], lines["pp"]) == (ranks, tp, pp)
        assert "environment variable PHALANX_PROT" in err
    assert cli.main(["--np", "3", "--tp", "2", "--show-config"]) == 2
    assert "phalanx: --tp 2" in capsys.readouterr().err


def test_a_key_on_the_command_line_is_warned_of():
    """Other users see it in ps."""
    (note,) = option_sources.read(Options, ["--api-key", "hush"], {}).notes
    assert "--api-key-file" in note and "PHALANX_API_KEY" in note and "hush" not in note
    assert not option_sources.read(Options, ["--api-key", "none"], {}).notes
    assert not option_sources.read(Options, ["--api-key-file", "f"], {"PHALANX_API_KEY": "hush"}).notes


def test_the_programs_own_variables_are_no_stray_options():
    own = (JOB_ENV, server_config.VARIABLE, batch_config.VARIABLE, supervisor.REQUEST_ENV, rank_bootstrap.PARENT_ENV)
    assert len(set(own)) == len(own) and set(own) <= set(option_sources.INTERNAL)
    assert option_sources.read(Options, [], dict.fromkeys(own, "x")).notes == []
    # Nor is one of them ever proposed.
    assert option_sources.read(Options, [], {"PHALANX_SUPERVISOR_REQUESTS": "x", "PHALANX_PARENTS": "x"}).notes == []


def test_show_config_of_defaults():
    chosen = option_sources.read(Options, [], {})
    assert help.show_config(chosen).count("default") == len(specs())


def test_a_wrong_option_is_one_line_and_code_2():
    done = phalanx("serve", "--prot", "3")
    assert (done.returncode, done.stdout) == (2, "")
    assert "phalanx: unknown option --prot;" in done.stderr


def test_no_verb_is_serve():
    done = phalanx("--p", "x")
    assert done.returncode == 2
    assert re.match(r"phalanx: --p 'x' .*: ", done.stderr)


def test_a_word_that_is_no_verb_is_a_model():
    done = phalanx("llama")
    assert done.returncode == 3
    assert "model 'llama':" in done.stderr


@pytest.mark.parametrize(
    ("word", "verb"), [("chatt", "chat"), ("srve", "serve"), ("docter", "doctor"), ("fits", "fit")]
)
def test_a_misspelled_verb(word, verb, capsys, monkeypatch, tmp_path):
    said = f"phalanx: {word!r} is no verb, and no model is there; did you mean phalanx {verb}?\n"
    monkeypatch.chdir(tmp_path)
    assert (cli.main([word, "--plain"]), capsys.readouterr().err) == (2, said)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setattr("phalanx.launcher.job.linux.let_another_speak", lambda: None)
    assert (cli.main([word]), capsys.readouterr().err) == (2, "")  # rank 0 says it
    for name in ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name)
    (tmp_path / word).mkdir()
    assert cli.main([word, "--show-config"]) == 0
    assert capsys.readouterr().out.split()[:2] == ["model", word]


@pytest.mark.parametrize("flag", ["--fit", "-fit"])
def test_a_flag_is_no_misspelled_verb(flag, capsys):
    assert cli.main([flag, "on", "--show-config"]) == 0
    assert re.search(f"{flag}.*effect", "".join(capsys.readouterr()))


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("phalanx 0.")


def test_an_old_python_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(cli.sys, "version_info", (3, 10, 4))
    monkeypatch.setattr(cli.sys, "version", "3.10.4 (main)")
    assert cli.main([]) == 2
    assert "phalanx: Python 3.11" in capsys.readouterr().err


def test_a_closed_pipe_is_no_error():
    done = subprocess.run(
        f"set -o pipefail; {shlex.quote(sys.executable)} -u -m phalanx.launcher.cli --help | true",
        shell=True, executable="/bin/bash", capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_the_public_face():
    import phalanx

    assert phalanx.__version__
    assert phalanx.LLM.__name__ == "LLM" and phalanx.SamplingParams().n == 1
    with pytest.raises(AttributeError, match="attribute 'nothing'"):
        phalanx.nothing  # noqa: B018


def test_a_checkout_that_is_not_installed_has_a_version(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert sys.modules["phalanx"].__version__ == "0+checkout"


@pytest.mark.parametrize("verb", ["", "fit", "chat"])
def test_a_full_disk_is_told_in_one_line(verb):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "phalanx.launcher.cli", *verb.split(), "--help"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1 and re.fullmatch("phalanx: .*TMPDIR.*No space left.*\n", done.stderr)


def test_ctrl_c_has_a_code_and_no_traceback(monkeypatch, capsys):
    def interrupted(words):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_verb", interrupted)
    assert cli.main(["fit"]) == errors.STOPPED
    assert capsys.readouterr() == ("", "")


def test_a_terminal_without_all_characters(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = phalanx("--help")
    assert (done.returncode, done.stderr) == (0, "") and " -hostfile H ?" in done.stdout


@pytest.mark.parametrize("words", [("serve",), ("batch", "-i", "x", "-o", "y", "--w"), ("chat", "--system")])
def test_words_that_are_no_text(capsys, words):
    assert cli.main([*words, "model\udcff"]) == 2
    assert "UTF-8 is needed," in capsys.readouterr().err
