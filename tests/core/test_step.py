"""The step over sequences that join and leave, like requests, against `model.generate`."""

from collections.abc import Sequence

import pytest
import torch
from transformers import PreTrainedModel

from lookahead import LookaheadConfig, StepRecord
from lookahead.backends.transformers.noise import SamplingNoise
from lookahead.backends.transformers.runner import ModelRunner
from lookahead.backends.transformers.sampler import TextSampler, TextSequence
from lookahead.core.protocols import Backend
from lookahead.core.results import JoinedOutputs
from lookahead.core.step import Batch, step
from lookahead.core.token_tree import TokenTree
from lookahead.drafting import build_drafter
from model_zoo import VOCAB_SIZE, build


class ComingAndGoing(Backend):
    """A backend with a runner per row; rows join and leave."""

    def __init__(self) -> None:
        self.rows: list[ModelRunner] = []

    def idle_tree(self) -> TokenTree:
        raise AssertionError("a row that has finished has left")

    def begin_tree(self, row: int, text: Sequence[int]) -> TokenTree:
        return self.rows[row].begin_tree(0, text)

    def wants_draft(self, tree: TokenTree) -> bool:
        return self.rows[0].wants_draft(tree)

    def forward(self, trees: Sequence[TokenTree], top_k: int = 0) -> JoinedOutputs:
        return JoinedOutputs([row.forward([tree], top_k)[0] for row, tree in zip(self.rows, trees, strict=True)])

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        for row, nodes in zip(self.rows, kept, strict=True):
            row.commit([nodes])


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@torch.no_grad()
def test_sequences_join_and_leave_between_steps(sample: bool) -> None:
    model: PreTrainedModel = build("llama")
    random = torch.Generator().manual_seed(4)
    requests = [
        (0, 9, 12),
        (0, 5, 30),
        (2, 7, 4),
        (3, 12, 20),
        (9, 6, 16),
    ]  # step of joining, prompt length, new tokens
    prompts = [torch.randint(VOCAB_SIZE, (1, length), generator=random).repeat(1, 2) for _, length, _ in requests]
    records: list[list[StepRecord]] = [[] for _ in requests]
    backend, sequences, texts = ComingAndGoing(), list[TextSequence](), {}
    batch = Batch(sequences)
    together = 0
    for time in range(200):
        for index, (joins, length, new_tokens) in enumerate(requests):
            if joins == time:
                backend.rows.append(ModelRunner(model, 1))
                end = 2 * length + new_tokens
                noise = SamplingNoise(generator=torch.Generator().manual_seed(index)) if sample else None
                sampler = TextSampler(noise=noise)
                drafter = build_drafter(LookaheadConfig(step_budget=8 + index))
                sequences.append(
                    TextSequence(
                        prompts[index],
                        prompts[index][0].tolist(),
                        drafter,
                        sampler,
                        lambda text, end=end: len(text.tokens) >= end,
                        listeners=[records[index].append],
                        index=index,
                    )
                )
        if not sequences:
            break
        together = max(together, len(sequences))
        step(backend, batch)
        for row in reversed(range(len(sequences))):
            if sequences[row].finished:
                gone = sequences.pop(row)
                texts[gone.index] = gone.ids
                del backend.rows[row]
    assert together >= 3
    for index, (_, length, new_tokens) in enumerate(requests):
        torch.manual_seed(index)  # the same draws as a generator with this seed
        options = {"do_sample": True, "top_k": 0} if sample else {"do_sample": False}
        expected = model.generate(prompts[index], max_new_tokens=new_tokens, **options)
        assert torch.equal(texts[index], expected), index
        assert [token for record in records[index] for token in record.tokens] == expected[0, 2 * length :].tolist()
        assert [record.step for record in records[index]] == list(range(1, len(records[index]) + 1))
        assert {record.index for record in records[index]} == {index}
        assert [record.finished for record in records[index]] == [False] * (len(records[index]) - 1) + [True]
    steps = [record for of_batch in records for record in of_batch]
    assert batch.statistics.tokens == sum(len(record.tokens) for record in steps)
    assert batch.statistics.steps < len(steps)
