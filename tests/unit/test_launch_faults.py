"""Which failures are worth another try, by lines that launchers have printed."""

from __future__ import annotations

import pytest

from wordrun.common.errors import ConfigError
from wordrun.launch.job import Job, hold_back
from wordrun.launch.retries import port_taken, reported_fault

# Recorded, but for the names of PALS's hosts.
CURABLE = {
    "srun: error: Node failure on bask-pg0309u11a": ("bask-pg0309u11a",),
    "error: *** STEP 955500.0 ON bask-pg0308u06a CANCELLED AT 2024-06-01T12:00:00 DUE TO NODE FAILURE ***": (),
    "launch failed on x3209c0s19b0n0: Couldn't forward RPC launch": ("x3209c0s19b0n0",),
    "[mpiexec@h1] control_cb (src/pm/hydra/mpiexec/pmiserv_cb.c:280): assert (!closed) failed": (),
    "mpiexec: No VNIs available": (),
    "CXI alloc failed on cxi0: request exceeds PTEs, TXQs": (),
    "RuntimeError: The server socket has failed to listen: EADDRINUSE, address already in use": (),
}


@pytest.mark.parametrize(("line", "hosts"), CURABLE.items())
def test_faults_that_a_relaunch_can_cure(line: str, hosts: tuple[str, ...]) -> None:
    fault = reported_fault(["step 10 loss 3.2", line, "srun: error: n2: task 3: Killed"], 1)
    assert fault is not None
    assert fault.line == line
    assert fault.hosts == hosts


@pytest.mark.parametrize(
    "line",
    [
        "ZeroDivisionError: a bug on rank 1",
        "torch.OutOfMemoryError: CUDA out of memory",
        "model.n_embd=130 is not divisible by model.n_head=4",
        "srun: error: n2: task 3: Exited with exit code 1",
        "FileNotFoundError: [Errno 2] No such file or directory: 'data.txt'",
        "",
    ],
)
def test_faults_of_the_program_are_not_retried(line: str) -> None:
    assert reported_fault([line], 1) is None


@pytest.mark.parametrize("status", [0, 2, 75])
def test_success_and_wrong_options_are_no_faults(status: int) -> None:
    assert reported_fault(["srun: error: Node failure on n2"], status) is None


@pytest.mark.parametrize(("port", "taken"), [(12345, True), (2345, False), (80, False)])
def test_only_the_launchs_own_port_counts_as_taken(port: int, taken: bool) -> None:
    line = "port: 12345, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
    assert (
        port_taken(["step 1", f"The server socket has failed to listen on any local network address. {line}"], port)
        is taken
    )
    assert not port_taken([f"listening at {port}", "OSError: [Errno 98] Address already in use"], port)


FOUR = Job(
    hosts=("n1", "n2.x", "n3", "n4"), cores=(4, 3, 2, 1), devices=(0,) * 4, slots=(1,) * 4, scheduler="slurm", id="7"
)


def test_spares_replace_failed_hosts() -> None:
    assert hold_back(FOUR, 0) is FOUR
    assert hold_back(FOUR, 2).hosts == ("n1", "n2.x")
    after = hold_back(FOUR, 2, frozenset({"n2"}))
    assert (after.hosts, after.cores) == (("n1", "n3"), (4, 2))
    assert hold_back(FOUR, 2, frozenset({"n1", "n2", "n3"})).hosts == ("n4",)
    assert hold_back(FOUR, 0, frozenset({"n4"})).hosts == ("n1", "n2.x", "n3")


@pytest.mark.parametrize(("spares", "failed"), [(4, set()), (1, {"n1", "n2", "n3", "n4"})])
def test_no_host_left(spares: int, failed: set[str]) -> None:
    with pytest.raises(ConfigError, match="none would be left"):
        hold_back(FOUR, spares, frozenset(failed))
