"""Weights & Biases: online where a key and the network are there, offline everywhere else, never a question."""

from __future__ import annotations

import logging
import netrc
import os
import socket
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from wordrun.config import Config, WandbConfig
from wordrun.errors import UserError, nearest
from wordrun.log import LOGGER
from wordrun.track.base import Kept

# wandb's service gets this long at the end of a run to send what it still has.
FINISH_TIMEOUT_S = 60
MODES = ("online", "offline", "disabled", "dryrun", "shared")


class WandbTracker:
    """One W&B run, on rank 0."""

    def __init__(self, cfg: Config, run_dir: Path, facts: dict[str, Any], kept: Kept) -> None:
        options = cfg.tracker
        assert isinstance(options, WandbConfig)
        try:
            import wandb
        except ImportError as error:
            raise UserError(f"tracker=wandb cannot import it ({error}): pip install wandb, or tracker=jsonl") from None
        logging.getLogger("wandb").setLevel(logging.ERROR)
        self.run_dir = run_dir
        self.mode = choose_mode(options)
        settings = {
            "project": options.project, "entity": options.entity, "group": options.group, "tags": options.tags,
            "dir": str(run_dir), "name": run_dir.name, "config": {**asdict(cfg), **facts},
        }  # fmt: skip
        if "wandb" in kept.states:
            settings |= {"id": kept.states["wandb"]["id"], "resume": "allow"}
        # W&B keeps what it once got: steps that are taken again are not told it again.
        self._seen = kept.seen if "wandb" in kept.states else -1
        self.run = self._init(wandb, settings, fall_back=options.mode == "auto")

    def _init(self, wandb: Any, settings: dict[str, Any], fall_back: bool) -> Any:
        limits = {"init_timeout": 30, "finish_timeout": FINISH_TIMEOUT_S}  # the latter not in old versions
        known = {name: limit for name, limit in limits.items() if name in wandb.Settings.model_fields}
        quiet = wandb.Settings(console="off", silent=True, **known)
        (self.run_dir / "wandb").mkdir(exist_ok=True)  # without it, wandb writes to the temporary folder
        try:
            return wandb.init(**settings, mode=self.mode, settings=quiet)
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            if not fall_back or self.mode != "online":
                raise UserError(f"W&B cannot start ({reason}): tracker.mode=offline or tracker=jsonl") from error
            LOGGER.warning("W&B refuses to go online (%s); recording offline", reason)
            self.mode = "offline"
            return wandb.init(**settings, mode=self.mode, settings=quiet)

    def log(self, metrics: dict[str, Any]) -> None:
        """Hand one line of metrics to wandb's own process."""
        if metrics["step"] <= self._seen:
            return
        self.run.log({name: value for name, value in metrics.items() if value is not None}, step=metrics["step"])

    def rewind(self, step: int, seen: int) -> None:
        """Go on at ``step``; what it was told up to step ``seen`` is not told again."""
        self._seen = max(self._seen, seen)

    def state(self) -> dict[str, Any]:
        """Return the run's id."""
        return {"wandb": {"id": self.run.id}}

    def sample(self, step: int, text: str) -> None:
        """Keep the latest sample in the summary."""
        self.run.summary["sample"] = text

    def finish(self, summary: dict[str, Any], exit_status: int) -> None:
        """Close the run, and say where it is or how to upload it."""
        self.run.summary.update(summary)
        folder, url = Path(self.run.dir).parent, self.run.url if self.mode == "online" else None
        self.run.finish(exit_code=exit_status)
        if self.mode == "offline":
            LOGGER.info("W&B recorded offline; from a machine with a network: wandb sync %s", folder)
        elif self.mode == "online":
            LOGGER.info("W&B: %s", url)


def choose_mode(options: WandbConfig) -> str:
    """Return online, offline or disabled: ``$WANDB_MODE`` first, then ``tracker.mode``, then what is possible.

    Raises:
        UserError: tracker.mode=online without a key.
    """
    if options.mode == "auto" and os.environ.get("WANDB_MODE"):
        mode = os.environ["WANDB_MODE"]
        if mode not in MODES:
            raise UserError(f"WANDB_MODE={mode} should be one of {', '.join(MODES)}{nearest(mode, MODES)}, or unset")
        return mode
    if options.mode == "offline":
        return "offline"
    url = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai")
    host = url.hostname or ""
    has_key = _has_key(host)
    if options.mode == "online":
        if not has_key:
            raise UserError(
                "tracker.mode=online needs a key: run `wandb login`, export WANDB_API_KEY, or use tracker.mode=offline"
            )
        return "online"
    if not has_key:
        return "offline"
    proxy = urlsplit(os.environ.get("https_proxy") or os.environ.get("HTTPS_PROXY") or "")
    target = (proxy.hostname, proxy.port or 3128) if proxy.hostname else (host, url.port or 443)
    return "online" if _answers(target, options.probe_s) else "offline"


def _has_key(host: str) -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _answers(target: tuple[str, int], seconds: float) -> bool:
    """Say whether ``target`` accepts a connection. In a thread, because looking up a name has no time limit."""
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
