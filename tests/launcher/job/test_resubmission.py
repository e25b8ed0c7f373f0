"""How a job submits its successor: what Slurm tells of it, what the new job inherits, and when it is submitted."""

import stat
import subprocess
import time

import pytest
from phalanx.errors import FatalError
from phalanx.launcher.job import resubmission
from phalanx.rank.options import Options
from phalanx.rank.server.config import PREDECESSOR, SERVICE

SHOWN = """JobId=7 JobName=llm
   Priority=1 Nice=0
   StartTime=2030-01-01T00:00:00 EndTime={end} Deadline=N/A
   Command=/home/me/my jobs/serve.sh
   SubmitLine=sbatch --time=4:00:00 -d afterok:5 --begin now+1hour serve.sh
   WorkDir=/home/me/my jobs
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A job of a Slurm whose scontrol is a script."""

    def scontrol(end="Unknown", shown=SHOWN, script="#!/bin/bash\necho $1\n"):
        (tmp_path / "shown").write_text(shown.replace("{end}", end).replace("my jobs", "jobs"))
        (tmp_path / "script").write_text(script)
        program = tmp_path / "scontrol"
        program.write_text(
            f'#!/bin/sh\ncase "$*" in "show job 7") cat {tmp_path}/shown ;;\n'
            f'"write batch_script 7 -") cat {tmp_path}/script ;; *) echo "unexpected: $*" >&2; exit 1 ;; esac\n'
        )
        program.chmod(stat.S_IRWXU)
        return {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "llm"}

    return scontrol


def test_the_same_job_again_in_slurm(slurm):
    now = time.time()
    environ = slurm(end=time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(now + 7200)))
    environ |= {"SLURM_NTASKS": "4", "OMPI_COMM_WORLD_RANK": "0", "PHALANX_API_KEY": "secret", "HF_TOKEN": "secret"}
    environ |= {"PHALANX_PREDECESSOR": "older", "PHALANX_PORT": "0", "SLURM_CONF": "/etc/slurm.conf"}
    plan = resubmission.plan(Options(resubmit=True), environ, now)
    assert plan.command == ["sbatch", "--parsable", "--time=4:00:00", "--job-name=llm"]
    assert plan.script == "#!/bin/bash\necho $1\n" and plan.directory == "/home/me/jobs"
    assert plan.look == ["squeue", "--noheader", "--jobs", "{job}", "--format", "%T"]
    assert plan.environ.keys() == {"PATH", "PHALANX_PORT", "SLURM_CONF", SERVICE}  # no key, nothing of this job's own
    assert plan.submit_at == pytest.approx(now + 7200 - 1800, abs=2)  # a third, and half an hour at most
    assert plan.drain_at == pytest.approx(now + 7200 - 120, abs=2)
    assert plan.stop_at == pytest.approx(now + 7200 - 60, abs=2)


def test_the_time_that_slurm_tells_or_the_user_says(slurm):
    now = time.time()
    environ = slurm() | {"SLURM_JOB_END_TIME": str(int(now + 180))}
    plan = resubmission.plan(Options(resubmit=True, handover=100), environ, now)
    assert plan.submit_at == pytest.approx(now + 80, abs=1)
    assert (plan.end - plan.stop_at, plan.end - plan.drain_at) == (pytest.approx(25, abs=1), pytest.approx(50, abs=1))
    plan = resubmission.plan(Options(resubmit=True), environ, now)
    assert plan.submit_at == pytest.approx(now + 120, abs=1)
    for lead in (0, 1, 20, 179):  # whatever is asked for, there is time for a successor before this job drains
        plan = resubmission.plan(Options(resubmit=True, handover=lead), environ, now)
        assert plan.submit_at < plan.drain_at < plan.stop_at < plan.end
    assert resubmission.plan(Options(resubmit=True, time_left="30m"), environ, now).end == pytest.approx(now + 1800)
    with pytest.raises(FatalError, match="--handover 200"):
        resubmission.plan(Options(resubmit=True, handover=200), environ, now)
    with pytest.raises(FatalError, match="--time-left"):
        resubmission.plan(Options(resubmit=True), slurm(), now)


