"""Weights & Biases: online if there is a key and network access, offline otherwise, and never a prompt."""

from __future__ import annotations

import configparser
import importlib.util
import logging
import netrc
import os
import secrets
import shlex
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from wordrun.common.errors import UserError, first_line
from wordrun.common.log import LOGGER
from wordrun.common.suggestions import nearest
from wordrun.config.schema import as_dict
from wordrun.track.base import BackgroundTracker, RunInfo
from wordrun.track.metrics_jsonl import between
from wordrun.track.options import WandbConfig
from wordrun.track.run_json import NO_REASON, read as read_record

# At the end of a run, wandb's service has this long to send what remains.
FINISH_TIMEOUT_S = 60
MODES = ("online", "offline", "disabled", "dryrun", "shared")


class WandbTracker(BackgroundTracker):
    """One W&B run. It starts in the background of the first steps: importing wandb and starting it takes a second."""

    def __init__(self, options: WandbConfig, run: RunInfo, state: dict[str, Any]) -> None:
        super().__init__(options, run, state)
        asks = options.mode == "auto" and not os.environ.get("WANDB_MODE")
        self.mode = "" if asks else choose_mode(options)
        if self.mode != "disabled":
            LOGGER.info("starting W&B")
            if importlib.util.find_spec("wandb") is None:
                raise UserError("tracker=wandb: No module named 'wandb'; pip install wandb, or use tracker=jsonl")
        # Chosen before wandb is imported, because checkpoints contain it.
        self._id = state.get("id") or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
        self.started = self.send(self._start, {"resume": "allow"} if state else {})
        """Done once the W&B run exists."""
        if options.mode == "online":  # the user asked for it: report a failure before the first step
            self.started.result()

    def send(self, call: Callable[..., Any], *values: Any) -> Future[Any]:
        """Let the thread call ``call(*values)``; with WANDB_MODE=disabled do nothing, so that wandb is not imported."""
        return super().send(call, *values) if self.mode != "disabled" else super().send(lambda: None)

    def _start(self, more: dict[str, Any]) -> None:
        import wandb

        logging.getLogger("wandb").setLevel(logging.ERROR)
        options, run = self.options, self.run
        self.mode = self.mode or choose_mode(options)
        limits = {"init_timeout": 30, "finish_timeout": FINISH_TIMEOUT_S}  # old versions lack the latter
        known = {name: limit for name, limit in limits.items() if name in wandb.Settings.model_fields}
        settings: dict[str, Any] = {
            "project": options.project,
            "entity": options.entity,
            "group": options.group,
            "tags": options.tags,
            "dir": str(run.path),
            "name": run.path.name,
            "config": {**as_dict(run.cfg), **run.facts},
            "id": self._id,
            "settings": wandb.Settings(console="off", silent=True, **known),
            **more,
        }
        (run.path / "wandb").mkdir(exist_ok=True)  # without it, wandb writes to the temporary directory
        began = any(run.path.glob(f"wandb/*run-*-{self._id}"))
        try:
            self._wandb_run = wandb.init(**{**settings, "mode": self.mode})
        except Exception as error:
            reason = first_line(error)
            if options.mode != "auto" or self.mode != "online":
                raise UserError(
                    f"W&B failed to start ({reason}): use tracker.wandb.mode=offline or tracker=jsonl",
                    page="train.md#trackers",
                ) from error
            LOGGER.warning("W&B failed to go online (%s); recording offline", reason)
            self.mode = "offline"
            self._wandb_run = wandb.init(**{**settings, "mode": self.mode})

        if more:
            self._catch_up(began)

    def _catch_up(self, began: bool) -> None:
        """Send the lines up to the resumed step that W&B lacks, as far as this is known without asking its server.

        Args:
            began: whether W&B has recorded an earlier part of the run.
        """
        run = self.run
        earlier = read_record(run.path).get("earlier") or [{}]
        if self.mode in ("online", "shared"):
            self._logged = self._wandb_run.starting_step - 1
        elif not began:
            self._logged = -1
        elif earlier[-1].get("exit_reason", "") in NO_REASON:
            LOGGER.info(
                "W&B's offline record may lack the last seconds before the run was killed; metrics.jsonl has every line"
            )
        for line in between(run.path, self._logged, run.step):
            super().log(line)

    def log(self, metrics: dict[str, Any]) -> None:
        """Record a line of metrics, unless W&B already has this step, which is known only once W&B has started."""
        self.send(super().log, metrics)

    def rewind(self, step: int, logged: int) -> None:
        """Let the thread skip steps up to ``logged``, which are recorded, once it has sent what is pending."""
        self.send(super().rewind, step, logged)

    def append(self, step: int, metrics: dict[str, Any]) -> None:
        """Pass one line of metrics to wandb's own process; only the thread calls this."""
        self._wandb_run.log(metrics, step=step)

    def state(self) -> dict[str, Any]:
        """Return the run's id."""
        return {"id": self._id}

    def sample(self, step: int, text: str) -> None:
        """Keep the latest sample in the summary."""
        self.send(lambda: self._wandb_run.summary.update({"sample": text}))

    def abandon(self) -> None:
        """Forget wandb's process, which may have died."""
        super().abandon()
        if "wandb" in sys.modules:
            sys.modules["wandb"].teardown()

    def finish(self, summary: dict[str, Any], exit_status: int) -> None:
        """Close the run, and log where it is or how to upload it."""
        self.send(lambda: self._wandb_run.summary.update(summary))
        self.send(lambda: self._wandb_run.finish(exit_code=exit_status))
        self.drain()
        if self.mode == "offline":
            folder = Path(self._wandb_run.dir).parent  # each launch of a resumed run has its own
            parts = sorted(str(each) for each in folder.parent.glob(f"offline-run-*-{self._id}")) or [str(folder)]
            text = "W&B recorded offline; to upload, on a machine with network access:\n  wandb sync %s"
            LOGGER.info(text, shlex.join(parts))
        elif self.mode == "online":
            LOGGER.info("W&B: %s", self._wandb_run.url)


