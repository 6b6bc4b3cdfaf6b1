"""Computes log-likelihoods of texts and greedy answers with a language model, divided over the processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from data.progress import progress
from data.tokenizer import special_ids
from model import DeepseekV41, token_log_probs
from model.generation import Generator, Request
from model.loss import is_likeliest
from train.distributed.world import World

Pair = tuple[Sequence[int], Sequence[int]]  # token ids of a context and of its continuation


class Stopped(Exception):
    """The evaluation was asked to stop. All ranks raise this exception together."""


@dataclass(frozen=True)
class Question:
    """A prompt to continue by greedy decoding, until `done(text so far)` is true, the end-of-sequence token is chosen,
    or `max_tokens` tokens have been generated.
    """

    prompt: Sequence[int]
    max_tokens: int
    done: Callable[[str], bool] = lambda text: False


@dataclass
class Scorer:
    """Computes log-likelihoods and greedy answers with a language model. All ranks make the same calls, and each rank
    gets all results.

    - batch: number of sequences in one forward pass of a process;
    - autocast: context for the forward passes of log-likelihoods; answers are generated without it, as in RL rollouts;
    - stop: function that says whether this rank was asked to stop;
    - say: function that receives lines about the progress; None lets rank 0 print them on standard error.
    """

    model: DeepseekV41
    tokenizer: Tokenizer
    world: World
    batch: int
    autocast: Callable[[], AbstractContextManager] = nullcontext
    stop: Callable[[], bool] = lambda: False
    say: Callable[[str], None] | None = None

    @property
    def positions(self) -> int:
        """The context length of the model: the largest number of tokens in a sequence."""
        return self.model.config.text.max_position_embeddings

    @torch.no_grad()
    def likelihoods(self, pairs: Sequence[Pair], what: str) -> list[tuple[float, bool]]:
        """Compute, for each pair (context, continuation), the log-probability (nats) of the continuation, and whether
        greedy decoding would write the continuation.

        Tokens are removed from the beginning of sequences that are longer than the context length of the model.

        Raises:
            Stopped: a rank was asked to stop.
        """
        order = sorted(range(len(pairs)), key=lambda n: -len(pairs[n][0]) - len(pairs[n][1]))
        mine = order[self.world.rank :: self.world.size]
        found: dict[int, tuple[float, bool]] = {}
        passes = -(-len(order) // (self.world.size * self.batch))  # the same number on every rank
        with progress(what, passes, self.say, shared=True) as advance:
            for start in range(0, passes * self.batch, self.batch):
                self._check()
                numbers = mine[start : start + self.batch]
                results = self._pass([pairs[n] for n in numbers or order[:1]])
                found |= dict(zip(numbers, results, strict=False))
                advance(1)
        return self._gathered(found, len(pairs))

    def _pass(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Run one forward pass over some sequences, which are packed into one row."""
        model, limit = self.model, self.positions
        cut = [([*a, *b][-limit:], min(len(b), limit - 1)) for a, b in pairs]  # ids, number of continuation tokens
        lengths = torch.tensor([[len(ids) for ids, _ in cut]])
        ids = torch.tensor([[token for sequence, _ in cut for token in sequence]])
        ends = lengths[0].cumsum(0).tolist()
        rows = [n for (_, count), end in zip(cut, ends, strict=True) for n in range(end - count - 1, end - 1)]
        at = torch.tensor(rows, dtype=torch.int64, device=self.world.device)
        layout = model.lay_out(ids, seq_lens=lengths).to(self.world.device)
        ids = ids.to(self.world.device)
        with self.autocast():
            hidden = model.run_backbone(ids, layout, None, None, None).hidden.index_select(0, at)
            weight, targets = model.head.full_weight(), ids[0].index_select(0, at + 1)
            log_probs = token_log_probs(hidden, weight, targets)[0].double().cpu()
            hits = is_likeliest(hidden, weight, targets).cpu()
        counts = [count for _, count in cut]
        parts = zip(log_probs.split(counts), hits.split(counts), strict=True)
        return [(float(values.sum()), bool(right.all())) for values, right in parts]

    @torch.no_grad()
    def answers(self, questions: Sequence[Question], what: str) -> list[str]:
        """Generate the greedy continuation of each prompt, without the end-of-sequence token.

        Tokens are removed from the beginning of prompts that are too long to leave room for an answer. If the model is
        split over processes, all ranks must run the same number of steps, so `max_tokens` tokens are generated for
        every answer, and the tokens after its end are removed.

        Raises:
            Stopped: a rank was asked to stop.
        """
        spread = max(self.model.parallel.experts.size, self.model.parallel.tables.size) > 1
        ranks, rank = (1, 0) if spread else (self.world.size, self.world.rank)
        mine = range(len(questions))[rank::ranks]
        found: dict[int, str] = {}
        blocks = -(-len(questions) // (ranks * self.batch))
        with progress(what, blocks, self.say, shared=True) as advance:
            for start in range(0, blocks * self.batch, self.batch):
                self._check()
                numbers = mine[start : start + self.batch]
                found |= dict(zip(numbers, self._write([questions[n] for n in numbers], not spread), strict=True))
                advance(1)
        return self._gathered(found, len(questions))

    def _write(self, questions: Sequence[Question], early: bool) -> list[str]:
        """Answer some questions in one batch. early: whether an answer may end before `max_tokens`."""
        eos = special_ids(self.tokenizer).eos
        ends = frozenset({eos} if early else ())
        generator = Generator(self.model, max_running=self.batch)
        texts: dict[int, str] = {}
        asked: dict[int, Question] = {}
        for question in questions:
            prompt = question.prompt[-max(1, self.positions - question.max_tokens) :]
            asked[generator.submit(Request(tuple(prompt), question.max_tokens, 0.0, stop=ends))] = question
        while generator.in_flight:
            finished = generator.step()
            texts |= {sample.id: self._text(sample.tokens, eos) for sample in finished}
            for running in generator.running if early else ():
                if asked[running.sample.id].done(self._text(running.sample.tokens, eos)):
                    running.sample.finish = "stop"  # the generator removes it in its next step
        return [texts[number] for number in sorted(texts)]

    def _text(self, tokens: list[int], eos: int) -> str:
        return self.tokenizer.decode(
            tokens[: tokens.index(eos)] if eos in tokens else tokens, skip_special_tokens=False
        )

    def _check(self) -> None:
        if self.world.any(self.stop()):
            raise Stopped

    def _gathered(self, mine: dict, count: int) -> list:
        """Gather the results of all ranks, in the order of the questions."""
        every: dict = {}
        for part in self.world.gather(mine):
            every |= part
        return [every[number] for number in range(count)]