@pytest.mark.parametrize(
    "environ, look", [({"PBS_JOBID": "7.pbs"}, "qstat"), ({"LSB_JOBID": "7"}, "bjobs"), ({}, None)]
)
def test_a_command_of_the_users_elsewhere(environ, look):
    options = Options(resubmit=True, time_left="4h", resubmit_command="qsub job.sh")
    plan = resubmission.plan(options, environ, time.time())
    assert plan.command == ["/bin/sh", "-c", "qsub job.sh"] and not plan.script
    assert (plan.look or [None])[0] == look
    with pytest.raises(FatalError, match="--resubmit-command"):
        resubmission.plan(Options(resubmit=True, time_left="4h"), environ, time.time())


def started(ago):
    """A time in the past as PBS writes it."""
    return time.strftime("%a %b %d %H:%M:%S %Y", time.localtime(time.time() - ago))


@pytest.mark.parametrize(
    "name, program, told, left",
    [
        ("PBS_JOBID", "qstat", "    stime = {}\n    Resource_List.walltime = 04:00:00\n    qtime = x", 4 * 3600 - 600),
        ("PBS_JOBID", "qstat", "    Resource_List.walltime = 04:00:00\n    start_time = {}\n", 4 * 3600 - 600),
        ("PBS_JOBID", "qstat", "    stime = {}\n", None),  # no limit
        ("LSB_JOBID", "bjobs", "3:50 L\n", 3 * 3600 + 50 * 60),
        ("LSB_JOBID", "bjobs", "3:50 E\n", None),
        ("LSB_JOBID", "bjobs", "-\n", None),
    ],
)
def test_the_time_that_pbs_and_lsf_tell(tmp_path, name, program, told, left):
    (tmp_path / "told").write_text(told.format(started(600)))
    (tmp_path / program).write_text(f'#!/bin/bash\n[ "${{@: -1}}" = 7 ] && cat {tmp_path}/told\n')
    (tmp_path / program).chmod(stat.S_IRWXU)
    now, environ = time.time(), {name: "7", "PATH": f"{tmp_path}:/usr/bin:/bin"}
    options = Options(resubmit=True, resubmit_command="qsub job.sh")
    if left is None:
        with pytest.raises(FatalError, match="--time-left"):
            resubmission.plan(options, environ, now)
    else:
        assert resubmission.plan(options, environ, now).end == pytest.approx(now + left, abs=2)
        options = Options(resubmit=True, resubmit_command="qsub job.sh", time_left="1h")
        assert resubmission.plan(options, environ, now).end == pytest.approx(now + 3600, abs=2)


def test_what_is_refused(slurm):
    now = time.time()
    with pytest.raises(FatalError, match="--resubmit-command"):
        resubmission.plan(Options(resubmit_command="qsub x"), {}, now)
    assert resubmission.plan(Options(), {}, now) is None
    with pytest.raises(FatalError, match="script of job 7"):
        resubmission.plan(Options(resubmit=True, time_left="1h"), slurm(script=""), now)
    with pytest.raises(FatalError, match="scontrol"):
        resubmission.plan(Options(resubmit=True, time_left="1h"), slurm() | {"SLURM_JOB_ID": "8"}, now)


@pytest.mark.parametrize(
    "line, command, kept",
    [
        ("sbatch job.sh", "/x/job.sh", []),
        ("sbatch -N 2 --gpus=4 ./job.sh", "/x/job.sh", ["-N", "2", "--gpus=4"]),
        ("sbatch --wrap=phalanx --mem=4G", "(null)", ["--mem=4G"]),
        ("sbatch --parsable -a 1-4 --dependency=singleton -p gpu job.sh", "/x/job.sh", ["-p", "gpu"]),
        (
            "sbatch -W -d12 -a0-3 -bnow+1hour --wait --test-only --hold -D /x -w n1 job.sh",
            "/x/job.sh",
            ["-D", "/x", "-w", "n1"],
        ),
        ("", "", []),
    ],
)
def test_the_options_of_the_line_that_submitted_it(line, command, kept):
    assert resubmission.submit_options(line, command) == kept


