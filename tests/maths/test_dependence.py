"""Utility and ranking of latents, by hand."""

from __future__ import annotations

import torch

from realvr.maths import credit
from realvr.maths.dependence import ranked, utility


def test_utility_is_what_the_answer_loses() -> None:
    """eq:slot_utility: positive where the original latent makes the answer more likely."""
    logp_B, replaced_BK = torch.tensor([-1.0, -3.0]), torch.tensor([[-1.5, -1.0], [-2.0, -10.0]])
    assert utility(logp_B, replaced_BK).tolist() == [[0.5, 0.0], [-1.0, 7.0]]
    exact = utility(logp_B.double(), replaced_BK.double())
    assert exact.dtype == torch.float64
    assert utility(logp_B.bfloat16(), replaced_BK.bfloat16()).dtype == torch.float32


def test_slots_are_ranked_by_falling_score_and_the_first_of_equals_first() -> None:
    assert ranked(torch.tensor([0.1, 0.3, 0.3, 0.0, 0.5])) == [4, 1, 2, 0, 3]
    assert ranked(torch.zeros(4)) == [0, 1, 2, 3] and ranked(torch.ones(1)) == [0]
    assert ranked(torch.zeros(4), [2, 0, 3, 1]) == [2, 0, 3, 1]
    assert ranked(torch.tensor([0.1, 0.3, 0.3, 0.0, 0.5]), [2, 0, 4, 3, 1]) == [4, 2, 1, 0, 3]


def test_answers_side_by_side_have_rows_of_their_own() -> None:
    content_BYS = torch.tensor([[[0, 1, 1], [1, 0, 0]], [[1, 1, 1], [0, 0, 0]]])
    rows = credit.own_rows(content_BYS).int().tolist()
    assert rows == [[[0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0]], [[1, 1, 1, 0, 0, 0], [0] * 6]]
