"""Rules that involve several keys of the configuration.

This module imports torch only for rules that depend on a device or a checkpoint.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from model import ModelConfig, TextConfig
from model.config import drafter_problems
from train.config.dspark import DsparkConfig
from train.config.evaluation import EvalTask
from train.config.moved import renamed
from train.config.problems import problem, shown
from train.config.rl import RlConfig, training_efforts
from train.config.rollout import ServersConfig
from train.config.schema import Config, Conversion, Evaluation, Merger, OptimConfig, ParallelConfig, TaskConfig
from train.config.step_rows import divides_rows, length_rules
from train.lora.targets import LORA_TARGETS

# the tasks whose rows may be split over processes
CONTEXT_PARALLEL_TASKS = ("pretrain", "sft", "dpo", "rl", "distill", "dspark", "plan")


def cross_problems(config: Config) -> Iterator[tuple[set[str], str]]:
    """Yield (set of keys, description of the problem) for every broken rule that involves several keys."""
    yield from _model_rules(config)
    yield from _optim_rules(config.optim)
    yield from _lora_rules(config)
    yield from _table_rules(config)
    yield from _weight_rounding_rules(config)
    data_problems = config.data.problems()
    for text in data_problems:
        text = text if text.startswith("data.") else f"data.{text}"
        yield {text.partition("=")[0]}, text
    sources = set() if data_problems else {part.source for part in config.data.parts().values()}
    yield from _source_rules(config, sources)
    if config.task.kind in ("sft", "rl", "distill", "dspark", "dpo") and config.init_from is None:
        rule = f"task={config.task.kind} starts from a checkpoint"
        remedy = "Give a checkpoint folder or a run directory: init_from=..."
        yield {"init_from"}, problem("init_from", None, rule, remedy)
    if config.data.answers == "own" and config.task.kind != "dspark":
        rule, remedy = "is for the training of drafters, task=dspark", "Leave it out"
        yield {"data.answers", "task.kind"}, problem("data.answers", "own", rule, remedy)
    yield from _rl_rules(config)
    yield from _dspark_rules(config)
    yield from _plan_rules(config)
    yield from _dpo_rules(config)
    yield from _distill_data_rules(config)
    yield from _parallel_rules(config.parallel, config.task)
    yield from length_rules(config, may_read_windows=not data_problems)
    yield from (({"task.eval_tasks"}, text) for text in eval_problems("task.eval_tasks", config.task.eval_tasks))
    if config.task.eval_tasks and config.task.kind == "dspark":
        rule = "has no effect with task=dspark, which does not change the language model"
        yield {"task.eval_tasks"}, problem("task.eval_tasks", "[...]", rule, "Use task=eval")
    for name in ("wandb", "tensorboard"):
        if getattr(config.logger, name) and not _is_installed(name):
            rule, remedy = f"{name} is not installed", f"Install it (pip install {name}), or use logger=local"
            yield {f"logger.{name}"}, problem(f"logger.{name}", True, rule, remedy)
    if config.logger.profiled and config.logger.profiled[0] > config.logger.profiled[1]:
        rule, remedy = "the first step is behind the last", "Write FIRST:LAST, for example 10:12"
        yield {"logger.profile"}, problem("logger.profile", config.logger.profile, rule, remedy)


def _parallel_rules(parallel: ParallelConfig, task: TaskConfig) -> Iterator[tuple[set[str], str]]:
    rows, writes = task.global_batch_rows, task.kind in ("rl", "distill")
    if (rows is None) != writes:
        rule = f"must be null with task={task.kind}" if writes else f"task={task.kind} needs a number of rows"
        remedy = "The responses of a step determine its rows" if writes else "Set the number of rows in a step"
        yield {"task.global_batch_rows", "task.kind"}, problem("task.global_batch_rows", rows, rule, remedy)
    else:
        yield from divides_rows(parallel, task)
    yield from _layout_rules(parallel)
    if parallel.hang_timeout >= parallel.collective_timeout:
        rule = f"a collective call fails after parallel.collective_timeout={parallel.collective_timeout:g} seconds"
        keys = {"parallel.hang_timeout", "parallel.collective_timeout"}
        yield keys, problem("parallel.hang_timeout", parallel.hang_timeout, rule, "Lower it")
    if parallel.context_parallel > 1:
        yield from _context_rules(parallel.context_parallel, task)


def _layout_rules(parallel: ParallelConfig) -> Iterator[tuple[set[str], str]]:
    """Check rules that hold for every task: the device exists, and numbers of shards divide the number of processes."""
    if parallel.device == "cuda" and not _cuda_is_available():
        rule, remedy = "no CUDA device is present", "Use parallel.device=auto or cpu"
        yield {"parallel.device"}, problem("parallel.device", "cuda", rule, remedy)
    ranks = parallel.world_size
    for key in ("expert_parallel", "table_shards", "dense_shards", "context_parallel"):
        if ranks % getattr(parallel, key):
            rule = f"must divide parallel.world_size = {ranks}"
            value, remedy = getattr(parallel, key), f"Choose a divisor of {ranks}"
            yield {f"parallel.{key}", "parallel.world_size"}, problem(f"parallel.{key}", value, rule, remedy)
    if parallel.shard_embeddings and parallel.table_shards == 1:
        rule = "has no effect with parallel.table_shards = 1"
        remedy = "Raise parallel.table_shards, or leave parallel.shard_embeddings out"
        keys = {"parallel.shard_embeddings", "parallel.table_shards"}
        yield keys, problem("parallel.shard_embeddings", True, rule, remedy)


def _context_rules(count: int, task: TaskConfig) -> Iterator[tuple[set[str], str]]:
    """Check that task and row length allow context parallelism over ``count`` processes; `_model_rules` compares the
    length of a chunk with the sliding window.
    """
    if task.kind not in CONTEXT_PARALLEL_TASKS:
        rule = f"task={task.kind} does not split rows over processes"
        remedy = f"Use parallel.context_parallel=1, or one of the tasks {', '.join(CONTEXT_PARALLEL_TASKS)}"
        yield {"parallel.context_parallel", "task.kind"}, problem("parallel.context_parallel", count, rule, remedy)
    if task.seq_len % count:
        rule, remedy = f"must divide task.seq_len = {task.seq_len}", f"Choose a divisor of {task.seq_len}"
        yield {"parallel.context_parallel", "task.seq_len"}, problem("parallel.context_parallel", count, rule, remedy)


def _section_rule(config: Config, section: str, needed: bool) -> Iterator[tuple[set[str], str]]:
    """Check that the section of a task is present if ``needed`` is true, and absent otherwise. The section has the name
    of the task; the section ``rl`` also serves task=distill.
    """
    if (getattr(config, section) is None) == needed:
        kind = config.task.kind
        rule = f"task={kind} needs this section" if needed else f"has no effect with task={kind}"
        remedy = f"Use task={section}, or leave the section {section} out"
        yield {section, "task.kind"}, problem(section, None if needed else "...", rule, remedy)


def _rl_rules(config: Config) -> Iterator[tuple[set[str], str]]:
    kind, parallel = config.task.kind, config.parallel
    writes = kind in ("rl", "distill")
    yield from _section_rule(config, "rl", writes)
    if config.rl is None:
        return
    for text in _rl_section_problems(config.rl, kind, parallel.world_size, config.task.seq_len):
        yield {"rl", "parallel.world_size", "task.seq_len"}, f"rl.{text}"
    if config.task.sample_tokens:
        rule = "has no effect with task=rl and task=distill, which evaluate responses to held-out prompts"
        remedy = "Leave task.sample_tokens out"
        yield {"task.sample_tokens"}, problem("task.sample_tokens", config.task.sample_tokens, rule, remedy)
    if config.lora.dropout:
        rule = "with dropout the policy that is trained would differ from the policy that writes responses"
        yield {"lora.dropout"}, problem("lora.dropout", config.lora.dropout, rule, "Use lora.dropout=0")
    for key in ("expert_parallel", "table_shards", "dense_shards"):
        if getattr(parallel, key) > 1 and config.rl.rollout is None:
            rule = "a process that writes responses must hold the whole model"
            value = getattr(parallel, key)
            remedy = "Use 1, or let servers write them (rollout=sglang); parallel.world_size may stay above 1"
            yield {f"parallel.{key}"}, problem(f"parallel.{key}", value, rule, remedy)
    if parallel.dense_shards > 1 and config.rl.loss is not None and config.rl.loss.kl:
        rule, keys = "rl.loss.kl needs a whole copy of the initial policy", {"parallel.dense_shards", "rl.loss.kl"}
        yield keys, problem("parallel.dense_shards", parallel.dense_shards, rule, "Use 1, or rl.loss.kl=0")
    if config.rl.rollout is not None and config.lora.on:
        rule = "inference servers load whole weights and cannot load an adapter"
        remedy = "Use rollout=local, or leave lora out"
        yield {"lora.targets", "rl"}, problem("lora.targets", config.lora.targets, rule, remedy)
    if config.rl.drafter:
        yield from _policy_drafter_rules(config)


def _policy_drafter_rules(config: Config) -> Iterator[tuple[set[str], str]]:
    """Rules for a drafter that is trained along with the policy (``rl.drafter``)."""
    assert config.rl is not None
    if config.rl.rollout is not None:
        rule, remedy = "inference servers write the responses, without this drafter", "Use rollout=local, or false"
        yield {"rl"}, problem("rl.drafter", True, rule, remedy)
    if config.parallel.context_parallel > 1:
        rule, remedy = "is not trained along on rows that are split over processes", "Use context_parallel=1, or false"
        yield {"rl", "parallel.context_parallel"}, problem("rl.drafter", True, rule, remedy)
    if config.lora.on:
        rule, remedy = "is trained along with whole weights only, not with an adapter", "Leave lora out, or use false"
        yield {"rl", "lora.targets"}, problem("rl.drafter", True, rule, remedy)
    for line in _shape_problems(config.model) if config.init_from else ():
        remedy = "Train a drafter first: python -m train task=dspark"
        yield {"rl", "model"}, f"rl.drafter: init_from describes no drafter: {line}. {remedy}"


def _dspark_rules(config: Config) -> Iterator[tuple[set[str], str]]:
    yield from _section_rule(config, "dspark", config.task.kind == "dspark")
    if config.dspark is None:
        return
    if config.parallel.dense_shards > 1:
        rule = "task=dspark keeps the drafter and its frozen backbone whole on every process"
        yield {"parallel.dense_shards"}, problem("parallel.dense_shards", config.parallel.dense_shards, rule, "Use 1")
    drafter = _drafter_problems(config.dspark, config.model, config.parallel.expert_parallel)
    for text in drafter if config.init_from else ():
        yield {"dspark", "model", "parallel.expert_parallel"}, text
    if config.lora.on:
        rule = "task=dspark trains a drafter and keeps the backbone frozen, so it cannot train LoRA"
        yield {"lora.targets"}, problem("lora.targets", config.lora.targets, rule, "Leave lora out")
    for key in ("expert_parallel", "table_shards", "context_parallel"):
        if getattr(config.parallel, key) > 1 and config.data.answers == "own":
            rule = "a process that generates answers (data.answers = own) works alone, with the whole model"
            remedy = "Use 1, or let task=generate or servers write the answers, and train on these conversations"
            value = getattr(config.parallel, key)
            yield {f"parallel.{key}", "data.answers"}, problem(f"parallel.{key}", value, rule, remedy)
    if config.task.sample_tokens:
        rule, remedy = "has no effect with task=dspark, which writes no sample text", "Leave task.sample_tokens out"
        yield {"task.sample_tokens"}, problem("task.sample_tokens", config.task.sample_tokens, rule, remedy)


def _plan_rules(config: Config) -> Iterator[tuple[set[str], str]]:
    yield from _section_rule(config, "plan", config.task.kind == "plan")
    if config.plan is not None and config.plan.job == "dspark" and config.lora.on:
        rule = "training a drafter keeps the backbone frozen, so it cannot train LoRA"
        yield {"plan.job", "lora.targets"}, problem("plan.job", "dspark", rule, "Leave lora out")
    if config.plan is not None and config.plan.job == "dspark" and config.parallel.dense_shards > 1:
        rule = "task=dspark, which is planned (plan.job), does not divide dense matrices"
        keys = {"parallel.dense_shards", "plan.job"}
        yield keys, problem("parallel.dense_shards", config.parallel.dense_shards, rule, "Use 1")


def _source_rules(config: Config, sources: set[str]) -> Iterator[tuple[set[str], str]]:
    """Check that the data source fits the task.

    sources: the data sources in the configuration; empty if the data section has problems of its own.
    """
    wanted = {"sft": ("chat", "trains on conversations"), "dpo": ("preference", "trains on pairs of answers")}
    source, what = wanted.get(config.task.kind, ("", ""))
    if source and sources - {source}:
        remedy = f"Use data={source} data.paths=[...]"
        yield {"data.source"}, problem("data.source", config.data.source, f"task={config.task.kind} {what}", remedy)
    elif config.task.kind not in ("dpo", "check") and "preference" in sources:
        rule = "contains pairs of answers, on which only task=dpo trains"
        remedy = "Use data=chat with conversations that have one answer"
        yield {"data.source"}, problem("data.source", config.data.source, rule, remedy)


def _dpo_rules(config: Config) -> Iterator[tuple[set[str], str]]:
    yield from _section_rule(config, "dpo", config.task.kind == "dpo")
    if config.dpo is None:
        return
    if config.lora.dropout:
        rule = "dropout would change the policy's log-probabilities at random, which DPO compares with the reference"
        yield {"lora.dropout"}, problem("lora.dropout", config.lora.dropout, rule, "Use lora.dropout=0")


def _distill_data_rules(config: Config) -> Iterator[tuple[set[str], str]]:
    yield from _section_rule(config, "distill_data", config.task.kind == "distill_data")
    if config.distill_data is None:
        return
    key, name = "distill_data.teacher", config.distill_data.teacher
    if reason := _not_a_checkpoint(name):
        yield {key, "distill_data"}, problem(key, name, reason, "Correct the path")
    if config.task.sample_tokens:
        rule, remedy = "has no effect with task=distill_data, which writes no sample text", "Leave it out"
        yield {"task.sample_tokens"}, problem("task.sample_tokens", config.task.sample_tokens, rule, remedy)


def _model_rules(config: Config) -> Iterator[tuple[set[str], str]]:
    known = [*ModelConfig().to_dict(), "quantization_config"]
    misplaced = {field.name for field in fields(TextConfig)}  # ModelConfig refuses these itself and keeps unknown keys
    # The config.json of a checkpoint may have keys that this project does not use; they are kept.
    foreign = set() if config.init_from else config.model.keys() - set(known) - misplaced
    for key in sorted(foreign):
        close = difflib.get_close_matches(key, known, n=1)
        remedy = f"Did you mean model.{close[0]}?" if close else f"The keys in model are: {', '.join(known)}"
        yield {"model"}, problem(f"model.{key}", config.model[key], "no such key", remedy)
    try:
        text = ModelConfig.from_dict(config.model).text
    except ValueError as error:
        for line in str(error).splitlines()[1:] or [str(error)]:
            yield {"model"}, f"model.{line.strip()}"
        return
    if text.n_routed_experts % config.parallel.expert_parallel:
        rule = f"must divide model.text_config.n_routed_experts = {text.n_routed_experts}"
        value, remedy = config.parallel.expert_parallel, f"Choose a divisor of {text.n_routed_experts}"
        yield {"parallel.expert_parallel"}, problem("parallel.expert_parallel", value, rule, remedy)
    chunk, parts = config.task.seq_len // config.parallel.context_parallel, config.parallel.context_parallel
    if parts > 1 and chunk < text.sliding_window:
        rule = (
            f"each process would get {chunk} of the {config.task.seq_len} tokens of a row, fewer than the "
            f"{text.sliding_window} of model.text_config.sliding_window"
        )
        keys = {"parallel.context_parallel", "task.seq_len"}
        yield keys, problem("parallel.context_parallel", parts, rule, "Use a smaller number, or longer rows")
    if config.task.seq_len > text.max_position_embeddings:
        rule = f"is greater than model.text_config.max_position_embeddings = {text.max_position_embeddings}"
        remedy = "Lower task.seq_len or raise max_position_embeddings"
        yield {"task.seq_len"}, problem("task.seq_len", config.task.seq_len, rule, remedy)
    if config.data.tokenizer == "train" and config.data.vocab_size > text.vocab_size:
        rule = f"is greater than model.text_config.vocab_size = {text.vocab_size}"
        remedy = "Set both to the same number"
        yield {"data.vocab_size"}, problem("data.vocab_size", config.data.vocab_size, rule, remedy)


def _optim_rules(optim: OptimConfig) -> Iterator[tuple[set[str], str]]:
    """Refuse options that only ``optim.rules=report`` uses if another value of ``optim.rules`` is chosen."""
    if optim.rules == "report":
        return
    for key, neutral in (("per_head", True), ("tables", "sinkhorn"), ("tables_lr_factor", 1.0)):
        if getattr(optim, key) != neutral:
            rule = f"has no effect with optim.rules = {shown(optim.rules)}"
            remedy = f"Leave optim.{key} out, or use optim=report"
            yield {"optim.rules", f"optim.{key}"}, problem(f"optim.{key}", getattr(optim, key), rule, remedy)


def _lora_rules(config: Config) -> Iterator[tuple[set[str], str]]:
    lora = config.lora
    for target in lora.targets:
        if target not in LORA_TARGETS:
            close = difflib.get_close_matches(target, LORA_TARGETS, n=1)
            remedy = f"Did you mean {close[0]}?" if close else f"The targets are: {', '.join(LORA_TARGETS)}"
            yield {"lora.targets"}, problem("lora.targets", target, "no such target", remedy)
    if len(set(lora.targets)) < len(lora.targets):
        rule, remedy = "contains the same target twice", "Name each target once"
        yield {"lora.targets"}, problem("lora.targets", lora.targets, rule, remedy)
    if not lora.on:
        return
    if config.init_from is None and config.task.kind != "plan":
        rule, remedy = "LoRA needs the trained weights of a checkpoint", "Name the checkpoint: init_from=..."
        yield {"lora.targets", "init_from"}, problem("lora.targets", lora.targets, rule, remedy)
    if config.optim.rules != "adamw" and config.task.kind != "plan":
        rule = "has no effect with LoRA, whose adapters are always trained by AdamW"
        yield {"optim.rules"}, problem("optim.rules", config.optim.rules, rule, "Use optim=adamw")
    if config.parallel.dense_shards > 1:
        rule = "with LoRA the dense matrices are frozen and stay whole on every process"
        keys, remedy = {"parallel.dense_shards", "lora.targets"}, "Use 1; runtime.frozen=packed makes them small"
        yield keys, problem("parallel.dense_shards", config.parallel.dense_shards, rule, remedy)
    if "indexer" in lora.targets and not config.runtime.train_indexer:
        rule = "is not trained with runtime.train_indexer = false"
        remedy = 'Leave "indexer" or runtime.train_indexer=false out'
        yield {"lora.targets", "runtime.train_indexer"}, problem("lora.targets", "indexer", rule, remedy)


def _weight_rounding_rules(config: Config) -> Iterator[tuple[set[str], str]]:
    """Refuse quantisation-aware training in a run that keeps the model's weights frozen, because frozen weights cannot
    adapt to the rounding.
    """
    if not config.frozen_base:
        return
    for key in ("expert_quant", "dense_quant", "engram_quant"):
        if getattr(config.runtime, key):
            rule = "rounds weights that are trained, but this run keeps the weights of the model frozen"
            remedy = "Leave it out, or train all weights (lora=off, and not task=dspark)"
            yield {f"runtime.{key}", "lora.targets", "task.kind"}, problem(f"runtime.{key}", True, rule, remedy)


def _table_rules(config: Config) -> Iterator[tuple[set[str], str]]:
    if config.runtime.tables == "host" and not config.frozen_base and config.task.kind != "plan":
        rule = "maps tables that are not trained, and this run trains them"
        remedy = "Use device, or train an adapter: lora=all"
        yield {"runtime.tables", "lora.targets"}, problem("runtime.tables", "host", rule, remedy)


def _rl_section_problems(rl: RlConfig, kind: str, ranks: int, seq_len: int) -> Iterator[str]:
    """Yield every problem inside the section ``rl``, as 'key = value: rule. remedy'."""
    for key in ("length", "loss"):
        if (getattr(rl, key) is None) != (kind == "distill"):
            rule = "task=rl needs this section" if kind == "rl" else "has no effect with task=distill"
            yield f"{key}: {rule}. {'Add the section' if kind == 'rl' else 'Set it to null'}"
    for number, task in enumerate(rl.tasks):
        for key in ("prompts", "reward", "held_out"):
            value = getattr(task, key)
            if value is not None and (new := renamed(value)):
                yield f"tasks[{number}].{key} = {value}: this function was renamed. Its new name is {new}"
        if (task.teacher is None) != (kind == "rl"):
            rule = "has no effect with task=rl" if kind == "rl" else "task=distill needs a teacher for every task"
            yield f"tasks[{number}].teacher: {rule}. {'Leave teacher out' if kind == 'rl' else 'Name a checkpoint'}"
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
        yield f"samples = {rl.samples}: {rule}. Give {len(rl.efforts)} numbers"
    if kind == "rl" and min(rl.samples) < 2:
        rule = "rewards are compared between the responses to one prompt, so one response is not enough"
        yield f"samples = {rl.samples}: {rule}. Give 2 or more"
    if rl.prompts % ranks:
        rule = f"must be a multiple of parallel.world_size = {ranks}"
        yield f"prompts = {rl.prompts}: {rule}. Choose a multiple of {ranks}"
    if rl.in_flight < max(rl.samples):
        rule = f"must be at least {max(rl.samples)}, the most responses to one prompt (rl.samples)"
        yield f"in_flight = {rl.in_flight}: {rule}. Raise rl.in_flight"
    if rl.max_tokens >= seq_len:
        rule = f"a prompt and its response must fit into one row of task.seq_len = {seq_len} tokens"
        yield f"max_tokens = {rl.max_tokens}: {rule}. Raise task.seq_len"
    if rl.rollout is not None:
        yield from (f"rollout.{text}" for text in _server_problems(rl.rollout))


def _server_problems(servers: ServersConfig) -> Iterator[str]:
    """Yield every problem with the addresses of inference servers and with the requests that update their weights."""
    for url in servers.urls:
        rule = _address_problem(url)
        if rule:
            yield f"urls: {rule}"
    if len(set(servers.urls)) < len(servers.urls):
        yield f"urls = {servers.urls}: lists a server twice. List each server once"
    if not any("{folder}" in json.dumps(call.body) for call in servers.update):
        yield "update: no request body contains {folder}, so servers cannot find the weights. Put {folder} into one"
    if servers.key_variable is not None and not os.environ.get(servers.key_variable):
        name = json.dumps(servers.key_variable)
        yield f"key_variable = {name}: this environment variable is empty or not set. Set it, or use key_variable=null"


def _address_problem(url: str) -> str | None:
    """Describe the problem with the address of an inference server, or return None if there is none."""
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1) > 0
    except ValueError:
        return f"{json.dumps(url)}: is not a server address. Give http://host:port"
    if parts.username or parts.password:
        return "an address contains a password. Put it into an environment variable and name that in key_variable"
    if not whole or parts.path.strip("/") or parts.query or parts.fragment:
        return f"{json.dumps(url)}: must be a server's address without a path. Give http://host:port"
    return None


def _shape_problems(model: Mapping[str, Any]) -> list[str]:
    """List every problem with the drafter that a model configuration describes. The list is empty if the model
    configuration is not valid.
    """
    try:
        return drafter_problems(ModelConfig.from_dict(dict(model)).text)
    except ValueError:  # `_model_rules` reports this
        return []


def _drafter_problems(dspark: DsparkConfig, model: Mapping[str, Any], expert_parallel: int) -> Iterator[str]:
    """Yield every problem with the shape and the loss of a drafter for the model ``model``."""
    try:
        text = ModelConfig.from_dict(dict(model)).text
    except ValueError:  # `_model_rules` reports this
        return
    for line in _shape_problems(model):
        yield f"model.text_config.{line}. Describe a drafter: dspark.drafter={{num_nextn_predict_layers: 3, ...}}"
    if text.dspark_n_routed_experts % expert_parallel:
        rule = f"must divide dspark_n_routed_experts = {text.dspark_n_routed_experts}"
        yield f"parallel.expert_parallel = {expert_parallel}: {rule}. Choose a divisor of that"
    if not (dspark.ce or dspark.l1):
        yield "dspark.ce = 0.0: with dspark.l1 = 0 too, no loss trains the draft tokens. Raise one of the two"


def convert_problems(conversion: Conversion) -> Iterator[str]:
    """Yield the problem with the combination of keys of ``task=convert``, if there is one."""
    if conversion.keep and conversion.adapter is None:
        rule, remedy = "writes an adapter beside the weights, and none is given", "Name its folder: adapter=FOLDER"
        yield problem("keep", True, rule, remedy)


def merge_problems(merger: Merger) -> Iterator[str]:
    """Yield the problem with the weights of ``task=merge``, if there is one."""
    remedy = "Correct the weights, or leave them out for equal shares"
    if len(merger.shares) != len(merger.checkpoints):
        rule = f"must be {len(merger.checkpoints)} numbers, one for each checkpoint"
        yield problem("weights", merger.weights, rule, remedy)
    elif abs(math.fsum(merger.shares) - 1) > 1e-9:
        rule = f"the sum of the weights must be 1, but is {math.fsum(merger.shares):.12g}"
        yield problem("weights", merger.weights, rule, remedy)


def evaluation_problems(config: Evaluation) -> Iterator[str]:
    """Yield every problem with the settings of ``task=eval``."""
    yield from eval_problems("tasks", config.tasks)
    yield from (text for _, text in _layout_rules(config.parallel))
    for key in ("dense_shards", "context_parallel"):
        if (value := getattr(config.parallel, key)) > 1:
            rule = "task=eval divides questions over processes, not rows or dense matrices"
            remedy = "Use 1; parallel.expert_parallel and parallel.table_shards split a model that is too large"
            yield problem(f"parallel.{key}", value, rule, remedy)


def eval_problems(key: str, tasks: Sequence[EvalTask]) -> Iterator[str]:
    """Yield every problem with the tasks of an evaluation that can be found without reading their data."""
    names = [task.task for task in tasks]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        rule, remedy = "lists a task twice", "List the task once; it may have several lengths and depths"
        yield problem(key, doubled, rule, remedy)
    for task in tasks:
        if task.kind == "harness" and not _is_installed("lm_eval"):
            rule = "is a task of lm-evaluation-harness, which is not installed"
            remedy = (
                "Install it (pip install 'narrows[eval]'), or use needle, multikey or a JSONL file of conversations"
            )
            yield problem(key, task.task, rule, remedy)
        if len(set(task.lengths)) < len(task.lengths) or len(set(task.depths)) < len(task.depths):
            yield problem(key, task.task, "lists a length or a depth twice", "List each value once")


def _is_installed(library: str) -> bool:
    found = find_spec(library)
    return found is not None and found.origin is not None  # find_spec also finds a folder of that name without code


def _cuda_is_available() -> bool:
    import torch  # imported here, since the other rules do not need it

    return torch.cuda.is_available()


def _not_a_checkpoint(name: str) -> str | None:
    """Say why ``name`` is not a checkpoint that a run can start from, or return None if it is one."""
    from train.checkpoint.init_from import find_pretrained

    try:
        find_pretrained(name)
    except ValueError as error:
        return str(error)
    return None
