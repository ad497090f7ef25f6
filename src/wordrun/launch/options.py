"""The options of ``launch``, as ``parser`` reads them, with what kind of command they start."""

from __future__ import annotations

from dataclasses import dataclass, field

from wordrun.launch.wordrun_command import arguments_of_wordrun


@dataclass(frozen=True)
class Options:
    """The command line's options; None if not given."""

    np: int | None = None
    nodes: int | None = None
    ppn: int | None = None
    hostfile: str | None = None
    site: str | None = None
    scheduler: str | None = None
    launcher: str | None = None
    oversubscribe: bool = False
    cpu_bind: str | None = None
    env: tuple[tuple[str, str], ...] = ()
    """(NAME, VALUE) pairs in the order given; the last value of a name wins."""
    launcher_args: tuple[str, ...] = ()
    dry_run: bool = False
    json: bool = False
    info: bool = False
    doctor: bool = False
    stacks: str | None = None
    """The run whose ranks are asked for their stacks."""
    idle_timeout: float | None = None
    """Seconds without output after which the job is stopped."""
    hang: float | None = None
    """Seconds that ranks wait for other ranks before they report where each is, and the job is stopped."""
    retries: int = 0
    elastic: bool = False
    """Let a guardian on each node start the ranks, and restart them when one is killed."""
    no_preimport: bool = False
    """Let guardians import nothing for the ranks."""
    spare_nodes: int = 0
    submit: bool = False
    walltime: str | None = None
    """H:MM:SS."""
    queue: str | None = None
    account: str | None = None
    job_name: str = "wordrun"
    filesystems: str | None = None
    gpus: int | None = None
    """GPUs per node, for the job script."""
    cores: int | None = None
    """Cores per node, for the job script."""
    chain: int = 1
    no_freeze: bool = False
    """Let the job run the code as it is when the job starts, rather than a copy."""
    walltime_margin: float | None = None
    """How many seconds before the walltime ends ranks get SIGUSR1; 0: never."""
    help: bool = False
    version: bool = False
    typed: tuple[str, ...] = field(default=(), compare=False)
    """The command line's arguments before the command."""
    command: tuple[str, ...] = ()

    @property
    def runs_wordrun(self) -> bool:
        """Whether ``command`` is one of wordrun's."""
        return bool(self._arguments)

    @property
    def trains(self) -> bool:
        """Whether ``command`` is wordrun's training, which saves on SIGUSR1; it would kill most other programs."""
        after = self._arguments[:1]
        return bool(after) and (after[0] in ("", "train", "sweep") or "=" in after[0] or after[0][0] == "-")

    @property
    def sweeps(self) -> bool:
        """Whether ``command`` is a sweep that launches its points itself."""
        words = set(self._arguments)
        plugins = {"hydra/launcher=wordrun", "hydra/sweeper=wordrun_optuna"}
        return self.command_name == "sweep" or bool(words & {"-m", "--multirun"} and words & plugins)

    @property
    def studies(self) -> bool:
        """Whether ``command`` is a study, which launches its points itself."""
        return self.command_name == "study"

    @property
    def launches_points(self) -> bool:
        """Whether ``command`` calls launch itself."""
        return self.sweeps or self.studies

    @property
    def command_name(self) -> str:
        """The word after wordrun in ``command``; empty if there is none."""
        return next(iter(self._arguments), "")

    @property
    def _arguments(self) -> tuple[str, ...]:
        """What follows wordrun in ``command`` ("" if nothing does); empty if it is another command."""
        found = arguments_of_wordrun(self.command)
        return () if found is None else found or ("",)
