"""`phalanx batch` in the shell of `srun --pty bash`, which is an MPI job of one: it starts the ranks asked for."""

import pytest
from phalanx.launcher.commands import batch

STEP = {
    "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "PMIX_RANK": "0",
}  # fmt: skip


@pytest.fixture
def step(monkeypatch):
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)


def shown(capsys, *argv) -> dict[str, str]:
    assert batch.main([*argv, "--show-config"]) == 0
    return dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())


def test_several_ranks_are_started_from_here(step, capsys, monkeypatch, tmp_path):
    found = shown(capsys, "--np", "2")
    assert found["ranks"].split()[0] == "2"
    assert found["tp"].split()[:3] == ["0", "→", "2"]
    # And the run itself is supervised: nothing joins the step.
    (tmp_path / "in.jsonl").write_text('{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x"}}\n')
    started = []
    monkeypatch.setattr(batch.rank_bootstrap, "join", lambda *_: pytest.fail("it joined the step of one"))
    monkeypatch.setattr(batch, "run", lambda config, options: started.append((config.supervised, options.ranks)) or 0)
    words = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--load-format", "dummy"]
    assert batch.main([*words, "--np", "2", "--device", "cpu"]) == 0
    assert started == [(True, 2)]


def test_one_rank_is_the_step(step, capsys):
    assert shown(capsys)["ranks"].split()[:3] == ["0", "→", "1"]