def choose_mode(options: WandbConfig) -> str:
    """Return the mode: tracker.wandb.mode unless it is auto, then ``$WANDB_MODE``, then that in
    W&B's settings file, then what is possible.

    Raises:
        UserError: tracker.wandb.mode=online without a key.
    """
    if options.mode == "auto" and os.environ.get("WANDB_MODE"):
        mode = os.environ["WANDB_MODE"]
        if mode not in MODES:
            raise UserError(f"WANDB_MODE={mode} should be one of {', '.join(MODES)}{nearest(mode, MODES)}, or unset")
        return mode
    settings = _settings()
    if options.mode == "auto" and settings.get("mode") in ("offline", "disabled"):  # by `wandb offline`
        return settings["mode"]
    if options.mode == "offline":
        return "offline"
    url = urlsplit(os.environ.get("WANDB_BASE_URL") or settings.get("base_url") or "https://api.wandb.ai")
    host = url.hostname or ""
    has_key = _has_key(host, url.netloc)
    if options.mode == "online":
        if not has_key:
            raise UserError(
                "tracker.wandb.mode=online needs a key: run `wandb login`, export WANDB_API_KEY, or use "
                "tracker.wandb.mode=offline"
            )
        return "online"
    if not has_key:
        return "offline"
    proxy = urlsplit(os.environ.get("https_proxy") or os.environ.get("HTTPS_PROXY") or "")
    target = (proxy.hostname, proxy.port or 3128) if proxy.hostname else (host, url.port or 443)
    return "online" if _answers(target, options.probe_s) else "offline"


def _settings() -> dict[str, str]:
    """Return what `wandb login --host` and `wandb offline` have written: for the user, or for the working directory.

    wandb itself reads these files (wandb/sdk/lib/settings_file.py), but importing it takes a second.
    """
    parser = configparser.ConfigParser(interpolation=None)
    folder = Path(os.environ.get("WANDB_DIR") or ".")
    here = next((each for each in (folder / ".wandb", folder / "wandb") if each.is_dir()), folder / "wandb")
    try:
        user = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
        parser.read([user / "settings", here / "settings"])
        return dict(parser["default"]) if "default" in parser else {}
    except (OSError, configparser.Error, UnicodeDecodeError):  # wandb ignores such a file with a warning
        return {}


def _has_key(*hosts: str) -> bool:
    """Return whether there is a key, in the environment or for one of ``hosts``, with and without a port, in netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        known = netrc.netrc(os.environ.get("NETRC"))
        return any(known.authenticators(host) for host in hosts)
    except (OSError, netrc.NetrcParseError):
        return False


def _answers(target: tuple[str, int], seconds: float) -> bool:
    """Return whether ``target`` accepts a connection; uses a thread, because name resolution has no timeout."""
    reached = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection(target, timeout=seconds).close()
            reached.set()
        except OSError:
            pass

    probe = threading.Thread(target=connect, daemon=True)
    probe.start()
    probe.join(seconds)
    return reached.is_set()
