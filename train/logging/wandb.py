"""Starts the Weights & Biases (W&B) run of a training run. Only this file imports wandb."""

from __future__ import annotations

import netrc
import os
import socket
from typing import Any, Literal
from urllib.parse import urlsplit

from train.checkpoint.run_state import write_text
from train.config.schema import Config, to_dict


def start(config: Config) -> Any:
    """Start a W&B run, or continue the W&B run that an earlier process started for this run directory."""
    import wandb

    known = config.run_dir / "wandb_id"
    identity = known.read_text(encoding="utf-8").strip() if known.is_file() else None
    run = wandb.init(
        project=config.logger.wandb_project,
        name=config.name,
        id=identity,
        resume="allow" if identity else None,
        dir=str(config.run_dir),
        config=to_dict(config),
        mode=_mode(),
        settings=wandb.Settings(silent=True, console="off"),
    )
    run.define_metric("*", step_metric="step")
    write_text(known, run.id + "\n")
    return run


def place(run: Any, config: Config) -> str:
    """Return a log line that says where a W&B run is, or how to upload it if it was recorded offline."""
    if run.url:
        return f"W&B: {run.url}"
    return f"W&B run {run.id} is recorded offline; send it with: wandb sync {config.run_dir}/wandb/offline-run-*"


def _mode(seconds: float = 3.0) -> Literal["online", "offline"] | None:
    """Choose the W&B mode: online if an API key exists and the server answers within ``seconds``, otherwise offline.

    Returns None if the environment variable WANDB_MODE is set, which W&B itself reads.
    """
    import wandb

    if os.environ.get("WANDB_MODE"):
        return None
    settings = wandb.setup().settings
    url = urlsplit(settings.base_url)
    if not settings.api_key and not _netrc_has(url.hostname):
        return "offline"
    try:
        socket.create_connection(
            (url.hostname, url.port or (443 if url.scheme == "https" else 80)), timeout=seconds
        ).close()
    except OSError:
        return "offline"
    return "online"


def _netrc_has(host: str | None) -> bool:
    try:
        return host is not None and netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
