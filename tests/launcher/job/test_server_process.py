"""The port is bound first, and what stands in its way is said with the remedy."""

import errno
import os
import re
import socket
import stat
import tempfile

import pytest
from phalanx.errors import FatalError
from phalanx.launcher.job import server_process
from phalanx.rank.options import Options
from phalanx.rank.server.config import SamplingDefaults

from ...certificates import make_certificate


@pytest.fixture
def listen():
    """server.listen whose sockets are closed again."""
    opened = []

    def bound(host, port=0):
        opened.append(server_process.listen(host, port))
        return opened[-1]

    yield bound
    for listener in opened:
        listener.socket.close()


def refusal(host, port=0):
    with pytest.raises(FatalError) as stop:
        server_process.listen(host, port)
    assert stop.value.code == 2
    return str(stop.value)


def test_a_free_port_is_picked(listen):
    listener = listen("127.0.0.1")
    port = listener.socket.getsockname()[1]
    assert port > 1023
    assert listener.url == f"http://127.0.0.1:{port}"
    assert not listener.open_to_all


def test_a_taken_port(listen):
    port = listen("127.0.0.1").socket.getsockname()[1]
    expected = f"port {port} on 127.0.0.1 is taken: choose another with --port, or let --port 0 pick a free one"
    assert refusal("127.0.0.1", port) == expected


def test_all_addresses(listen):
    listener = listen("0.0.0.0")
    assert listener.open_to_all
    assert listener.url == f"http://{socket.gethostname()}:{listener.socket.getsockname()[1]}"


@pytest.mark.parametrize("host", ["127.0.0.1:0", "tcp://127.0.0.1:0", "localhost", "127.0.0.1"])
def test_spellings_of_a_host(listen, host):
    assert listen(host).socket.getsockname()[0] in ("127.0.0.1", "::1")


def test_the_port_in_the_host_wins(listen):
    port = listen("127.0.0.1").socket.getsockname()[1]
    assert re.search(f"port {port}.*127.0.0.1.*taken", refusal(f"127.0.0.1:{port}", 1))


def test_ipv6(listen):
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    for host in ("::1", "[::1]", "[::1]:0"):
        assert listen(host).url.startswith("http://[::1]:")


def test_wrong_hosts():
    assert "--host 'no-such-host.invalid':" in refusal("no-such-host.invalid")
    assert re.search("--host '192.0.2.77'.*0.0.0.0", refusal("192.0.2.77", 1234))
    assert re.search("--host '127.0.0.1:abc'.*port", refusal("127.0.0.1:abc"))


def test_a_forbidden_port(monkeypatch):
    def bind(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(server_process.socket.socket, "bind", bind)
    assert re.search("port 80.*1024.*--p", refusal("127.0.0.1", 80))


def test_an_address_that_fails_in_another_way(monkeypatch):
    def bind(*_):
        raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))

    monkeypatch.setattr(server_process.socket.socket, "bind", bind)
    assert re.search("port 80.*buffer space", refusal("127.0.0.1", 80))


def test_unix_sockets(listen, tmp_path):
    path = tmp_path / "http"
    first = listen(f"unix://{path}")
    assert first.url == f"unix://{path}"
    assert re.search(f"unix://{path}.*another server", refusal(f"unix://{path}"))
    first.socket.close()
    assert listen(f"unix://{path}").url == f"unix://{path}"  # the socket that a killed server left
    assert re.search("--host unix:///nowhere/http.*No such file", refusal("unix:///nowhere/http"))


def test_a_unix_socket_is_for_this_user_and_goes_at_the_end(listen, tmp_path):
    path = tmp_path / "http"
    first = listen(f"unix://{path}")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    server_process.unlink(first)
    assert not path.exists()
    second = listen(f"unix://{path}")
    server_process.unlink(first)
    assert path.exists()  # it is another server's now
    server_process.unlink(second)
    server_process.unlink(listen("127.0.0.1"))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EAGAIN, errno.EPERM])
def test_a_unix_socket_that_may_live_is_left_alone(listen, tmp_path, monkeypatch, number):
    path = tmp_path / "http"
    listen(f"unix://{path}")

    def connect(*_):
        raise OSError(number, "as another user")

    monkeypatch.setattr(server_process.socket.socket, "connect", connect)
    assert refusal(f"unix://{path}").startswith(f"--host unix://{path}: ")
    assert path.exists()


def test_what_is_no_socket_is_left_alone(tmp_path):
    (tmp_path / "http").write_text("mine")
    assert re.search(f"unix://{tmp_path}/http.*in use", refusal(f"unix://{tmp_path}/http"))
    assert (tmp_path / "http").read_text() == "mine"


