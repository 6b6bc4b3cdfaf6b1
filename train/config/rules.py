"""Rules across the fields of a configuration.

Everything here works without torch, except for what only a device or a checkpoint can tell.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import fields
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from model import ModelConfig, TextConfig
from model.config import drafter_problems
from train.config.dspark import DsparkConfig
from train.config.moved import renamed
from train.config.problems import problem, shown
from train.config.rl import RlConfig, training_efforts
from train.config.rollout import ServersConfig
from train.config.schema import Config, Merger, OptimConfig, ParallelConfig, TaskConfig
from train.lora.targets import LORA_TARGETS


def cross_problems(config: Config) -> Iterator[tuple[set[str], str]]:
    """Broken rules between keys: (keys involved, problem)."""
    yield from _model_rules(config)
    yield from _optim_rules(config.optim)
    yield from _lora_rules(config)
    data_problems = config.data.problems()
    for text in data_problems:
        text = text if text.startswith("data.") else f"data.{text}"
        yield {text.partition("=")[0]}, text
    sources = set() if data_problems else {part.source for part in config.data.parts().values()}
    if config.task.kind == "sft" and sources - {"chat"}:
        rule, remedy = "task=sft trains on conversations", "Use data=chat data.paths=[...]"
        yield {"data.source"}, problem("data.source", config.data.source, rule, remedy)
    if config.task.kind in ("sft", "rl", "distill", "dspark") and config.init_from is None:
        rule = f"task={config.task.kind} starts from a checkpoint"
        yield {"init_from"}, problem("init_from", None, rule, "Name its folder or a run directory: init_from=...")
    yield from _rl_rules(config)
    yield from _dspark_rules(config)
    yield from _parallel_rules(config.parallel, config.task)
    if config.logger.wandb and not _is_installed("wandb"):
        rule, remedy = "wandb is not installed", "Install it (pip install wandb), or use logger=local"
        yield {"logger.wandb"}, problem("logger.wandb", True, rule, remedy)


def _parallel_rules(parallel: ParallelConfig, task: TaskConfig) -> Iterator[tuple[set[str], str]]:
    if parallel.device == "cuda" and not _cuda_is_available():
        rule, remedy = "no CUDA device is present", "Use parallel.device=auto or cpu"
        yield {"parallel.device"}, problem("parallel.device", "cuda", rule, remedy)
    rows, ranks, writes = task.global_batch_rows, parallel.world_size, task.kind in ("rl", "distill")
    if (rows is None) != writes:
        rule = f"must be null with task={task.kind}" if writes else f"is what task={task.kind} needs"
        remedy = "A step has the rows that its responses fill" if writes else "Set the rows of a step"
        yield {"task.global_batch_rows", "task.kind"}, problem("task.global_batch_rows", rows, rule, remedy)
    elif rows is not None and rows % math.lcm(task.micro_batch, ranks):
        rule = f"must be a multiple of task.micro_batch = {task.micro_batch} and of parallel.world_size = {ranks}"
        keys = {"task.micro_batch", "task.global_batch_rows", "parallel.world_size"}
        remedy = f"The next is {-(-rows // math.lcm(task.micro_batch, ranks)) * math.lcm(task.micro_batch, ranks)}"
        yield keys, problem("task.global_batch_rows", rows, rule, remedy)
    for key in ("expert_parallel", "table_shards"):
        if ranks % getattr(parallel, key):
            rule = f"must divide parallel.world_size = {ranks}"
            value, remedy = getattr(parallel, key), "Choose a divisor"
            yield {f"parallel.{key}", "parallel.world_size"}, problem(f"parallel.{key}", value, rule, remedy)
    if parallel.shard_embeddings and parallel.table_shards == 1:
        rule, remedy = "has no effect with parallel.table_shards = 1", "Raise that, or leave it out"
        keys = {"parallel.shard_embeddings", "parallel.table_shards"}
        yield keys, problem("parallel.shard_embeddings", True, rule, remedy)


def _rl_rules(config: Config) -> Iterator[tuple[set[str], str]]:
    kind, parallel = config.task.kind, config.parallel
    writes = kind in ("rl", "distill")
    if (config.rl is None) == writes:
        rule = f"is what task={kind} needs" if writes else f"has no effect with task={kind}"
        yield {"rl", "task.kind"}, problem("rl", None if writes else "...", rule, "Use task=rl, or leave it out")
    if config.rl is None:
        return
    for text in _rl_section_problems(config.rl, kind, parallel.world_size, config.task.seq_len):
        yield {"rl", "parallel.world_size", "task.seq_len"}, f"rl.{text}"
    if config.task.sample_tokens:
        rule, remedy = "has no effect with task=rl and task=distill, which evaluate responses", "Leave it out"
        yield {"task.sample_tokens"}, problem("task.sample_tokens", config.task.sample_tokens, rule, remedy)
    if config.lora.dropout:
        rule = "the policy that writes responses would differ from the trained one"
        yield {"lora.dropout"}, problem("lora.dropout", config.lora.dropout, rule, "Use 0")
    for key in ("expert_parallel", "table_shards"):
        if getattr(parallel, key) > 1 and config.rl.rollout is None:
            rule = "a process that writes responses must hold the whole model"
            value, remedy = getattr(parallel, key), "Use 1, or servers (rollout=sglang); world_size may be more"
            yield {f"parallel.{key}"}, problem(f"parallel.{key}", value, rule, remedy)
    if config.rl.rollout is not None and config.lora.on:
        rule, remedy = "servers load whole weights, not an adapter", "Use rollout=local, or leave lora out"
        yield {"lora.targets", "rl"}, problem("lora.targets", config.lora.targets, rule, remedy)


def _dspark_rules(config: Config) -> Iterator[tuple[set[str], str]]:
    drafts = config.task.kind == "dspark"
    if (config.dspark is None) == drafts:
        rule = "is what task=dspark needs" if drafts else f"has no effect with task={config.task.kind}"
        yield (
            {"dspark", "task.kind"},
            problem("dspark", None if drafts else "...", rule, "Use task=dspark, or leave it out"),
        )
    if config.dspark is None:
        return
    drafter = _drafter_problems(config.dspark, config.model, config.parallel.expert_parallel)
    for text in drafter if config.init_from else ():
        yield {"dspark", "model", "parallel.expert_parallel"}, text
    if config.lora.on:
        rule = "the backbone of a drafter is not trained"
        yield {"lora.targets"}, problem("lora.targets", config.lora.targets, rule, "Leave lora out")
    if config.task.sample_tokens:
        rule = "has no effect with task=dspark, which trains no model that continues a text"
        yield {"task.sample_tokens"}, problem("task.sample_tokens", config.task.sample_tokens, rule, "Leave it out")


def _model_rules(config: Config) -> Iterator[tuple[set[str], str]]:
    known = [*ModelConfig().to_dict(), "quantization_config"]
    misplaced = {field.name for field in fields(TextConfig)}  # ModelConfig reports these; it keeps other keys
    # Other people's config.json has more keys, which are kept.
    foreign = set() if config.init_from else config.model.keys() - set(known) - misplaced
    for key in sorted(foreign):
        close = difflib.get_close_matches(key, known, n=1)
        remedy = f"Did you mean model.{close[0]}?" if close else f"Known in model: {', '.join(known)}"
        yield {"model"}, problem(f"model.{key}", config.model[key], "no such key", remedy)
    try:
        text = ModelConfig.from_dict(config.model).text
    except ValueError as error:
        for line in str(error).splitlines()[1:] or [str(error)]:
            yield {"model"}, f"model.{line.strip()}"
        return
    if text.n_routed_experts % config.parallel.expert_parallel:
        rule = f"must divide model.text_config.n_routed_experts = {text.n_routed_experts}"
        value, remedy = config.parallel.expert_parallel, "Choose a divisor"
        yield {"parallel.expert_parallel"}, problem("parallel.expert_parallel", value, rule, remedy)
    if config.task.seq_len > text.max_position_embeddings:
        rule = f"longer than model.text_config.max_position_embeddings = {text.max_position_embeddings}"
        remedy = "Shorten the rows or raise max_position_embeddings"
        yield {"task.seq_len"}, problem("task.seq_len", config.task.seq_len, rule, remedy)
    if config.data.tokenizer == "train" and config.data.vocab_size > text.vocab_size:
        rule = f"more entries than model.text_config.vocab_size = {text.vocab_size}"
        yield {"data.vocab_size"}, problem("data.vocab_size", config.data.vocab_size, rule, "Make them equal")


def _optim_rules(optim: OptimConfig) -> Iterator[tuple[set[str], str]]:
    """Options that only the report's rules read must not seem to change a run with AdamW's."""
    if optim.rules == "report":
        return
    for key, neutral in (("per_head", True), ("tables", "sinkhorn"), ("tables_lr_factor", 1.0)):
        if getattr(optim, key) != neutral:
            rule = f"has no effect with optim.rules = {shown(optim.rules)}"
            remedy = "Leave it out, or use optim=report"
            yield {"optim.rules", f"optim.{key}"}, problem(f"optim.{key}", getattr(optim, key), rule, remedy)


def _lora_rules(config: Config) -> Iterator[tuple[set[str], str]]:
    lora = config.lora
    for target in lora.targets:
        if target not in LORA_TARGETS:
            close = difflib.get_close_matches(target, LORA_TARGETS, n=1)
            remedy = f"Did you mean {close[0]}?" if close else f"Known: {', '.join(LORA_TARGETS)}"
            yield {"lora.targets"}, problem("lora.targets", target, "no such target", remedy)
    if len(set(lora.targets)) < len(lora.targets):
        yield {"lora.targets"}, problem("lora.targets", lora.targets, "names one twice", "Name each once")
    if not lora.on:
        return
    if config.task.kind == "plan":
        yield {"lora.targets"}, problem("lora.targets", lora.targets, "task=plan knows no LoRA", "Leave lora out")
    if config.init_from is None and config.task.kind != "plan":
        rule, remedy = "an adapter needs trained weights, and there are none", "Name a checkpoint: init_from=..."
        yield {"lora.targets", "init_from"}, problem("lora.targets", lora.targets, rule, remedy)
    if config.optim.rules != "adamw":
        rule = "has no effect: an adapter is trained by AdamW"
        yield {"optim.rules"}, problem("optim.rules", config.optim.rules, rule, "Use optim=adamw")
    if "indexer" in lora.targets and not config.runtime.train_indexer:
        rule, remedy = "with runtime.train_indexer = false it is not trained", "Leave one of them out"
        yield {"lora.targets", "runtime.train_indexer"}, problem("lora.targets", "indexer", rule, remedy)


def _rl_section_problems(rl: RlConfig, kind: str, ranks: int, seq_len: int) -> Iterator[str]:
    """What is wrong inside the section, as 'key = value: rule. remedy'."""
    for key in ("length", "loss"):
        if (getattr(rl, key) is None) != (kind == "distill"):
            rule = "is what task=rl needs" if kind == "rl" else "has no effect with task=distill"
            yield f"{key}: {rule}. {'Give it' if kind == 'rl' else 'Set it to null'}"
    for number, task in enumerate(rl.tasks):
        for key in ("prompts", "reward", "held_out"):
            value = getattr(task, key)
            if value is not None and (new := renamed(value)):
                yield f"tasks[{number}].{key} = {value}: this function has moved. It is {new} now"
        if (task.teacher is None) != (kind == "rl"):
            rule = "has no effect with task=rl" if kind == "rl" else "is what task=distill needs"
            yield f"tasks[{number}].teacher: {rule}. {'Leave it out' if kind == 'rl' else 'Name a checkpoint'}"
        elif task.teacher is not None:
            if reason := _not_a_checkpoint(task.teacher):
                yield f"tasks[{number}].teacher = {task.teacher}: {reason}. Correct the path"
    for key in ("efforts", "eval_efforts"):
        try:
            training_efforts(getattr(rl, key))
        except ValueError as error:
            yield f"{key}: {error}"
    if len(rl.samples) != len(rl.efforts):
        rule = f"must have one number for each of the {len(rl.efforts)} efforts"
        yield f"samples = {rl.samples}: {rule}. Give as many"
    if kind == "rl" and min(rl.samples) < 2:
        yield f"samples = {rl.samples}: a single response has no other to be compared with. Give 2 or more"
    if rl.prompts % ranks:
        yield f"prompts = {rl.prompts}: must be a multiple of parallel.world_size = {ranks}. Choose one"
    if rl.in_flight < max(rl.samples):
        rule = f"a group of {max(rl.samples)} responses must fit"
        yield f"in_flight = {rl.in_flight}: {rule}. Raise it"
    if rl.max_tokens >= seq_len:
        rule = f"with its prompt, a response must fit a row of task.seq_len = {seq_len}"
        yield f"max_tokens = {rl.max_tokens}: {rule}. Raise task.seq_len"
    if rl.rollout is not None:
        yield from (f"rollout.{text}" for text in _server_problems(rl.rollout))


def _server_problems(servers: ServersConfig) -> Iterator[str]:
    """What is wrong with the addresses of servers and with how they are told about weights."""
    for url in servers.urls:
        rule = _address_problem(url)
        if rule:
            yield f"urls: {rule}"
    if len(set(servers.urls)) < len(servers.urls):
        yield f"urls = {servers.urls}: lists a server twice. List each once"
    if not any("{folder}" in json.dumps(call.body) for call in servers.update):
        yield "update: no body holds {folder}, so no server learns where the weights are. Put it in one"
    if servers.key_variable is not None and not os.environ.get(servers.key_variable):
        name = json.dumps(servers.key_variable)
        yield f"key_variable = {name}: this environment variable is empty or not set. Set it, or use null"


def _address_problem(url: str) -> str | None:
    """What is wrong with the address of a server."""
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1) > 0
    except ValueError:
        return f"{json.dumps(url)}: is no address. Give http://host:port"
    if parts.username or parts.password:
        return "one holds a password. Put it into an environment variable and name that in key_variable"
    if not whole or parts.path.strip("/") or parts.query or parts.fragment:
        return f"{json.dumps(url)}: must be a server's address without a path. Give http://host:port"
    return None


def _drafter_problems(dspark: DsparkConfig, model: Mapping[str, Any], expert_parallel: int) -> Iterator[str]:
    """What is wrong with a drafter and its loss for a model."""
    try:
        text = ModelConfig.from_dict(dict(model)).text
    except ValueError:  # reported elsewhere
        return
    for line in drafter_problems(text):
        yield f"model.text_config.{line}. Describe a drafter: dspark.drafter={{num_nextn_predict_layers: 3, ...}}"
    if text.dspark_n_routed_experts % expert_parallel:
        rule = f"must divide dspark_n_routed_experts = {text.dspark_n_routed_experts}"
        yield f"parallel.expert_parallel = {expert_parallel}: {rule}. Choose a divisor"
    if not (dspark.ce or dspark.l1):
        yield "dspark.ce = 0.0: nothing teaches the drafts if dspark.l1 is 0 too. Raise one of them"


def merge_problems(merger: Merger) -> Iterator[str]:
    """What is wrong with the weights of ``task=merge``."""
    remedy = "Correct them, or leave them out for equal shares"
    if len(merger.shares) != len(merger.checkpoints):
        rule = f"{len(merger.checkpoints)} checkpoints need as many weights"
        yield problem("weights", merger.weights, rule, remedy)
    elif abs(math.fsum(merger.shares) - 1) > 1e-9:
        rule = f"their sum is {math.fsum(merger.shares):.12g}, must be 1"
        yield problem("weights", merger.weights, rule, remedy)


def _is_installed(library: str) -> bool:
    found = find_spec(library)
    return found is not None and found.origin is not None  # a folder of that name is no library


def _cuda_is_available() -> bool:
    import torch  # the rules over the configuration alone do not need it

    return torch.cuda.is_available()


def _not_a_checkpoint(name: str) -> str | None:
    """Why ``name`` is no checkpoint to begin with."""
    from train.checkpoint.init_from import find_pretrained

    try:
        find_pretrained(name)
    except ValueError as error:
        return str(error)
    return None
