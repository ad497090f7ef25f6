"""flux run, Flux's launcher."""

import signal
import subprocess

from wordrun.common.errors import ConfigError
from wordrun.launch.launchers.base import Launcher, find_command, rank_command


class Flux(Launcher):
    """Ranks run as a job of the Flux instance."""

    name = "flux"
    scheduler = "flux"  # makes it the default where FLUX_URI is set
    stale = ("FLUX_JOB_", "FLUX_TASK_")  # another launcher's ranks must not see these
    is_step = True  # Flux's daemons start the ranks, so launch cannot signal them as its own children
    death_signal = signal.SIGTERM  # SIGKILL would leave the ranks running

    @classmethod
    def find(cls, search):
        path, _ = find_command("flux", search.env.get("PATH", ""))
        if not path or search.job.scheduler != cls.scheduler:
            raise ConfigError("--launcher flux: needs flux in PATH and FLUX_URI, as in the shell of `flux alloc`")
        return cls(path, "the Flux instance's launcher, in PATH")

    def argv(self, request):
        if not request.ranks.even:
            raise ConfigError(f"{request.ranks.why}: Flux starts the same number of ranks on each node: use --ppn")
        options, ranks = request.options, request.ranks
        part = ranks.nodes < len(request.job.hosts) or options.hostfile or request.job.partial
        hosts = (f"--requires=hosts:{','.join(request.hosts)}",) if part else ()
        size = f"-N {ranks.nodes} -n {ranks.np} --cores-per-task={self.cores_per_rank(request)} -o gpu-affinity=off"
        words = ("run", "-u", *size.split(), *hosts, f"--job-name={request.decided.step}", *options.launcher_args)
        return (self.path, *words, *rank_command(options))

    def send(self, number, pid, job, step):
        ids = subprocess.run([self.path, "pgrep", f"^{step}$"], capture_output=True, text=True, timeout=10).stdout
        asked = signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number)
        for each in ids.split():
            subprocess.run([self.path, "job", "kill", "-s", asked.name, each], capture_output=True, timeout=10)