def test_the_jobs_directory(tmp_path, monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as runtime, tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        monkeypatch.setattr(server_process.tempfile, "gettempdir", lambda: temporary)
        directory = server_process.job_directory()
        assert os.path.dirname(directory) == temporary  # the other is removed at logout
        assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
        server_process.remove(directory)
        assert not os.path.exists(directory)
        monkeypatch.setattr(server_process.os, "access", lambda place, _: place == runtime)
        directory = server_process.job_directory()
        assert os.path.dirname(directory) == runtime
        server_process.remove(directory)
        monkeypatch.undo()
        monkeypatch.setattr(server_process.tempfile, "gettempdir", lambda: "/" + "x" * 100)
        directory = server_process.job_directory()
        assert directory.startswith("/tmp/phalanx-")
        server_process.remove(directory)
    monkeypatch.setattr(server_process.os, "access", lambda *_: False)
    with pytest.raises(FatalError, match="sockets.*written"):
        server_process.job_directory()


def test_the_configuration(listen):
    options = Options(
        model="/m", temperature=0.5, max_tokens=7, seed=3, api_key="k", strict=True, restarts=1,
        generation_config=False, served_model_name="a,b", queue_size=3, response_store=5, chat_template="/t",
        thinking=False, access_log=True, log_level="debug", log_format="json",
    )  # fmt: skip
    config = server_process.config(options, "/link", listen("127.0.0.1"), [1])
    assert config.url.startswith("http://127.0.0.1:") and config.url.endswith("/v1")
    assert config.sampling == SamplingDefaults(temperature=0.5, max_tokens=7, seed=3)
    assert (config.model_dir, config.link, config.cpus, config.parent_pid) == ("/m", "/link", [1], os.getpid())
    assert (config.api_keys, config.strict, config.restarts_expected, config.generation_config) == (
        ["k"], True, True, False,
    )  # fmt: skip
    assert (config.served_model_name, config.queue_size, config.chat_template) == ("a,b", 3, "/t")
    assert config.response_store == 5
    assert (config.thinking, config.access_log) == (False, True)
    assert (config.log_level, config.log_format) == ("debug", "json")


def test_names_by_which_it_may_be_called(listen):
    options = Options(allowed_hosts=("a.example",), allowed_origins=("*",))
    config = server_process.config(options, "/link", listen("localhost"), [])
    assert (config.allowed_hosts, config.allowed_origins) == (["a.example", "localhost"], ["*"])


def opened(host="127.0.0.1", **given):
    listener, options = server_process.open_for_clients(Options(host=host, port=0, **given))
    listener.socket.close()
    server_process.unlink(listener)
    return listener, options.api_key


@pytest.mark.parametrize("host, job, why", [("0.0.0.0", "", "other machines reach it"),
                                            ("127.0.0.1", "991", "other users may be on this node")])  # fmt: skip
def test_a_key_is_made_where_others_reach_the_server(monkeypatch, tmp_path, capfd, host, job, why):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", job)
    keys = [opened(host)[1] for _ in range(2)]
    assert keys[0] != keys[1] and min(map(len, keys)) > 40
    file = f"{tmp_path}/phalanx/jobs/{socket.gethostname()}-{os.getpid()}.json"
    assert re.search(f"{why}.*{file}.*--api-key none", capfd.readouterr().err.splitlines()[0])
    assert opened(host, api_key="k")[1] == "k"
    assert opened(f"unix://{tmp_path}/http")[1] == ""
    assert opened(host, api_key="none")[1] == ""
    warned = "phalanx: listening to other machines without a key: --api-key-file FILE lets only its holders in\n"
    assert capfd.readouterr().err == (warned if host == "0.0.0.0" else "")


def test_no_key_is_made_for_one_machine(monkeypatch, capfd):
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"):
        monkeypatch.delenv(name, raising=False)
    assert opened()[1] == "" and capfd.readouterr().err == ""


def test_no_place_for_a_key(monkeypatch, tmp_path):
    (tmp_path / "phalanx").write_text("a file")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(FatalError) as stop:
        opened("0.0.0.0")
    assert re.search(f"{tmp_path}/phalanx/jobs.*--api-key-file", str(stop.value))


def test_tls(tmp_path):
    cert, key = make_certificate(tmp_path)
    assert opened(tls_cert=cert, tls_key=key)[0].url.startswith("https://127.0.0.1:")
    cases = [
        ({"tls_cert": cert}, f"--tls-cert, --tls-key: {cert}: no PEM of a certificate and its private key"),
        ({"tls_key": key}, f"--tls-key {key}: its certificate is missing, --tls-cert FILE"),
        ({"tls_cert": cert, "tls_key": key, "host": "unix:///x"},
         f"--tls-cert {cert}: a unix socket needs no TLS: leave it out"),
    ]  # fmt: skip
    for given, message in cases:
        with pytest.raises(FatalError) as stop:
            opened(**given)
        assert str(stop.value) == message and stop.value.code == 2


def test_several_keys(listen):
    named = server_process.config(Options(api_key="ann a\nb"), "/link", listen("127.0.0.1"), [])
    assert named.api_keys == ["a", "b"]
    assert named.key_names == {"a": "ann"}
    assert server_process.config(Options(api_key="a\n \nb"), "/link", listen("127.0.0.1"), []).api_keys == ["a", "b"]
    assert server_process.config(Options(), "/link", listen("127.0.0.1"), []).api_keys == []