@pytest.mark.parametrize(
    "line, directive, inherited, export",
    [
        ("--export=NONE", "", "", f"{PREDECESSOR},{SERVICE}"),
        ("--export NIL", "", "ALL", f"{PREDECESSOR},{SERVICE}"),
        ("--export=HOME,A=1", "--export=ALL", "", f"HOME,A=1,{PREDECESSOR},{SERVICE}"),
        (f"--export={PREDECESSOR},{SERVICE}", "", "", ""),  # as the successor's line has it
        ("--export=ALL,A=1", "--export=NONE", "NONE", ""),
        ("", "--export=NONE # a clean start", "", f"{PREDECESSOR},{SERVICE}"),
        ("", "--export=NONE", "ALL", ""),
        ("", "", "NONE", f"{PREDECESSOR},{SERVICE}"),
        ("--mem=4G", "--time=9", "", ""),
    ],
)
def test_a_successor_gets_what_it_needs_whatever_is_exported(slurm, line, directive, inherited, export):
    shown = SHOWN.replace("--time=4:00:00", line)
    script = f"#!/bin/bash\n#SBATCH {directive}\n\ntrue\n#SBATCH --export=NONE\n"
    environ = slurm(shown=shown, script=script) | ({"SBATCH_EXPORT": inherited} if inherited else {})
    plan = resubmission.plan(Options(resubmit=True, time_left="1h"), environ, time.time())
    assert [word for word in plan.command if PREDECESSOR in word and word not in line] == (
        [f"--export={export}"] if export else []
    )


def test_a_script_with_which_sbatch_waits_is_refused(slurm):
    environ = slurm(script="#!/bin/bash\n#SBATCH -W\nphalanx serve\n")
    with pytest.raises(FatalError, match="--wait"):
        resubmission.plan(Options(resubmit=True, time_left="1h"), environ, time.time())


def test_a_command_and_a_time_need_no_scontrol(tmp_path):
    options = Options(resubmit=True, time_left="4h", resubmit_command="sbatch job.sh")
    plan = resubmission.plan(options, {"SLURM_JOB_ID": "7", "PATH": str(tmp_path)}, time.time())
    assert plan.command[-1] == "sbatch job.sh" and plan.look[0] == "squeue"


def test_arguments_of_the_script_are_refused():
    with pytest.raises(FatalError, match="big fast"):
        resubmission.submit_options("sbatch job.sh big fast", "/x/job.sh")


def test_a_job_and_its_successors_have_the_same_key(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv(SERVICE, raising=False)
    first = resubmission.shared_key(Options(), {})
    (path,) = (tmp_path / "phalanx" / "keys").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    later = {SERVICE: resubmission.service({}), PREDECESSOR: "x"}
    assert len(first) > 30 and resubmission.shared_key(Options(), later) == first
    assert resubmission.shared_key(Options(api_key="given"), later) == "given"
    assert resubmission.shared_key(Options(), later) == "given"
    assert resubmission.shared_key(Options(), {SERVICE: "another"}) != "given"
    assert "/" not in resubmission.service({SERVICE: "../../etc"})


@pytest.mark.parametrize(
    ("flux", "code", "told"),
    [
        ("echo RUN", 0, "RUN\n"),
        ("echo INACTIVE", 0, ""),  # Flux lists jobs that have ended, too
        ("echo 'flux-jobs: ERROR: JobID 12 unknown' >&2; exit 1", 1, "unknown"),
        ("echo 'flux-jobs: ERROR: no broker' >&2; exit 1", 1, "no broker"),
    ],
)
def test_the_look_at_a_job_of_flux(tmp_path, flux, code, told):
    program = tmp_path / "flux"
    program.write_text(f'#!/bin/sh\n[ "$*" = "--parent jobs --no-header -o {{state}} 12" ] || exit 9\n{flux}\n')
    program.chmod(0o755)
    words = [word.format(job="12") for word in resubmission._LOOKS["FLUX_JOB_ID"]]
    done = subprocess.run(words, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, timeout=20)
    assert done.returncode == code and told in done.stdout + done.stderr
    assert bool(done.stdout) == (told == "RUN\n")
