"""The kernel that lists likeliest tokens in Triton's interpreter, against torch.

The interpreter must be chosen before Triton is imported: `test_tree_attention.py` runs this file in a separate
process. The interpreter stores bfloat16 as raw bits, so tests use float16 and float32.
"""

import pytest
import torch

from lookahead.backends.forward_result import pack_likeliest, unpack_likeliest
from lookahead.backends.likeliest_kernel import PART, list_largest, lists_alike


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "vocabulary", "count"), [(3, 211, 8), (2, 3 * PART, 1), (2, 2 * PART + 3, 8), (1, PART + 1, 12), (2, 5, 5)]
)
def test_likeliest_tokens_are_those_of_torch(dtype: torch.dtype, rows: int, vocabulary: int, count: int) -> None:
    logits = (4 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(count))).to(dtype)
    found = unpack_likeliest(list_largest(logits, count).numpy(), count)
    expected = unpack_likeliest(pack_likeliest(logits, count).numpy(), count)
    assert found.predictions is not None
    assert expected.predictions is not None
    assert found.predictions.tolist() == logits.argmax(dim=-1).tolist() == expected.predictions.tolist()
    values = logits.float().numpy()
    for row in range(rows):
        assert values[row][found.ids[row]].tolist() == values[row][expected.ids[row]].tolist()
        assert len(set(found.ids[row].tolist())) == count
    assert found.probabilities == pytest.approx(expected.probabilities, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_equal_and_invalid_logits_are_listed_like_torch_lists_them(dtype: torch.dtype) -> None:
    assert lists_alike(dtype, torch.device("cpu"))


def test_rows_of_a_wider_tensor_are_listed() -> None:
    wide = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    assert torch.equal(list_largest(wide[:, :211], 4), list_largest(wide[:, :211].contiguous(), 4))
