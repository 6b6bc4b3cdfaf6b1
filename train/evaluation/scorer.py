"""Runs a language model over questions, shared by the processes: likelihoods of given texts, and greedy answers."""

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

Pair = tuple[Sequence[int], Sequence[int]]  # token ids: the context, and what follows it


class Stopped(Exception):
    """The evaluation was asked to stop; raised on all ranks at the same place."""


@dataclass(frozen=True)
class Question:
    """A text to continue greedily: until `done(text so far)`, the end-of-sequence token or `max_tokens`."""

    prompt: Sequence[int]
    max_tokens: int
    done: Callable[[str], bool] = lambda text: False


@dataclass
class Scorer:
    """A model to ask. All ranks call the same methods with the same arguments, and all get all results.

    batch: sequences of one forward pass of a process. autocast: the arithmetic of
    a pass for likelihoods; answers are written as in rollouts, without it. stop: whether this rank was
    asked to stop. say: takes lines about the progress; None: shown on standard error by the first rank.
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
        """The most tokens of a sequence."""
        return self.model.config.text.max_position_embeddings

    @torch.no_grad()
    def likelihoods(self, pairs: Sequence[Pair], what: str) -> list[tuple[float, bool]]:
        """For each pair, the log-probability of what follows in nats, and whether greedy decoding would write it.

        Sequences longer than the model's positions lose their beginning.

        Raises:
            Stopped: some rank was asked to stop.
        """
        order = sorted(range(len(pairs)), key=lambda n: -len(pairs[n][0]) - len(pairs[n][1]))
        mine = order[self.world.rank :: self.world.size]
        found: dict[int, tuple[float, bool]] = {}
        passes = -(-len(order) // (self.world.size * self.batch))  # of every rank: they run the model together
        with progress(what, passes, self._say()) as advance:
            for start in range(0, passes * self.batch, self.batch):
                self._check()
                numbers = mine[start : start + self.batch]
                results = self._pass([pairs[n] for n in numbers or order[:1]])
                found |= dict(zip(numbers, results, strict=False))
                advance(1)
        return self._gathered(found, len(pairs))

    def _pass(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """One forward pass over sequences packed into one row."""
        model, limit = self.model, self.positions
        cut = [([*a, *b][-limit:], min(len(b), limit - 1)) for a, b in pairs]  # ids, tokens to judge
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
        """The greedy continuation of each prompt, without the end-of-sequence token. Prompts that leave no room for
        their answers lose their beginning.

        A model that is split over processes answers everything on all of them in equally many steps, so each of its
        answers runs to `max_tokens` and is cut afterwards.

        Raises:
            Stopped: some rank was asked to stop.
        """
        spread = max(self.model.parallel.experts.size, self.model.parallel.tables.size) > 1
        ranks, rank = (1, 0) if spread else (self.world.size, self.world.rank)
        mine = range(len(questions))[rank::ranks]
        found: dict[int, str] = {}
        blocks = -(-len(questions) // (ranks * self.batch))
        with progress(what, blocks, self._say()) as advance:
            for start in range(0, blocks * self.batch, self.batch):
                self._check()
                numbers = mine[start : start + self.batch]
                found |= dict(zip(numbers, self._write([questions[n] for n in numbers], not spread), strict=True))
                advance(1)
        return self._gathered(found, len(questions))

    def _write(self, questions: Sequence[Question], early: bool) -> list[str]:
        """Answer some questions at once. early: an answer may end before `max_tokens`."""
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
                    running.sample.finish = "stop"  # the generator lets it go with the next step
        return [texts[number] for number in sorted(texts)]

    def _text(self, tokens: list[int], eos: int) -> str:
        return self.tokenizer.decode(
            tokens[: tokens.index(eos)] if eos in tokens else tokens, skip_special_tokens=False
        )

    def _check(self) -> None:
        if self.world.any(self.stop()):
            raise Stopped

    def _say(self) -> Callable[[str], None] | None:
        return self.say if self.world.first else _nothing

    def _gathered(self, mine: dict, count: int) -> list:
        """The results of all ranks in the order of the questions."""
        every: dict = {}
        for part in self.world.gather(mine):
            every |= part
        return [every[number] for number in range(count)]


def _nothing(line: str) -> None:
    """Where the lines of ranks other than the first go."""
